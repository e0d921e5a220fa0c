// What both linear kernels share: the law of the bits, the weight layout, the fold of the segments and the store.
//
// Y[n, N] = X[n, K] W[N, K]^T for n = 1..128 rows of x ("tokens" here: columns of the mma), bf16 x bf16 -> fp32.
//
// LAW 1.  K is cut in S segments; S and the cuts depend on the weight's shape only (plan.py): segment s is the K64 steps
//   [T s / S, T (s+1) / S), T = ceil(K / 64).  One chain per segment: acc = 0, then for each k16 block, ascending,
//   acc = mma.m16n8k16(W, x, acc).  Then v = p[0]; v = v + p[s] for s = 1..S-1 in fp32, and one rounding.
//   A column of an mma never meets another column: a token's bits depend neither on n, nor on its place or neighbours,
//   nor on which kernel ran.  Segments live in warps of a block and / or in the blocks of one cluster; no atomics.
//
// WEIGHTS  [N/16][T][2 halves of K32][2][lane][16 B]: for K32 block b, m = 0, 1, lane (g = lane/4, q = lane%4),
//   k0 = 32b + 8q + 4m: words (row g, k0..+1), (row g+8, k0..+1), (row g, k0+2..+3), (row g+8, k0+2..+3); zeros past K.
//   One word quadruple is an mma A fragment, and with this order of K the B fragments of a token are 16 bytes x[32b+8q ..].
// GLU: tile t holds gate rows 8t..8t+7 as its rows 0..7 and up rows 8t..8t+7 as 8..15; Y is [n, N/2] = silu(gate) * up,
//   both in fp32 before the one rounding.
#pragma once
#include "../rounded.cuh"

#ifndef CLUSTER
#define CLUSTER 1        // blocks of a cluster, along K
#endif
#ifndef GLU
#define GLU 0
#endif
#ifndef TAIL
#define TAIL 0           // 1: K is no multiple of 64 (it is one of 8)
#endif
#if CLUSTER > 1 && !defined(EMULATION)
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)   // fixed in the code: a plain launch with grid (CLUSTER, ...) makes them
#else
#define CLUSTER_SHAPE
#endif

