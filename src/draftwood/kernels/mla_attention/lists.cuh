// What plan.cu and nodes_plan.cu share: sums over what comes before, and where a job is among them.
#pragma once

// Sum of `mine` over lower lanes; the total of all lanes goes to `all`.
template <class T> __device__ __forceinline__ T before(T mine, T& all) {
  const int lane = threadIdx.x & 31;
  T sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const T o = __shfl_up_sync(ALL_LANES, sum, d); if (lane >= d) sum += o; }
  all = __shfl_sync(ALL_LANES, sum, 31);
  return sum - mine;
}

// The place with at[place] <= j < at[place + 1], of `places`.
__device__ __forceinline__ int find(const int* at, int places, int j) {
  int low = 0, high = places;
  while (high - low > 1) { const int mid = (low + high) >> 1; if (at[mid] <= j) low = mid; else high = mid; }
  return low;
}
