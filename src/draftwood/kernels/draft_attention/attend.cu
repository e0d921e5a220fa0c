// Grouped-query attention of a draft block over a ring of context keys and values and the block's own, without a mask.
//
// A block of threads has 64 query rows of one key/value head of one row: query m = (head of the group) * block + token.
// Keys stand in tiles of 64: tile 0 of chunk 0 is the draft block's own (at most 16), then places 0, 1, ... of the ring:
// order means nothing to attention, and all places below C = min(length, capacity) are valid.
//
// LAW 1.  Chunks of 128 places; the chunks of a row depend on its own length only.  Each chunk gives (m, l, o): the tiles
// in order with a running maximum, from nothing.  Chunks are merged in order, `merge` below, from (-inf, 0, 0).  The split
// form spreads the chunks over a cluster of blocks, and over groups of 4 warps in each, leaves them in global memory, and
// each block merges its share of the queries; the whole form walks all chunks and merges as it goes: the same operations on
// the same numbers.  A query row is a row of the mma and a key head is its own, so neither other queries nor other rows matter.
#include "../rounded.cuh"

#ifndef D
#define D 128            // width of a head: 64 or 128
#endif
#ifndef CLUSTER
#define CLUSTER 8        // blocks of a cluster that share a row's chunks: 2, 4 or 8; 1: a block of threads has them all
#endif
#define SPLIT (CLUSTER > 1)
#ifndef GROUPS
#define GROUPS 1         // of 4 warps, each with chunks of its own
#endif
#ifndef STAGES
#define STAGES 3         // tiles of keys and values in a group's ring
#endif
constexpr int TILE = 64, CHUNK = 128, WARPS = 4, QUERIES = 16 * WARPS, OWN_KEYS = 16;
constexpr int PIECES = D / 8, ROW = D * 2, HALF_STAGE = TILE * ROW, STAGE = 2 * HALF_STAGE;      // bytes; keys, then values

