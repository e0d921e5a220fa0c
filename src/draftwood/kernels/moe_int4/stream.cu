// W4A16 experts for few tokens each: a warp owns 16 rows x whole K of one expert and at most 8 tokens.
// Weights come through a private ring in shared memory that is never drained: while the last steps of a unit are computed,
// the first ones of the warp's next unit are on their way. x is read through L1. See moe.cuh for the chain and the layouts.
#include "moe.cuh"

#ifndef WARPS
#define WARPS 4          // of a block
#endif
#ifndef BLOCKS
#define BLOCKS 4         // of a multiprocessor (16 warps of 128 registers; more warps are slower)
#endif
#ifndef DEPTH
#define DEPTH 8          // K64 steps in a warp's ring: even, divides the steps of a row
#endif
constexpr int STEP_BYTES = TILE_BYTES + SCALE_BYTES;
static_assert(DEPTH % 2 == 0 && Part<PART>::STEPS % DEPTH == 0, "DEPTH is even and divides K/64");

// The next bytes that a lane copies; W and S already point at the lane's own 16 bytes of a tile.
struct Place {
  const uint4* w;
  const uint2* s;
};
__device__ __forceinline__ Place place(const uint4* W, const uint2* S, int tile) {
  return {W + (long long)tile * (Part<PART>::STEPS * 32), S + (long long)tile * (Part<PART>::STEPS * 8)};
}

struct Ring {            // shared addresses: this lane's weights, its scales, where it copies scales to
  u32 w, s, d;
  __device__ __forceinline__ explicit Ring(const unsigned char* smem) {
    const u32 base = shared_address(smem) + (threadIdx.x >> 5) * (DEPTH * STEP_BYTES);
    const int lane = threadIdx.x & 31;
    w = base + lane * 16;
    s = base + DEPTH * TILE_BYTES + (lane >> 2) * 8;
    d = base + DEPTH * TILE_BYTES + lane * 16;
  }
  // the 64 bytes of scales are copied by 4 lanes
  __device__ __forceinline__ void load(int i, const Place& from, bool on) const {
    copy16_if(on, w + i * TILE_BYTES, from.w + i * 32);
    copy16_if(on && (threadIdx.x & 31) < 4, d + i * SCALE_BYTES, from.s + i * 8);
  }
  __device__ __forceinline__ void fill(const Place& from) const {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) { load(i, from, true); if (i & 1) copy_commit(); }
  }
};

__device__ __forceinline__ void one_step(float (&acc)[4], const uint4& w, const uint2& s, const uint4& x0, const uint4& x1) {
  u32 a0[4], a1[4];
  int4_fragment(a0, w.x); int4_fragment(a1, w.y); add_group(acc, a0, a1, s.x, x0);
  int4_fragment(a0, w.z); int4_fragment(a1, w.w); add_group(acc, a0, a1, s.y, x1);
}

// One unit: acc = 16 rows x 8 tokens. `at`: where the ring's contents came from; on return, of the next unit.
// next: the tile of the warp's next unit, -1 = none. x: this lane's 8 values of its token's first group.
__device__ __forceinline__ void unit(float (&acc)[4], const Ring& ring, Place& at, const uint4* W, const uint2* S, int next,
                                     const bf16* x) {
  constexpr int ROUNDS = Part<PART>::STEPS / DEPTH;
#pragma unroll
  for (int i = 0; i < 4; i++) acc[i] = 0.f;
  uint4 n0 = load16(x), n1 = load16(x + 32);   // x runs one step ahead
#pragma unroll 1
  for (int b = 0; b < ROUNDS; b++) {
    const bool last = b == ROUNDS - 1, more = !last || next >= 0;
    at.w += DEPTH * 32; at.s += DEPTH * 8;
    if (last) at = place(W, S, next < 0 ? 0 : next);
#pragma unroll
    for (int i = 0; i < DEPTH; i += 2) {
      uint4 w[2]; uint2 s[2];
      copy_wait<DEPTH / 2 - 1>(); __syncwarp();                    // the 4 copying lanes' scales are for all
#pragma unroll
      for (int k = 0; k < 2; k++) {
        w[k] = shared_load16(ring.w + (i + k) * TILE_BYTES);
        s[k] = shared_load8(ring.s + (i + k) * SCALE_BYTES);
      }
      __syncwarp();                            // all have read before the places are written again
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const uint4 x0 = n0, x1 = n1;
        if (i + k + 1 < DEPTH || !last) { n0 = load16(x + (i + k + 1) * 64); n1 = load16(x + (i + k + 1) * 64 + 32); }
        one_step(acc, w[k], s[k], x0, x1);
        ring.load(i + k, at, more);
      }
      copy_commit();
    }
    x += DEPTH * 64;
  }
}

