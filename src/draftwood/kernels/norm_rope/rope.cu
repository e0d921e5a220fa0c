// Rotary positions of query heads, and the drafter's norm + rotation of its heads and its ring write.
// A lane holds 8 values; a head of D values belongs to D / 8 neighbouring lanes.
#include "pieces.cuh"

#ifdef P_WIDTH
// The target's queries: the last P_WIDTH values of each head, turned in pairs: grid (n, ceil(heads*P_WIDTH/8 / 128)).
// from and to point at the rotary part of row 0, head 0 and may be the same. By rule (d) of common.cuh beside the kernel before.
extern "C" __global__ void __launch_bounds__(128)
query_rope(const bf16* from, bf16* to, const float2* turns, const long long* positions, const int* rows, int heads,
           long long from_stride, long long from_head, long long to_stride, long long to_head, int table) {
  const int row = blockIdx.x, i = blockIdx.y * 128 + threadIdx.x;
  const int head = i / (P_WIDTH / 8), c = i % (P_WIDTH / 8) * 8;
  go_beside();
  if (head < heads) {
    const int live = rows ? load_new(rows) : row + 1;  // all loads before the first is waited for
    const long long position = load_new(positions + row);
    const uint4 raw = load16_new(from + row * from_stride + head * from_head + c);
    float2 turn[4];
    load_turns(turn, turns_at(turns, position, table, P_WIDTH / 2) + c / 2);
    if (row < live) {
      float v[8];
      unpack8(v, raw);
      turn_pairs(v, turn);
      store16(to + row * to_stride + head * to_head + c, pack8(v));
    }
  }
  pdl_wait();
}
#endif

#ifdef D
#ifndef PAIRS
#define PAIRS 0          // 1: the heads' values are stored so that (2i, 2i+1) turn together (layers.halves_to_pairs)
#endif
constexpr int LANES = D / 8;
static_assert(LANES >= 4 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "a head is 32..256 values, a power of two");

// Norm and turn one head in place of its lanes' values.  All lanes of the warp call it.
__device__ __forceinline__ void norm_turn(float (&v)[8], const bf16* weight, const float2* turn, int chunk, float eps) {
  float sum = squares(v);
#pragma unroll
  for (int d = LANES / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, d);
  normalise(v, scale_of(sum, D, eps), load16_once(weight + chunk * 8));
  round8(v);
  if (PAIRS) turn_pairs(v, turn + chunk * 4);
  else turn_halves(v, turn + chunk % (LANES / 2) * 8, LANES / 2, chunk >= LANES / 2);
}

// The block's queries and keys, in place: grid (rows * block, ceil((q_heads + kv_heads) * LANES / 128)).
// qkv [rows * block, q_heads + 2 kv_heads, D]: queries, keys, values.  Token t of row r stands at lengths[r] + t.
extern "C" __global__ void __launch_bounds__(128)
head_norm_rope(bf16* qkv, const bf16* q_weight, const bf16* k_weight, const float2* turns, const long long* lengths,
               const int* rows, int block, int q_heads, int kv_heads, long long stride, int table, float eps) {
  const int token = blockIdx.x, row = token / block, i = blockIdx.y * 128 + threadIdx.x;
  const int head = i / LANES, chunk = i % LANES;
  go_and_wait();
  const bool on = head < q_heads + kv_heads;
  bf16* at = qkv + token * stride + (on ? head : 0) * D + chunk * 8;
  const int live = rows ? load_int(rows) : row + 1;   // all loads before the first is waited for
  const long long length = load_long(lengths + row);
  const uint4 raw = load16(at);
  if (row >= live) return;
  float v[8];
  unpack8(v, raw);
  const float2* turn = turns_at(turns, length + token % block, table, D / 2);
  norm_turn(v, head < q_heads ? q_weight : k_weight, turn, chunk, eps);
  if (on) store16(at, pack8(v));
}

// Context keys and values of accepted tokens into the rings: grid (rows * path, ceil(layers * kv_heads * LANES / 128)).
// kv [rows * path, 2, layers, kv_heads, D]: keys of all layers, then values.  Token i of row r stands at position
// lengths[r] + i; it is written if i < counts[r] and it is one of the newest `capacity` of them, at place position %
// capacity of ring [layers, rows_total, capacity, kv_heads, D], row ids[r].
extern "C" __global__ void __launch_bounds__(128)
ring_write(const bf16* kv, const bf16* k_weights, const float2* turns, const long long* lengths, const long long* counts,
           const long long* ids, const int* rows, bf16* keys, bf16* values, int path, int layers, int kv_heads,
           long long stride, long long rows_total, int capacity, int table, float eps) {
  const int token = blockIdx.x, row = token / path, place = token % path, i = blockIdx.y * 128 + threadIdx.x;
  const int head = i / LANES, chunk = i % LANES, heads = layers * kv_heads;
  pdl_wait();
  pdl_go();
  if (rows && row >= load_int(rows)) return;
  const long long count = load_long(counts + row);
  if (place >= count || place < count - capacity) return;
  const bool on = head < heads;
  const int layer = on ? head / kv_heads : 0;
  const bf16* from = kv + token * stride + (on ? head : 0) * D + chunk * 8;
  float v[8];
  unpack8(v, load16(from));
  const long long position = load_long(lengths + row) + place;
  norm_turn(v, k_weights + layer * D, turns_at(turns, position, table, D / 2), chunk, eps);
  if (!on) return;
  const long long slot = (layer * rows_total + load_long(ids + row)) * capacity + position % capacity;
  const long long to = (slot * kv_heads + head % kv_heads) * D + chunk * 8;
  store16(keys + to, pack8(v));
  store16(values + to, load16(from + (long long)heads * D));
}
#endif
