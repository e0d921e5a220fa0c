// W4A16 down for one row and slices of the experts: a block owns 16 output rows of the row's experts, a warp each or two. All
// weights are on their way before gate_up ends, and all that was known before gate_up began is read by then: what is left is one
// load of h, the products and the sum. Few registers, so that the blocks are there while gate_up's still run. See moe.cuh.
#include "moe.cuh"

#ifdef GATE_UP
#error "this is a form of the down part"
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BLOCKS
#define BLOCKS 8         // of a multiprocessor, so that registers stay few
#endif
constexpr int STEPS = Part<false>::STEPS, T = Part<false>::TILES, UNITS = TOPK / WARPS;
constexpr int UNIT_BYTES = STEPS * (TILE_BYTES + SCALE_BYTES + 128);         // weights, scales, h of one pair
static_assert(TOPK % WARPS == 0 && UNITS <= 2, "one or two units for every warp");

// The products of one unit; `unit`: its place in shared memory. Every column of the mma is the same token.
__device__ __forceinline__ void multiply(float (&acc)[4], u32 unit) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u32 w_at = unit + lane * 16, s_at = unit + STEPS * TILE_BYTES + g * 8, h_at = unit + STEPS * (TILE_BYTES + SCALE_BYTES) + q * 16;
#pragma unroll 2
  for (int i = 0; i < STEPS; i++) {
    const uint4 w = shared_load16(w_at + i * TILE_BYTES);
    const uint2 s = shared_load8(s_at + i * SCALE_BYTES);
    add_group(acc, expand(w.x, w.y, s.x), shared_load16(h_at + i * 128));
    add_group(acc, expand(w.z, w.w, s.y), shared_load16(h_at + i * 128 + 64));
  }
}

// Grid: HIDDEN/16. One row: at most TOPK jobs of one pair each. Shared memory: TOPK * UNIT_BYTES, then y[TOPK][16].
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
down_one(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ h, const int4* __restrict__ jobs,
         const int* __restrict__ njobs, const int* __restrict__ pairs, const float* __restrict__ weights,
         const bf16* __restrict__ shared, const int* __restrict__ live, bf16* __restrict__ out, int rows) {
  DYNAMIC_SHARED(unsigned char, smem);
  float* y = reinterpret_cast<float*>(smem + TOPK * UNIT_BYTES);
  const int lane = threadIdx.x & 31, g = lane >> 2, warp = threadIdx.x >> 5, tile = blockIdx.x;
  const u32 units = shared_address(smem) + warp * (UNITS * UNIT_BYTES);
  const int nj = *njobs;                       // the lists were written before gate_up started: safe ahead of the wait
  int pair[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int j = warp + u * WARPS;
    pair[u] = -1;
    if (j < nj) {
      const int4 job = jobs[j];
      pair[u] = pairs[job.y];
      const uint4* w = W + (long long)(job.x * T + tile) * (STEPS * 32) + lane;
      const char* s = reinterpret_cast<const char*>(S) + (long long)(job.x * T + tile) * (STEPS * SCALE_BYTES);
#pragma unroll
      for (int i = 0; i < STEPS; i++) copy16(units + u * UNIT_BYTES + i * TILE_BYTES + lane * 16, w + i * 32);
      for (int i = lane; i < STEPS * 4; i += 32) copy16(units + u * UNIT_BYTES + STEPS * TILE_BYTES + i * 16, s + i * 16);
    }
  }
  // the sum's own inputs, as old as the lists or older than gate_up
  const int column = tile * 16 + 2 * threadIdx.x;
  const bool sums = threadIdx.x < 8 && min(rows, *live) > 0;
  float c[TOPK] = {};
  u32 add = 0;
  if (sums) {
#pragma unroll
    for (int k = 0; k < TOPK; k++) c[k] = weights[k];
    if (shared) add = *reinterpret_cast<const u32*>(shared + column);
  }
  pdl_wait();
  pdl_go();
#pragma unroll
  for (int u = 0; u < UNITS; u++)
    if (pair[u] >= 0)
      for (int i = lane; i < STEPS * 8; i += 32)
        copy16(units + u * UNIT_BYTES + STEPS * (TILE_BYTES + SCALE_BYTES) + i * 16, h + (long long)pair[u] * WIDTH + i * 8);
  copy_commit();
  copy_wait<0>();
  __syncwarp();
#pragma unroll 1
  for (int u = 0; u < UNITS; u++) {
    const int p = u ? pair[UNITS - 1] : pair[0];                             // at most two
    if (p >= 0) {
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      multiply(acc, units + u * UNIT_BYTES);
      if ((lane & 3) == 0) { y[p * 16 + g] = finish(acc[0]); y[p * 16 + g + 8] = finish(acc[2]); }
    }
  }
  __syncthreads();
  if (!sums) return;
  float v0 = 0.f, v1 = 0.f;
#pragma unroll
  for (int k = 0; k < TOPK; k++)
    if (c[k] != 0.f) {                         // 0: an expert of another rank, whose y was never written
      const float2 v = *reinterpret_cast<const float2*>(&y[k * 16 + 2 * threadIdx.x]);
      v0 = fmaf(c[k], v.x, v0); v1 = fmaf(c[k], v.y, v1);
    }
  if (shared) { v0 += low_float(add); v1 += high_float(add); }
  *reinterpret_cast<u32*>(&out[column]) = pack_bf16(v0, v1);
}
