// Grouped-query attention of a draft block over a ring of context keys and values and the block's own, without a mask.
//
// A block of threads has 64 query rows of one key/value head of one row: query m = (head of the group) * block + token.
// Keys stand in tiles of 64: tile 0 of chunk 0 is the draft block's own (at most 16), then places 0, 1, ... of the ring:
// order means nothing to attention, and all places below C = min(length, capacity) are valid.
//
// LAW 1.  Chunks of 256 places; the chunks of a row depend on its own length only.  Each chunk gives (m, l, o): the tiles
// in order with a running maximum, from nothing.  Chunks are merged in order, `merge` below, from (-inf, 0, 0).  The split
// form writes one chunk per block of threads and `draft_combine` merges; the whole form walks all chunks and merges as it
// goes: the same operations on the same numbers.  A query row is a row of the mma and a key head is its own, so neither
// other queries nor other rows matter.
#include "../rounded.cuh"

#ifndef D
#define D 128            // width of a head: 64 or 128
#endif
#ifndef SPLIT
#define SPLIT 1          // 1: a block of threads has one chunk and writes partials; 0: it has all chunks and writes results
#endif
constexpr int TILE = 64, CHUNK = 256, STAGES = SPLIT ? 3 : 2, WARPS = 4, QUERIES = 16 * WARPS, OWN_KEYS = 16;
constexpr int PIECES = D / 8, ROW = D * 2, HALF_STAGE = TILE * ROW, STAGE = 2 * HALF_STAGE;      // bytes; keys, then values


// (M, L) <- (M, L) + (m, l); the factors for their o's are a and b.
__device__ __forceinline__ void merge(float& M, float& L, float m, float l, float& a, float& b) {
  const float top = fmaxf(M, m);
  a = exp2_fast(sub_rn(M, top)); b = exp2_fast(sub_rn(m, top));
  L = fma_rn(L, a, mul_rn(l, b));
  M = top;
}
__device__ __forceinline__ float merged(float O, float a, float o, float b) { return fma_rn(O, a, mul_rn(o, b)); }

__device__ __forceinline__ int context_of(const long long* lengths, int row, int capacity) {
  const long long length = load_long(lengths + row);
  return length < capacity ? (int)length : capacity;
}
__device__ __forceinline__ int chunks_of(int context) { return context ? (context + CHUNK - 1) / CHUNK : 1; }

#ifdef ATTEND
// What a block of threads reads.
struct Keys {
  const bf16 *ring_k, *ring_v, *own_k, *own_v;   // place 0 and token 0 of this key head
  int ring_stride, own_stride, context, own;     // elements, elements, valid places, valid tokens
  bool first;                                    // chunk 0: its first tile is the block's own
  int place0;                                    // first place

  __device__ __forceinline__ int tiles(int places) const { return (first ? 1 : 0) + (places + TILE - 1) / TILE; }
  __device__ __forceinline__ int valid(int tile) const {
    if (first && tile == 0) return own;
    return min(TILE, context - place0 - (tile - (first ? 1 : 0)) * TILE);
  }
  // Keys at chunk c ^ 4*(key&1), values at chunk c ^ (key&7) of their row: no bank conflicts in either product.
  __device__ __forceinline__ void load(int tile, u32 to) const {
    constexpr int PASS = 32 * WARPS / PIECES;    // keys at a time: a multiple of 8, so a thread's place in a row is fixed
    const bool mine = first && tile == 0;
    const int count = valid(tile), start = mine ? 0 : place0 + (tile - (first ? 1 : 0)) * TILE;
    const int key = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
    const long long stride = mine ? own_stride : ring_stride, from = (start + key) * stride + c * 8;
    const bf16 *k = (mine ? own_k : ring_k) + from, *v = (mine ? own_v : ring_v) + from;
    const u32 to_k = to + key * ROW + (c ^ ((key & 1) << 2)) * 16, to_v = to + HALF_STAGE + key * ROW + (c ^ (key & 7)) * 16;
#pragma unroll
    for (int i = 0; i < TILE / PASS; i++) {
      const bool on = key + i * PASS < count;
      copy16_or_zero(on, to_k + i * PASS * ROW, on ? k : own_k);
      copy16_or_zero(on, to_v + i * PASS * ROW, on ? v : own_v);
      k += PASS * stride; v += PASS * stride;
    }
  }
};

struct State {           // of this lane's two query rows: g and g + 8
  float m[2], l[2], o[D / 8][4];
  __device__ __forceinline__ void clear() {
    m[0] = m[1] = minus_infinity(); l[0] = l[1] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) o[i][k] = 0.f;
  }
};

