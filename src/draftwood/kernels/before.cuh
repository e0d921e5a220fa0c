// Where a row's part begins when the parts of all rows lie one behind another: every block finds it for itself.
#pragma once
#include "rounded.cuh"

// Sum of count(i) over i < end; in every thread. A block of THREADS calls it once; it ends with a barrier.
template <int THREADS, class Count>
__device__ __forceinline__ int sum_before(int end, Count count) {
  __shared__ int sums[THREADS / 32];
  int before = 0;
  for (int i = threadIdx.x; i < end; i += THREADS) before += count(i);
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) before += __shfl_xor_sync(ALL_LANES, before, d);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = before;
  __syncthreads();
  before = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) before += sums[w];
  return before;
}
