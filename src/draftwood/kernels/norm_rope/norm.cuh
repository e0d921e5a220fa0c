// What the kernels that norm whole rows of WIDTH values share: one row per block of THREADS threads, 8 values a chunk; a thread has
// chunks tid, tid + THREADS, ...
#pragma once
#include "pieces.cuh"
#ifndef THREADS
#define THREADS 256
#endif
constexpr int CHUNKS = WIDTH / 8, OWN = (CHUNKS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(WIDTH % 8 == 0 && THREADS % 32 == 0 && WARPS <= 32, "whole chunks and warps");

// As bf16 tensors add.
__device__ __forceinline__ void add8(float (&v)[8], const uint4& delta) {
  float d[8];
  unpack8(d, delta);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = rounded(v[k] + d[k]);
}

// h: chunk(values, i) gives chunk i of this thread, keep(c, h) takes it with its first column, and store(c, values) takes
// norm(h) * w. sums: shared memory for 32 floats; ready() is called when all of the block have their row.
template <class Chunk, class Keep, class Store, class Ready>
__device__ __forceinline__ void norm_row(const uint4 (&w)[OWN], float eps, float* sums, Chunk chunk, Keep keep, Store store,
                                         Ready ready) {
  const int tid = threadIdx.x;
  float v[OWN][8], sum = 0.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int c = (tid + i * THREADS) * 8;
    if (c >= WIDTH) continue;
    chunk(v[i], i);
    keep(c, pack8(v[i]));
    sum += squares(v[i]);
  }
  sum = warp_sum(sum);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  ready();
  sum = warp_sum((tid & 31) < WARPS ? sums[tid & 31] : 0.f);
  const float scale = scale_of(sum, WIDTH, eps);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int c = (tid + i * THREADS) * 8;
    if (c >= WIDTH) continue;
    normalise(v[i], scale, w[i]);
    store(c, pack8(v[i]));
  }
}
