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
#else
__device__ __forceinline__ void raise(u32* p, u32 v) { atomicMax(p, v); }      // integers: their maximum has no order
__device__ __forceinline__ void lower(u32* p, u32 v) { atomicMin(p, v); }
#endif

__device__ __forceinline__ float value_of(u32 order) { return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order); }
__device__ __forceinline__ u32 order_of(float v) { return float_order(fmaxf(v, minus_infinity())); }     // NaN: as -inf

// This thread's tokens of segment s of a row of V logits, -inf beyond them. row: of token 0.
template <bool FLOAT32>
__device__ __forceinline__ void fetch_segment(Eight<FLOAT32> (&held)[CHUNKS], const void* row, int s, int V) {
  constexpr int SIZE = FLOAT32 ? 4 : 2;
  const char* from = (const char*)row + (long long)chunk_token(s, 0) * SIZE;
  const bool whole = (s + 1) * SEGMENT <= V;           // all but the last are
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const bool there = whole || chunk_token(s, c) < V;
    held[c] = there ? fetch_logits<FLOAT32>(from + c * (SEGMENT / CHUNKS * SIZE), 0) : no_logits<FLOAT32>();
  }
}
// Ask L2 for them, so that they come faster when it is their turn.
template <bool FLOAT32>
__device__ __forceinline__ void ask_ahead(const void* row, int s, int V) {
#ifndef EMULATION
  constexpr int SIZE = FLOAT32 ? 4 : 2;
  const char* from = (const char*)row + (long long)chunk_token(s, 0) * SIZE;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
    if (chunk_token(s, c) < V) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c * (SEGMENT / CHUNKS * SIZE)));
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

// What value + scale * gumbel needs to reach a bound. gumbel <= -log((bits + 1/2) / 2^32), so only few bits reach far: those up to
// 2^32 exp((value - bound) / scale). The slack covers rounding; less noise than a millionth is within it.
struct Reach { float from, turn; };
__device__ __forceinline__ Reach reach_of(float bound) { return {sub_rn(bound, fma_rn(fabsf(bound), 1e-6f, 0.01f)), 1.44269504f}; }
__device__ __forceinline__ Reach reach_of(float bound, float scale) {
  return {reach_of(bound).from, scale > 1e-6f ? divide(1.44269504f, scale) : 1e30f};
}
// False only if it does not reach: 1 + (bits / 2^32) rounded down is compared with 1 + that power, for no integer is made of it so.
__device__ __forceinline__ bool may_reach(const Reach& reach, float value, u32 bits) {
  const float cut = add_rn(1.f, exp2_fast(mul_rn(sub_rn(value, reach.from), reach.turn)));
  return __uint_as_float(bits >> 9 | 0x3f800000u) <= cut;
}
// The highest bits that may do for this value or a lower one: with one comparison of bits most tokens go by.
__device__ __forceinline__ u32 bits_reaching(const Reach& reach, float value) {
  const float cut = add_rn(1.f, exp2_fast(mul_rn(sub_rn(value, reach.from), reach.turn)));
  return __float_as_uint(fminf(cut, 1.99999988f)) << 9 | 511;                  // what is no number lets all pass
}
constexpr float MOST_NOISE = 23.f;                     // gumbel lies within (-3.14, 22.9)
// Bits of the lowest of four tokens whose bit is set in `hits`, and its value.
struct Hit { u32 bits, which; float value; };
__device__ __forceinline__ Hit first_hit(u32 hits, const Bits& bits, float a, float b, float c, float d) {
  if (hits & 1) return {bits.word[0], 0, a};
  if (hits & 2) return {bits.word[1], 1, b};
  return hits & 4 ? Hit{bits.word[2], 2, c} : Hit{bits.word[3], 3, d};
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