#if SPLIT && !defined(EMULATION)
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SHAPE
#endif
// What the blocks of a cluster wrote before it, to global memory too, is visible to all of them after it.
__device__ __forceinline__ void cluster_sync() {
#ifdef EMULATION
  __syncthreads();
#else
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ float2 load_part(const float* p) {    // not from L1: another multiprocessor wrote it
#ifdef EMULATION
  return {p[0], p[1]};
#else
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
#endif
}

// (M, L) <- (M, L) + (m, l); the factors for their o's are a and b.
__device__ __forceinline__ void merge(float& M, float& L, float m, float l, float& a, float& b) {
  const float top = fmaxf(M, m);
  a = exp2_fast(sub_rn(M, top)); b = exp2_fast(sub_rn(m, top));
  L = fma_rn(L, a, mul_rn(l, b));
  M = top;
}
__device__ __forceinline__ float merged(float O, float a, float o, float b) { return fma_rn(O, a, mul_rn(o, b)); }

__device__ __forceinline__ int chunks_of(int context) { return context ? (context + CHUNK - 1) / CHUNK : 1; }

// What a group of warps reads.
struct Keys {
  const bf16 *ring_k, *ring_v, *own_k, *own_v;   // place 0 and token 0 of this key head
  int ring_stride, own_stride, context, own;     // elements, elements, valid places, valid tokens

  __device__ __forceinline__ int tiles(int chunk) const {
    const int places = min(CHUNK, context - chunk * CHUNK);
    return (chunk == 0) + (places + TILE - 1) / TILE;
  }
  __device__ __forceinline__ bool mine(int chunk, int tile) const { return chunk == 0 && tile == 0; }
  __device__ __forceinline__ int place(int chunk, int tile) const { return chunk * CHUNK + (tile - (chunk == 0)) * TILE; }
  __device__ __forceinline__ int valid(int chunk, int tile) const {
    return mine(chunk, tile) ? own : min(TILE, context - place(chunk, tile));
  }
  // Keys at chunk c ^ 4*(key&1), values at chunk c ^ (key&7) of their row: no bank conflicts in either product.
  __device__ __forceinline__ void load(int chunk, int tile, u32 to) const {
    constexpr int PASS = 32 * WARPS / PIECES;    // keys at a time: a multiple of 8, so a thread's place in a row is fixed
    const bool self = mine(chunk, tile);
    const int count = valid(chunk, tile), start = self ? 0 : place(chunk, tile), thread = threadIdx.x % (32 * WARPS);
    const int key = thread / PIECES, c = thread % PIECES;
    const long long stride = self ? own_stride : ring_stride, from = (start + key) * stride + c * 8;
    const bf16 *k = (self ? own_k : ring_k) + from, *v = (self ? own_v : ring_v) + from;
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

// A group's way through its chunks: first, first + step, ... below `chunks`, tile by tile.
struct Cursor {
  int chunk, tile, tiles;
  __device__ __forceinline__ void begin(const Keys& keys, int first, int chunks) {
    chunk = first; tile = 0; tiles = first < chunks ? keys.tiles(first) : 0;
  }
  __device__ __forceinline__ bool valid() const { return tile < tiles; }
  __device__ __forceinline__ bool last() const { return tile + 1 == tiles; }
  __device__ __forceinline__ void next(const Keys& keys, int step, int chunks) {
    if (++tile < tiles) return;
    begin(keys, chunk + step, chunks);
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

// One tile of keys: s = q k * scale, a running softmax, o += p v.  query(i, w): A fragment of the i-th 16 values, with the order of
// K inside 32 that makes the B fragments of a key 16 bytes k[32b + 8 (lane%4) ..].
template <class Query>
__device__ __forceinline__ void add_tile(State& x, Query query, u32 at, int valid, float scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  float s[TILE / 8][4];
#pragma unroll
  for (int b = 0; b < D / 32; b++) {             // products that wait for each other stand 4 apart
    u32 q0[4], q1[4];
    query(2 * b, q0);
    query(2 * b + 1, q1);
#pragma unroll
    for (int h = 0; h < TILE / 8; h += 4) {
      uint4 k[4];
#pragma unroll
      for (int n = 0; n < 4; n++) k[n] = shared_load16(at + ((h + n) * 8 + g) * ROW + ((b * 4 + c) ^ ((g & 1) << 2)) * 16);
#pragma unroll
      for (int n = 0; n < 4; n++)
        if (b == 0) mma_first(s[h + n], q0, k[n].x, k[n].y); else mma(s[h + n], q0, k[n].x, k[n].y);
#pragma unroll
      for (int n = 0; n < 4; n++) mma(s[h + n], q1, k[n].z, k[n].w);
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

// Grid (CLUSTER, kv_heads * groups, rows), groups = ceil(share * block / 64); 128 * GROUPS threads.
// qkv [rows, block, (share + 2) * kv_heads, D] normed and turned; ring [rows_total, capacity, kv_heads, D] of one layer;
// lengths, ids [rows]; out [rows, block, share * kv_heads, D].  part_o [rows, kv_heads, chunks, share * block, D] and
// part_ml [..., 2] are for SPLIT.  scale: softmax scale * log2(e).  Shared memory: GROUPS * STAGES * STAGE bytes, and
// D * 128 more for the whole form.
extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * WARPS * GROUPS)
draft_attend(const bf16* qkv, const bf16* ring_k, const bf16* ring_v, const long long* lengths, const long long* ids,
             const int* rows, bf16* out, float* part_o, float* part_ml, int block, int share, int kv_heads, int capacity,
             int chunks, float scale) {
  DYNAMIC_SHARED(unsigned char, smem);
  const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int group = threadIdx.x / (32 * WARPS), rank = blockIdx.x;
  const u32 base = shared_address(smem) + group * (STAGES * STAGE);
  const int queries = share * block, groups = (queries + QUERIES - 1) / QUERIES;
  const int kv = blockIdx.y / groups, row = blockIdx.z, m00 = blockIdx.y % groups * QUERIES, m0 = m00 + warp * 16;
  pdl_wait();
  pdl_go();
  const int count = rows ? load_int(rows) : row + 1;                           // these travel together
  const long long length = load_long(lengths + row), id = load_long(ids + row);
  if (row >= count) return;                      // the same in every block of a cluster
  const int context = length < capacity ? (int)length : capacity, live = chunks_of(context);
  const int heads = (share + 2) * kv_heads, q_heads = share * kv_heads;
  const bf16* own = qkv + (long long)row * block * heads * D;
  const long long ring = id * capacity * kv_heads * D + kv * D;
  const Keys keys = {ring_k + ring, ring_v + ring, own + (q_heads + kv) * D, own + (q_heads + kv_heads + kv) * D,
                     kv_heads * D, heads * D, context, block};
  constexpr int STEP = CLUSTER * GROUPS;
  Cursor ahead, here;
  ahead.begin(keys, group * CLUSTER + rank, live);
  here = ahead;
  int turns = 0;                                 // of the group with most tiles: barriers are the block's
#pragma unroll
  for (int o = 0; o < GROUPS; o++) {
    int mine = 0;
    for (int chunk = o * CLUSTER + rank; chunk < live; chunk += STEP) mine += keys.tiles(chunk);
    turns = max(turns, mine);
  }
  auto fetch = [&](int slot) {
    if (ahead.valid()) { keys.load(ahead.chunk, ahead.tile, base + slot * STAGE); ahead.next(keys, STEP, live); }
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
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
#if SPLIT
  auto query = [&](int i, u32 (&w)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = q[i][k];
  };
#else                    // registers hold the merged result: a lane keeps its part of the queries in shared memory
  const u32 kept = base + STAGES * STAGE + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < D / 16; i++) shared_store16(kept + i * (32 * WARPS * 16), make_uint4(q[i][0], q[i][1], q[i][2], q[i][3]));
  auto query = [&](int i, u32 (&w)[4]) {
    const uint4 v = shared_load16(kept + i * (32 * WARPS * 16));
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
  };
#endif
  State now;
  now.clear();
#if !SPLIT
  float M[2] = {minus_infinity(), minus_infinity()}, L[2] = {0.f, 0.f}, O[D / 8][4];
#pragma unroll
  for (int k = 0; k < D / 8; k++)
#pragma unroll
    for (int e = 0; e < 4; e++) O[k][e] = 0.f;
#endif
  const bool on = m0 < queries;                  // the whole warp
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < turns; i++) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    fetch(slot == 0 ? STAGES - 1 : slot - 1);    // the slot that everybody left at the last step
    if (on && here.valid()) {
      add_tile(now, query, base + slot * STAGE, keys.valid(here.chunk, here.tile), scale);
      if (here.last()) {                         // of its chunk
        sum_quads(now);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#if SPLIT
          const int m = m0 + g + 8 * h;
          if (m >= queries) continue;
          const long long at = (((long long)row * kv_heads + kv) * chunks + here.chunk) * queries + m;
          if (c == 0) *reinterpret_cast<float2*>(part_ml + at * 2) = make_float2(now.m[h], now.l[h]);
#pragma unroll
          for (int k = 0; k < D / 8; k++)
            *reinterpret_cast<float2*>(part_o + at * D + k * 8 + c * 2) = make_float2(now.o[k][2 * h], now.o[k][2 * h + 1]);
#else
          float a, b;
          merge(M[h], L[h], now.m[h], now.l[h], a, b);
#pragma unroll
          for (int k = 0; k < D / 8; k++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++) O[k][e] = merged(O[k][e], a, now.o[k][e], b);
#endif
        }
        now.clear();
      }
    }
    if (here.valid()) here.next(keys, STEP, live);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }
  copy_wait<0>();
#if SPLIT
  cluster_sync();
#ifdef EMULATION         // blocks run one after another: the last one merges for all
  const int first = 0, until = rank == CLUSTER - 1 ? QUERIES : 0;
#else
  const int first = rank * (QUERIES / CLUSTER), until = first + QUERIES / CLUSTER;
#endif
  constexpr int OWN = D / 32;                    // columns of a lane; a warp has a query
  for (int m = m00 + first + threadIdx.x / 32; m < min(m00 + until, queries); m += WARPS * GROUPS) {
    const long long start = ((long long)row * kv_heads + kv) * chunks * queries + m;
    const float *o = part_o + start * D + lane * OWN, *ml = part_ml + start * 2;
    float M = minus_infinity(), L = 0.f, all[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) all[k] = 0.f;
#pragma unroll 8
    for (int s = 0; s < live; s++) {
      float2 part[OWN / 2];
#pragma unroll
      for (int k = 0; k < OWN / 2; k++) part[k] = load_part(o + (long long)s * queries * D + 2 * k);
      const float2 known = load_part(ml + (long long)s * queries * 2);
      float a, b;
      merge(M, L, known.x, known.y, a, b);
#pragma unroll
      for (int k = 0; k < OWN / 2; k++) { all[2 * k] = merged(all[2 * k], a, part[k].x, b); all[2 * k + 1] = merged(all[2 * k + 1], a, part[k].y, b); }
    }
    const float whole = rcp_rn(L);
    bf16* to = out + (((long long)row * block + m % block) * q_heads + kv * share + m / block) * D + lane * OWN;
#pragma unroll
    for (int k = 0; k < OWN; k += 2) *reinterpret_cast<u32*>(to + k) = pack_bf16(mul_rn(all[k], whole), mul_rn(all[k + 1], whole));
  }
#else
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = m0 + g + 8 * h;
    if (m >= queries) continue;
    const float whole = rcp_rn(L[h]);
    bf16* to = out + (((long long)row * block + m % block) * q_heads + kv * share + m / block) * D;
#pragma unroll
    for (int k = 0; k < D / 8; k++)
      *reinterpret_cast<u32*>(to + k * 8 + c * 2) = pack_bf16(mul_rn(O[k][2 * h], whole), mul_rn(O[k][2 * h + 1], whole));
  }
#endif
}