__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  const u32 w[4] = {a.x, a.y, a.z, a.w};
  mma(d, w, b0, b1);
}
#ifdef EMULATION
// Blocks run one after another: each leaves its shared memory behind, and the last one folds for all.
static unsigned char left_behind[CLUSTER][emulated::SHARED];
inline void shared_store(u32 a, float v) { memcpy(emulated::place(a, 4), &v, 4); }
inline u32 address_in(u32 a, u32 rank) { return a | rank << 24; }
inline float cluster_load(u32 a) {
  float v;
  memcpy(&v, CLUSTER > 1 ? left_behind[a >> 24] + (a & 0xffffff) : emulated::place(a, 4), 4);
  return v;
}
inline void cluster_load(float (&v)[2], u32 a) {
  emulated::place(a & 0xffffff, 8);
  for (int i = 0; i < 2; i++) v[i] = cluster_load(a + 4 * i);
}
inline void cluster_load(float (&v)[4], u32 a) {
  emulated::place(a & 0xffffff, 16);
  for (int i = 0; i < 4; i++) v[i] = cluster_load(a + 4 * i);
}
inline void show_partials() {
  __syncthreads();
  if (CLUSTER > 1 && threadIdx.x == 0) memcpy(left_behind[blockIdx.x], emulated::shared, emulated::SHARED);
  __syncthreads();
}
inline void leave_together() {}
#else
__device__ __forceinline__ void shared_store(u32 a, float v) { asm volatile("st.shared.f32 [%0],%1;" ::"r"(a), "f"(v) : "memory"); }
__device__ __forceinline__ u32 address_in(u32 a, u32 rank) {       // the same place in another block of the cluster
  u32 d;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(rank));
  return d;
}
__device__ __forceinline__ void cluster_load(float (&v)[2], u32 a) {
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1},[%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void cluster_load(float (&v)[4], u32 a) {
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(a) : "memory");
}
// This block's partials are there for the cluster, and theirs for it. One warp's release stands for what all wrote before the
// barrier of the block: each is a fence of the whole GPU.
__device__ __forceinline__ void show_partials() {
  __syncthreads();
  if (CLUSTER == 1) return;
  if (threadIdx.x < 32) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  else asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Nobody leaves while its shared memory is read. Relaxed: it must not wait until results have reached L2.
__device__ __forceinline__ void leave_together() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
#endif
__device__ __forceinline__ float silu(float g) { return g / (1.f + __expf(-g)); }

// Where results go: token t's output c is at y[t * stride + c], in fp32 or bf16; residual has y's strides and may be y.
struct Output {
  void* y;
  const bf16* residual;
  long long stride;
  bool wide;
};

// Two results and their residual, as bf16 tensors add: the product was rounded first.
__device__ __forceinline__ u32 add_pair(u32 v, u32 r) {
  return pack_bf16(low_float(v) + low_float(r), high_float(v) + high_float(r));
}
__device__ __forceinline__ void store2(const Output& out, long long at, float a, float b) {
  if (out.wide) { *reinterpret_cast<float2*>((float*)out.y + at) = make_float2(a, b); return; }
  u32 v = pack_bf16(a, b);
  if (out.residual) v = add_pair(v, *reinterpret_cast<const u32*>(out.residual + at));
  *reinterpret_cast<u32*>((bf16*)out.y + at) = v;
}

// Fold the segments' partials and store.  Segment s: block s / SEG of the cluster, at part + (s % SEG) * PSTRIDE bytes,
// [token][RSTRIDE] floats.  This block (`rank`) folds the items i = rank*THREADS + thread, step CLUSTER*THREADS; an item
// is PER outputs of one token (GLU: PER gates and their ups).  first: token of column 0; row0: first row of the block.
template <int SEG, u32 PSTRIDE, u32 RSTRIDE, int ROWS, int THREADS, int PER>
__device__ __forceinline__ void fold(u32 part, int rank, int columns, int row0, int first, int n, int N, const Output& out) {
#ifdef EMULATION
  if (CLUSTER > 1 && rank < CLUSTER - 1) return;
  if (CLUSTER > 1) rank = 0;
  constexpr int BY = THREADS;
#else
  constexpr int BY = CLUSTER * THREADS;
#endif
  constexpr int S = CLUSTER * SEG, SIDES = GLU ? 2 : 1, ITEMS = ROWS / PER / SIDES;
  constexpr int AT_ONCE = S * SIDES >= 8 ? 1 : S * SIDES == 1 ? 4 : 8 / (S * SIDES);       // items: all their loads are one latency
  const int count = min(columns, n - first) * ITEMS;
  for (int i = rank * THREADS + threadIdx.x; i < count; i += AT_ONCE * BY) {
    float p[AT_ONCE][S][SIDES][PER];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int at = i + k * BY, t = at / ITEMS, e = at % ITEMS * PER, r = GLU ? (e >> 3) * 16 + (e & 7) : e;
      if (k > 0 && at >= count) break;
#pragma unroll
      for (int s = 0; s < S; s++) {
        const u32 a = part + (t * RSTRIDE + r) * 4;
        const u32 m = (CLUSTER > 1 ? address_in(a, s / SEG) : a) + s % SEG * PSTRIDE;
#pragma unroll
        for (int side = 0; side < SIDES; side++) cluster_load(p[k][s][side], m + side * 32);
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int at = i + k * BY, t = at / ITEMS, e = at % ITEMS * PER, r = GLU ? (e >> 3) * 16 + (e & 7) : e;
      if (k > 0 && at >= count) break;
      float v[SIDES][PER];
#pragma unroll
      for (int side = 0; side < SIDES; side++)
#pragma unroll
        for (int j = 0; j < PER; j++) {
          v[side][j] = p[k][0][side][j];
#pragma unroll
          for (int s = 1; s < S; s++) v[side][j] = add_rn(v[side][j], p[k][s][side][j]);
        }
      if (row0 + r >= N) continue;
      const long long to = (first + t) * out.stride + (GLU ? row0 / 2 + e : row0 + r);
#pragma unroll
      for (int j = 0; j < PER; j += 2) {
        if (GLU) *reinterpret_cast<u32*>((bf16*)out.y + to + j) =
            pack_bf16(silu(v[0][j]) * v[SIDES - 1][j], silu(v[0][j + 1]) * v[SIDES - 1][j + 1]);
        else store2(out, to + j, v[0][j], v[0][j + 1]);
      }
    }
  }
}