#ifdef GATE_UP
// h[pair][WIDTH] = silu(gate) * up. Grid: ceil(most jobs * tiles / WARPS); the hardware hands out the tiles.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
gate_up_stream(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
               const int* __restrict__ njobs, const int* __restrict__ pairs, bf16* __restrict__ h) {
  DYNAMIC_SHARED(unsigned char, smem);                            // DEPTH * 576 B a warp
  constexpr int T = Part<PART>::TILES;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  pdl_wait();                                  // the lists come from the router, just before
  pdl_go();
  const int u = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (u >= *njobs * T) return;
  const int4 job = jobs[u / T];
  const int count = job.z, pair = pairs[job.y + (g < count ? g : 0)];          // idle columns compute token 0 again
  W += lane; S += lane * 2;
  Place at = place(W, S, job.x * T + u % T);
  const Ring ring(smem);
  ring.fill(at);
  float acc[4];
  unit(acc, ring, at, W, S, -1, input_row(x, pair) + q * 8);
  const long long p0 = __shfl_sync(ALL_LANES, pair, 8 * q), p1 = __shfl_sync(ALL_LANES, pair, 8 * q + 4);
  const int column = (u % T) * 8 + g;
  if (2 * q < count) h[p0 * WIDTH + column] = __float2bfloat16(swiglu(acc[0], acc[2]));
  if (2 * q + 1 < count) h[p1 * WIDTH + column] = __float2bfloat16(swiglu(acc[1], acc[3]));
}
#else
// Row-stationary: a block owns 16 output rows, its warps take the jobs in turn, y of every (token, slot) waits in shared
// memory (64 * TOPK bytes a token), then each token's slots are summed in order. Grid: HIDDEN/16. Rows from *live on are left.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
down_stream(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ h, const int4* __restrict__ jobs,
            const int* __restrict__ njobs, const int* __restrict__ pairs, const float* __restrict__ weights,
            const bf16* __restrict__ shared, const int* __restrict__ live, bf16* __restrict__ out, int rows) {
  DYNAMIC_SHARED(unsigned char, smem);                            // DEPTH * 576 B a warp, then y[rows * TOPK][16]
  constexpr int T = Part<PART>::TILES;
  float* y = reinterpret_cast<float*>(smem + WARPS * DEPTH * STEP_BYTES);
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, tile = blockIdx.x;
  const int nj = *njobs;                       // written before gate_up started: safe ahead of the wait
  int j = threadIdx.x >> 5;
  W += lane; S += lane * 2;
  const Ring ring(smem);
  Place at = {W, S};
  int count = 0, pair = 0;
  if (j < nj) {
    const int4 job = jobs[j];
    count = job.z; pair = pairs[job.y + (g < count ? g : 0)];
    at = place(W, S, job.x * T + tile);
    ring.fill(at);                             // the first weights travel while gate_up ends
  }
  pdl_wait();
  pdl_go();
  if (j < nj) while (true) {
    j += WARPS;
    int next = -1, next_count = 0, next_pair = 0;
    if (j < nj) {
      const int4 job = jobs[j];
      next = job.x * T + tile; next_count = job.z; next_pair = pairs[job.y + (g < next_count ? g : 0)];
    }
    float acc[4];
    unit(acc, ring, at, W, S, next, input_row(h, pair) + q * 8);
    const int p0 = __shfl_sync(ALL_LANES, pair, 8 * q), p1 = __shfl_sync(ALL_LANES, pair, 8 * q + 4);
    if (2 * q < count) { y[p0 * 16 + g] = acc[0]; y[p0 * 16 + g + 8] = acc[2]; }
    if (2 * q + 1 < count) { y[p1 * 16 + g] = acc[1]; y[p1 * 16 + g + 8] = acc[3]; }
    if (next < 0) break;
    count = next_count; pair = next_pair;
  }
  __syncthreads();
  const int n = min(rows, *live);
  for (int e = threadIdx.x; e < n * 8; e += 32 * WARPS) {
    const int t = e >> 3, r = (e & 7) * 2;
    float v0 = 0.f, v1 = 0.f;
#pragma unroll
    for (int k = 0; k < TOPK; k++) {
      const float c = weights[t * TOPK + k];
      if (c != 0.f) {                          // 0: an expert of another rank, whose y was never written
        const float2 v = *reinterpret_cast<const float2*>(&y[(t * TOPK + k) * 16 + r]);
        v0 = fmaf(c, v.x, v0); v1 = fmaf(c, v.y, v1);
      }
    }
    const long long at_out = (long long)t * HIDDEN + tile * 16 + r;
    if (shared) {
      const u32 add = *reinterpret_cast<const u32*>(&shared[at_out]);
      v0 += low_float(add); v1 += high_float(add);
    }
    *reinterpret_cast<u32*>(&out[at_out]) = pack_bf16(v0, v1);
  }
}
#endif