// One tile of keys: s = q k * scale, a running softmax, o += p v.  q: A fragments with the order of K inside 32 that makes
// the B fragments of a key 16 bytes k[32b + 8 (lane%4) ..].
__device__ __forceinline__ void add_tile(State& x, const u32 (&q)[D / 16][4], u32 at, int valid, float scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  float s[TILE / 8][4];
#pragma unroll
  for (int n = 0; n < TILE / 8; n++) {
    const u32 row = at + (n * 8 + g) * ROW;
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
      const uint4 k = shared_load16(row + ((b * 4 + c) ^ ((g & 1) << 2)) * 16);
      if (b == 0) mma_first(s[n], q[0], k.x, k.y); else mma(s[n], q[2 * b], k.x, k.y);
      mma(s[n], q[2 * b + 1], k.z, k.w);
    }
  }
  float top[2] = {x.m[0], x.m[1]};
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[n][i] = n * 8 + c * 2 + (i & 1) < valid ? mul_rn(s[n][i], scale) : minus_infinity();
      top[i >> 1] = fmaxf(top[i >> 1], s[n][i]);
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    top[h] = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], 2));
    const float shrink = exp2_fast(sub_rn(x.m[h], top[h]));
    x.m[h] = top[h];
    x.l[h] = mul_rn(x.l[h], shrink);
#pragma unroll
    for (int i = 0; i < D / 8; i++) { x.o[i][2 * h] = mul_rn(x.o[i][2 * h], shrink); x.o[i][2 * h + 1] = mul_rn(x.o[i][2 * h + 1], shrink); }
  }
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[n][i] = exp2_fast(sub_rn(s[n][i], top[i >> 1]));
      x.l[i >> 1] = add_rn(x.l[i >> 1], s[n][i]);
    }
  const u32 value = at + HALF_STAGE + (lane & 15) * ROW;       // key lane%16, and lane/16 picks the left or right 8 columns
#pragma unroll
  for (int t = 0; t < TILE / 16; t++) {
    const u32 p[4] = {pack_bf16(s[2 * t][0], s[2 * t][1]), pack_bf16(s[2 * t][2], s[2 * t][3]),
                      pack_bf16(s[2 * t + 1][0], s[2 * t + 1][1]), pack_bf16(s[2 * t + 1][2], s[2 * t + 1][3])};
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      u32 v[4];
      ldmatrix4_trans(v, value + t * 16 * ROW + ((2 * j + (lane >> 4)) ^ (lane & 7)) * 16);
      mma(x.o[2 * j], p, v[0], v[1]);
      mma(x.o[2 * j + 1], p, v[2], v[3]);
    }
  }
}

__device__ __forceinline__ void sum_quads(State& x) {            // a row's l lives in four lanes
#pragma unroll
  for (int h = 0; h < 2; h++) {
    x.l[h] += __shfl_xor_sync(ALL_LANES, x.l[h], 1);
    x.l[h] += __shfl_xor_sync(ALL_LANES, x.l[h], 2);
  }
}

// Grid (SPLIT ? chunks of the capacity : 1, kv_heads * groups, rows), groups = ceil(share * block / 64).
// qkv [rows, block, (share + 2) * kv_heads, D] normed and turned; ring [rows_total, capacity, kv_heads, D] of one layer;
// lengths, ids [rows]; out [rows, block, share * kv_heads, D].  part_o [rows, kv_heads, chunks, share * block, D] and
// part_ml [..., 2] are for SPLIT.  scale: softmax scale * log2(e).  Shared memory: STAGES * STAGE bytes, and D * 256 more
// for the whole form.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
draft_attend(const bf16* qkv, const bf16* ring_k, const bf16* ring_v, const long long* lengths, const long long* ids,
             const int* rows, bf16* out, float* part_o, float* part_ml, int block, int share, int kv_heads, int capacity,
             int chunks, float scale) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 base = shared_address(smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int queries = share * block, groups = (queries + QUERIES - 1) / QUERIES;
  const int kv = blockIdx.y / groups, row = blockIdx.z, m0 = blockIdx.y % groups * QUERIES + warp * 16;
  pdl_wait();
  pdl_go();
  if (rows && row >= load_int(rows)) return;
  const int context = context_of(lengths, row, capacity), chunk = SPLIT ? blockIdx.x : 0;
  if (chunk >= chunks_of(context)) return;
  const int heads = (share + 2) * kv_heads, q_heads = share * kv_heads;
  const bf16* own = qkv + (long long)row * block * heads * D;
  const long long ring = load_long(ids + row) * capacity * kv_heads * D + kv * D;
  const Keys keys = {ring_k + ring, ring_v + ring, own + (q_heads + kv) * D, own + (q_heads + kv_heads + kv) * D,
                     kv_heads * D, heads * D, context, block, chunk == 0, chunk * CHUNK};
  const int tiles = keys.tiles(SPLIT ? min(CHUNK, context - chunk * CHUNK) : context);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < tiles) keys.load(i, base + i * STAGE);
    copy_commit();
  }
  u32 q[D / 16][4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = m0 + g + 8 * h < queries ? m0 + g + 8 * h : 0;
    const bf16* from = own + ((long long)(m % block) * heads + kv * share + m / block) * D + c * 8;
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
      const uint4 w = load16(from + b * 32);
      q[2 * b][h] = w.x; q[2 * b][2 + h] = w.y; q[2 * b + 1][h] = w.z; q[2 * b + 1][2 + h] = w.w;
    }
  }
  State now;
  now.clear();
