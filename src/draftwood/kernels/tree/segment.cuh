// A block's view of one segment of a vocabulary: which tokens a thread holds, and the sums over them in their fixed order.
#pragma once
#include "numbers.cuh"

constexpr int SEGMENT = 8192, SEGMENT_THREADS = 512, CHUNKS = SEGMENT / SEGMENT_THREADS / 8, PER = CHUNKS * 8;

// First token of chunk i of this thread in segment s.
__device__ __forceinline__ int chunk_token(int s, int i) { return s * SEGMENT + (i * SEGMENT_THREADS + threadIdx.x) * 8; }
__device__ __forceinline__ int token_of(int s, int j) { return chunk_token(s, j >> 3) + (j & 7); }

// Largest of the block's values; `room` holds a float per warp. Ends with a barrier behind which room may be written again.
__device__ __forceinline__ float block_max(float v, float* room) {
  v = warp_max(v);
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  v = room[0];
#pragma unroll
  for (int w = 1; w < SEGMENT_THREADS / 32; w++) v = fmaxf(v, room[w]);
  __syncthreads();
  return v;
}
// Sum of exp(v - peak) over the segment (numbers.py, segment_sums), in thread 0.
__device__ __forceinline__ float block_exp_sum(const float (&v)[PER], float peak, float* room) {
  const float from = peak > minus_infinity() ? peak : 0.f;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < PER; j++) sum = add_rn(sum, exp_of(sub_rn(v[j], from)));
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum = add_rn(sum, __shfl_xor_sync(ALL_LANES, sum, d));
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = room[0];
#pragma unroll
  for (int w = 1; w < SEGMENT_THREADS / 32; w++) sum = add_rn(sum, room[w]);
  __syncthreads();
  return sum;
}

// log sum exp of a row from its segments' (peak, sum), S <= 32; all lanes of a warp call it and get the result.
__device__ __forceinline__ float log_sum_exp(const float2* parts, int segments) {
  const int lane = threadIdx.x & 31;
  float2 mine = make_float2(minus_infinity(), 0.f);
  if (lane < segments) mine = parts[lane];
  const float peak = warp_max(mine.x), from = peak > minus_infinity() ? peak : 0.f;
  const float scaled = mul_rn(mine.y, exp_of(sub_rn(mine.x, from)));
  float total = 0.f;
  for (int s = 0; s < segments; s++) total = add_rn(total, __shfl_sync(ALL_LANES, scaled, s));
  if (!(peak > minus_infinity())) return minus_infinity();
  return sub_rn(from, minus_log(total > 0.f ? total : 1.f));
}
