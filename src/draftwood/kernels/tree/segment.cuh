// A block's view of one segment of a vocabulary: which tokens a thread holds, and the sums over them in their fixed order.
#pragma once
#include "numbers.cuh"

constexpr int SEGMENT = 8192, SEGMENT_THREADS = 512, SEGMENT_WARPS = SEGMENT_THREADS / 32;
constexpr int CHUNKS = SEGMENT / SEGMENT_THREADS / 8, PER = CHUNKS * 8;                        // of a thread: 8 tokens each, tokens

// First token of chunk i of this thread in segment s.
__device__ __forceinline__ int chunk_token(int s, int i) { return s * SEGMENT + (i * SEGMENT_THREADS + threadIdx.x) * 8; }
__device__ __forceinline__ int token_of(int s, int j) { return chunk_token(s, j >> 3) + (j & 7); }

#ifdef EMULATION
inline void raise(u32* p, u32 v) { *p = max(*p, v); }
inline void lower(u32* p, u32 v) { *p = min(*p, v); }
inline u32 up_to(float v) { return v >= 4294967040.f ? ~0u : (u32)v; }
#else
__device__ __forceinline__ void raise(u32* p, u32 v) { atomicMax(p, v); }      // integers: their maximum has no order
__device__ __forceinline__ void lower(u32* p, u32 v) { atomicMin(p, v); }
__device__ __forceinline__ u32 up_to(float v) { return __float2uint_rz(v); }   // beyond the integers: the largest
#endif

__device__ __forceinline__ float value_of(u32 order) { return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order); }
__device__ __forceinline__ u32 order_of(float v) { return float_order(fmaxf(v, minus_infinity())); }     // NaN: as -inf

// Ask L2 for this thread's tokens of a segment, so that they come faster when it is their turn.
template <bool FLOAT32>
__device__ __forceinline__ void ask_ahead(const void* logits, long long row, int s, int V) {
#ifndef EMULATION
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = chunk_token(s, c);
    const void* from = FLOAT32 ? (const void*)((const float*)logits + row + at) : (const void*)((const bf16*)logits + row + at);
    if (at < V) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
#endif
}

// Of a warp's keys the highest: two maxima of integers instead of ten exchanges.
__device__ __forceinline__ u64 warp_max_key(u64 key) {
  const u32 high = warp_max_u32((u32)(key >> 32));
  return (u64)high << 32 | warp_max_u32((u32)(key >> 32) == high ? (u32)key : 0);
}
__device__ __forceinline__ float highest_of(const float (&v)[PER]) {
  float most = v[0];
#pragma unroll
  for (int j = 1; j < PER; j++) most = fmaxf(most, v[j]);
  return most;
}
// Largest of the block's values as an order; one barrier.
__device__ __forceinline__ u32 block_peak(float most, u32* peak) {
  const u32 order = warp_max_u32(order_of(most));
  if ((threadIdx.x & 31) == 0) raise(peak, order);
  __syncthreads();
  return *peak;
}
// This warp's part of the sum of exp(v - peak) (numbers.py, segment_sums).
__device__ __forceinline__ void warp_exp_sum(const float (&v)[PER], float peak, float* sums) {
  const float from = peak > minus_infinity() ? peak : 0.f;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < PER; j++) sum = add_rn(sum, exp_of(sub_rn(v[j], from)));
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum = add_rn(sum, __shfl_xor_sync(ALL_LANES, sum, d));
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
}
__device__ __forceinline__ float sum_of(const float* sums) {                   // the warps in their order
  float sum = sums[0];
#pragma unroll
  for (int w = 1; w < SEGMENT_WARPS; w++) sum = add_rn(sum, sums[w]);
  return sum;
}

// z + gumbel(bits) / turn with z <= high reaches `least` only for bits up to this: gumbel <= -log((bits + 1/2) / 2^32). The slack covers
// rounding.
__device__ __forceinline__ u32 allowed_bits(float high, float least, float turn) {
  const float gap = mul_rn(add_rn(sub_rn(high, least), fma_rn(fabsf(least), 1e-6f, 0.01f)), turn);
  const u32 some = up_to(mul_rn(exp2_fast(mul_rn(gap, 1.44269504f)), 4294967296.f));
  return high >= least ? ~0u : high > minus_infinity() ? some : 0;
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