#if !SPLIT
  float M[2] = {minus_infinity(), minus_infinity()}, L[2] = {0.f, 0.f};
  float* all = reinterpret_cast<float*>(smem + STAGES * STAGE) + threadIdx.x;   // o of the merged chunks: [D / 2][threads]
#pragma unroll
  for (int k = 0; k < D / 2; k++) all[k * 32 * WARPS] = 0.f;
#endif
  const bool on = m0 < queries;                  // the whole warp
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < tiles; i++) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    const int next = slot == 0 ? STAGES - 1 : slot - 1;            // the slot that everybody left at the last step
    if (i + STAGES - 1 < tiles) keys.load(i + STAGES - 1, base + next * STAGE);
    copy_commit();
    if (on) add_tile(now, q, base + slot * STAGE, keys.valid(i), scale);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
#if !SPLIT
    if (i + 1 == tiles || (i && i % (CHUNK / TILE) == 0)) {        // tile 0 is the block's own: chunks end after 4, 8, ...
      sum_quads(now);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float a, b;
        merge(M[h], L[h], now.m[h], now.l[h], a, b);
#pragma unroll
        for (int k = 0; k < D / 8; k++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) {
            float& o = all[(4 * k + e) * 32 * WARPS];
            o = merged(o, a, now.o[k][e], b);
          }
      }
      now.clear();
    }
#endif
  }
  copy_wait<0>();
#if SPLIT
  sum_quads(now);
#endif
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = m0 + g + 8 * h;
    if (m >= queries) continue;
#if SPLIT
    const long long at = (((long long)row * kv_heads + kv) * chunks + chunk) * queries + m;
    if (c == 0) *reinterpret_cast<float2*>(part_ml + at * 2) = make_float2(now.m[h], now.l[h]);
#pragma unroll
    for (int k = 0; k < D / 8; k++)
      *reinterpret_cast<float2*>(part_o + at * D + k * 8 + c * 2) = make_float2(now.o[k][2 * h], now.o[k][2 * h + 1]);
#else
    const float whole = rcp_rn(L[h]);
    bf16* to = out + (((long long)row * block + m % block) * q_heads + kv * share + m / block) * D;
#pragma unroll
    for (int k = 0; k < D / 8; k++)
      *reinterpret_cast<u32*>(to + k * 8 + c * 2) = pack_bf16(mul_rn(all[(4 * k + 2 * h) * 32 * WARPS], whole),
                                                              mul_rn(all[(4 * k + 2 * h + 1) * 32 * WARPS], whole));
#endif
  }
}
#endif

#ifdef COMBINE
// A warp merges the chunks of one query: grid (ceil(share * block / 4), kv_heads, rows), 128 threads.
extern "C" __global__ void __launch_bounds__(128)
draft_combine(const float* part_o, const float* part_ml, const long long* lengths, const int* rows, bf16* out, int block,
              int share, int kv_heads, int capacity, int chunks) {
  constexpr int OWN = D / 32;
  const int queries = share * block, m = blockIdx.x * 4 + (threadIdx.x >> 5), kv = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x & 31;
  pdl_wait();
  pdl_go();
  if (m >= queries || (rows && row >= load_int(rows))) return;
  const int live = chunks_of(context_of(lengths, row, capacity));
  const long long first = ((long long)row * kv_heads + kv) * chunks * queries + m;
  const float* o = part_o + first * D + lane * OWN;
  const float* ml = part_ml + first * 2;
  float M = minus_infinity(), L = 0.f, all[OWN];
#pragma unroll
  for (int k = 0; k < OWN; k++) all[k] = 0.f;
#pragma unroll 8
  for (int s = 0; s < live; s++) {
    float a, b, part[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) part[k] = o[(long long)s * queries * D + k];
    merge(M, L, ml[(long long)s * queries * 2], ml[(long long)s * queries * 2 + 1], a, b);
#pragma unroll
    for (int k = 0; k < OWN; k++) all[k] = merged(all[k], a, part[k], b);
  }
  const float whole = rcp_rn(L);
  bf16* to = out + (((long long)row * block + m % block) * share * kv_heads + kv * share + m / block) * D + lane * OWN;
#pragma unroll
  for (int k = 0; k < OWN; k += 2) *reinterpret_cast<u32*>(to + k) = pack_bf16(mul_rn(all[k], whole), mul_rn(all[k + 1], whole));
}
#endif
