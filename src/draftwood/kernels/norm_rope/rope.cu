// The target's rotations and the write of its latents; the drafter's norm + rotation of its heads and its ring write.
// A lane holds 8 values; a head of D values belongs to D / 8 neighbouring lanes.
#include "pieces.cuh"

#ifdef P_WIDTH
// What attention reads of a step's nodes, beside the absorption of keys (rule (d) of common.cuh). Grid (n, ceil(heads * P_WIDTH /
// 1024) + 1). The first blocks of a row turn the rotary parts of its queries in pairs, in place (row 0, head 0 at `queries`); the
// last one has its latent of the fused down projection [latent L_WIDTH | rotary key P_WIDTH]: cache[slot] <- norm of the latent,
// then the key turned by its position. A negative slot is written nowhere.
constexpr int L_WARPS = (L_WIDTH / 8 + 31) / 32, CACHE = L_WIDTH + P_WIDTH, TURN_THREADS = 128;
static_assert(L_WIDTH % 8 == 0 && P_WIDTH % 8 == 0 && P_WIDTH <= 256 && 32 * (L_WARPS + 1) <= TURN_THREADS, "one warp of keys");

extern "C" __global__ void __launch_bounds__(TURN_THREADS)
turn_and_store(bf16* queries, const bf16* latents, const bf16* l_weight, const float2* turns, const long long* positions,
               const long long* slots, const int* rows, bf16* cache, int heads, long long query_stride, long long head_stride,
               long long latent_stride, int table, float eps) {
  __shared__ float sums[L_WARPS];
  const int row = blockIdx.x, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const bool has_latent = blockIdx.y == gridDim.y - 1, is_l = has_latent && warp < L_WARPS;
  const int i = blockIdx.y * TURN_THREADS + tid, head = i / (P_WIDTH / 8);
  const int c = (is_l ? tid : has_latent ? lane : i % (P_WIDTH / 8)) * 8;                  // within its part
  const bool on = has_latent ? (is_l ? c < L_WIDTH : warp == L_WARPS && c < P_WIDTH) : head < heads;
  uint4 w = make_uint4(0, 0, 0, 0), raw = w;
  if (on && is_l) w = load16_once(l_weight + c);
  go_beside();
  bf16* query = queries + row * query_stride + (has_latent ? 0 : head) * head_stride + c;
  const int live = rows ? load_new(rows) : row + 1;   // all loads before the first is waited for
  const long long position = load_new(positions + row), slot = has_latent ? load_new(slots + row) : 0;
  if (on) raw = load16_new(has_latent ? latents + row * latent_stride + (is_l ? 0 : L_WIDTH) + c : query);
  float2 turn[4] = {};
  if (on && !is_l) load_turns(turn, turns_at(turns, position, table, P_WIDTH / 2) + c / 2);
  if (row < live) {
    float v[8];
    unpack8(v, raw);
    if (has_latent) {
      const float sum = warp_sum(squares(v));
      if (is_l && lane == 0) sums[warp] = sum;
      __syncthreads();
    }
    if (is_l) normalise(v, scale_of(warp_sum(lane < L_WARPS ? sums[lane] : 0.f), L_WIDTH, eps), w);
    else turn_pairs(v, turn);
    if (on && !has_latent) store16(query, pack8(v));
    else if (on && slot >= 0) store16(cache + slot * CACHE + (is_l ? 0 : L_WIDTH) + c, pack8(v));
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
