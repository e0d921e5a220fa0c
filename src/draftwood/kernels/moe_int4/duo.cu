// W4A16 down for slices of the experts: a cluster of two blocks owns RUN row tiles of the output, and its warps share all (job,
// tile) units evenly, each a run of neighbours. down_stream gives a block one tile: 448 blocks for 4 * 132 places leave a sixth of
// the machine idle, and every block asks for every job; here 64 clusters fill 128 multiprocessors and a job is asked for by few.
//
// y of every (token, slot) waits in the shared memory of the block that combines the token (token % 2), written from either
// block of the cluster; then each token's slots are summed in order. See flow.cuh and moe.cuh for rings, lists and the chain.
#include "flow.cuh"

#ifdef GATE_UP
#error "this is a form of the down part"
#endif
#ifndef RUN
#define RUN 7            // row tiles of a cluster
#endif
static_assert(ROUNDS == 1, "a unit is no longer than a ring");
static_assert(P::TILES % RUN == 0, "whole clusters");
constexpr int ROW = RUN * 16;                                     // floats of a (token, slot) in y

#ifdef EMULATION
// Blocks run one after another: y of both is kept beside them, and the second combines for both.
static float kept[2][1 << 20];
inline void cluster_begin() {
  if (blockIdx.x == 0 && threadIdx.x == 0) memset(kept, 0xff, sizeof kept);
}
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline void store_y(u32, float* y, u32 block, int at, float v) { kept[block][at] = v; }
#define CLUSTER_OF_TWO
#else
#define CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void store_y(u32 base, float*, u32 block, int at, float v) {
  asm volatile("{ .reg .u32 a; mapa.shared::cluster.u32 a,%0,%1; st.shared::cluster.f32 [a],%2; }"
               ::"r"(base + at * 4), "r"(block), "f"(v) : "memory");
}
#endif

__device__ __forceinline__ void sum_slots(const float* y, const float* weights, const bf16* shared, bf16* out, int block, int first,
                                          int n) {
  for (int e = threadIdx.x; e < (n + 1 - block) / 2 * (ROW / 2); e += 32 * WARPS) {
    const int i = e / (ROW / 2), t = 2 * i + block, r = e % (ROW / 2) * 2;
    float v0 = 0.f, v1 = 0.f;
#pragma unroll
    for (int k = 0; k < TOPK; k++) {
      const float c = weights[t * TOPK + k];
      if (c != 0.f) {                          // 0: an expert of another rank, whose y was never written
        const float2 v = *reinterpret_cast<const float2*>(&y[(i * TOPK + k) * ROW + r]);
        v0 = fmaf(c, v.x, v0); v1 = fmaf(c, v.y, v1);
      }
    }
    const long long at = (long long)t * HIDDEN + first + r;
    if (shared) {
      const u32 add = *reinterpret_cast<const u32*>(&shared[at]);
      v0 += low_float(add); v1 += high_float(add);
    }
    *reinterpret_cast<u32*>(&out[at]) = pack_bf16(v0, v1);
  }
}

// Grid (2, HIDDEN / 16 / RUN). Arguments as down_stream's.
extern "C" __global__ void CLUSTER_OF_TWO __launch_bounds__(32 * WARPS, BLOCKS)
down_duo(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ h, const int4* __restrict__ jobs,
         const int* __restrict__ njobs, const int* __restrict__ pairs, const float* __restrict__ weights,
         const bf16* __restrict__ shared, const int* __restrict__ live, bf16* __restrict__ out, int rows) {
  DYNAMIC_SHARED(unsigned char, smem);                            // RING_BYTES a warp, then y[ceil(rows / 2) * TOPK][ROW]
  constexpr int T = P::TILES;
  float* y = reinterpret_cast<float*>(smem + WARPS * RING_BYTES);
  const u32 y_base = shared_address(y);
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, block = blockIdx.x, tile0 = blockIdx.y * RUN;
  cluster_begin();                             // the other block's memory is there once it has arrived
  const int units = *njobs * RUN;              // written before gate_up started: safe ahead of the wait
  const int worker = block * WARPS + (threadIdx.x >> 5);
  int j = (int)((long long)units * worker / (2 * WARPS));
  const int end = (int)((long long)units * (worker + 1) / (2 * WARPS));
  W += lane; S += lane * 2;
  const Ring ring(smem);
  auto job_at = [&](int u) { return u < end ? jobs[u / RUN] : make_int4(0, 0, 0, 0); };
  auto pair_of = [&](const int4& job) { return job.z ? pairs[job.y + (g < job.z ? g : 0)] : 0; };
  auto place_of = [&](const int4& job, int u) { return place(W, S, job.x * T + tile0 + u % RUN); };
  int count[UNITS], pair[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; u++) {            // the first weights travel while gate_up ends
    const int4 job = job_at(j + u);
    count[u] = job.z; pair[u] = pair_of(job);
    ring.fill(u * LEN, place_of(job, j + u), job.z);
  }
  int4 later = job_at(j + UNITS);
  const int n = min(rows, *live);              // as the lists: known before gate_up started
  pdl_wait();
  pdl_go();
  cluster_wait();
  const bf16* from = input_row(h, pair[0]) + q * 8;
  Ahead ahead;
  if (j < end) look_all(ahead, from);
  for (bool more = j < end; more;) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int next_pair = pair_of(later), next_count = later.z;
      const Place next = place_of(later, j + UNITS);
      later = job_at(j + UNITS + 1);
      const bf16* then = input_row(h, UNITS == 1 ? next_pair : pair[(u + 1) % UNITS]) + q * 8;
      float acc[4];
      clear4(acc);
      switch (u) {
#define ONE(N) case N: if constexpr (N < UNITS) round<N * LEN>(acc, ring, next, next_count, ahead, from, then); break;
        ONE(0) ONE(1) ONE(2) ONE(3)
#undef ONE
      }
      const int column = j % RUN * 16 + g;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int p = __shfl_sync(ALL_LANES, pair[u], 8 * q + 4 * e), t = p / TOPK;
        if (2 * q + e < count[u]) {
          const int at = (t / 2 * TOPK + p % TOPK) * ROW + column;
          store_y(y_base, y, t % 2, at, finish(acc[e]));
          store_y(y_base, y, t % 2, at + 8, finish(acc[2 + e]));
        }
      }
      count[u] = next_count; pair[u] = next_pair;
      from = then;
      if (++j >= end) { more = false; break; }
    }
  }
  cluster_arrive();
  cluster_wait();                              // y is complete in both blocks, and nobody writes into this one any more
#ifdef EMULATION
  __syncthreads();
  if (block == 1)
    for (int b = 0; b < 2; b++) sum_slots(kept[b], weights, shared, out, b, tile0 * 16, n);
#else
  sum_slots(y, weights, shared, out, block, tile0 * 16, n);
#endif
}
