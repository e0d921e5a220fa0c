// Numbers whose bits are the same on every device: exp, log, Philox, Gumbel noise. Nothing but float32 additions,
// multiplications, fused ones and divisions rounded to nearest, so a CPU, and a GPU of another kind, find the same (numbers.py).
#pragma once
#include "../rounded.cuh"

#ifdef EMULATION
inline u32 mul_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline int leading_zeros(u32 v) { return v ? __builtin_clz(v) : 32; }
inline u32 warp_max_u32(u32 v) {
  for (int d = 16; d > 0; d >>= 1) { const u32 o = __shfl_xor_sync(ALL_LANES, v, d); v = o > v ? o : v; }
  return v;
}
inline u32 warp_min_u32(u32 v) { return ~warp_max_u32(~v); }
inline u32 count_up(u32* p, u32 by) { const u32 old = *p; *p += by; return old; }
inline float divide(float n, float d) { return n / d; }
#else
// n / d rounded to nearest, for d within 2^-20 .. 2^60 and n = 0 or |n| within 2^-80 .. 2^80: the steps of the compiler's own
// division, without its test for other numbers and the call behind it.
__device__ __forceinline__ float divide(float n, float d) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(d));
  r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.f), r);
  float q = __fmul_rn(n, r);
  q = __fmaf_rn(r, __fmaf_rn(-d, q, n), q);
  return __fmaf_rn(r, __fmaf_rn(-d, q, n), q);
}
__device__ __forceinline__ u32 mul_high(u32 a, u32 b) { return __umulhi(a, b); }
__device__ __forceinline__ int leading_zeros(u32 v) { return __clz(v); }
__device__ __forceinline__ u32 warp_max_u32(u32 v) { return __reduce_max_sync(ALL_LANES, v); }
__device__ __forceinline__ u32 warp_min_u32(u32 v) { return __reduce_min_sync(ALL_LANES, v); }
__device__ __forceinline__ u32 count_up(u32* p, u32 by) { return atomicAdd(p, by); }   // integers: sums have no order
#endif

// n / d for any n but NaN, and d within 2^-20 .. 2^60; only results below the normal numbers may be a unit off.
__device__ __forceinline__ float divide_any(float n, float d) {
  constexpr float UP = 1099511627776.f, DOWN = 1.f / UP;                     // 2^40: scaling changes no digit
  const float size = fabsf(n);
  const bool large = size > 1.2e24f, small = size < 8e-25f;
  const float q = mul_rn(divide(mul_rn(n, large ? DOWN : small ? UP : 1.f), d), large ? UP : small ? DOWN : 1.f);
  return size > 3.4028235e38f ? n : q;
}

__device__ __noinline__ float divide_slow(float n, float d) { return divide_any(n, d); }
// All of them by d, bit for bit as divide_any does, whose tests are made once; NaN stays NaN.
template <int N>
__device__ __forceinline__ void divide_all(float (&v)[N], float d) {
  float high = 0.f, low = 1.f;
#pragma unroll
  for (int j = 0; j < N; j++) { high = fmaxf(high, fabsf(v[j])); low = fminf(low, fabsf(v[j])); }
  if (high < 1.2e24f && low >= 8e-25f) {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = divide(v[j], d);
  } else {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = divide_slow(v[j], d);
  }
}

// e^x for x <= 0 (error below 3e-7 of the result); below -86 it stays e^-86, which is nothing beside a 1.
__device__ __forceinline__ float exp_of(float x) {
  x = fmaxf(x, -86.f);
  const float shifted = fma_rn(x, 1.44269504f, 12582912.f);                  // 1.5 * 2^23: the sum is rounded to an integer
  const float k = sub_rn(shifted, 12582912.f);
  const float r = fma_rn(k, 2.12194440e-4f, fma_rn(k, -0.693359375f, x));
  float p = fma_rn(0.0083125019f, r, 0.0418903343f);                         // least relative error for |r| <= log(2) / 2
  p = fma_rn(p, r, 0.1666711569f);
  p = fma_rn(p, r, 0.4999923110f);
  p = fma_rn(p, r, 1.f);
  p = fma_rn(p, r, 1.f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));   // the low bits of `shifted` are k's
}

// -log(x) of a positive, normal x: 2 artanh(f / (2 + f)), x = (1 + f) 2^k, f within [sqrt(1/2) - 1, sqrt(2) - 1).
__device__ __forceinline__ float minus_log(float x) {
  const int offset = (int)(__float_as_uint(x) - 0x3F3504F3u);                // 0x3F3504F3: sqrt(1/2)
  const float k = sub_rn(__uint_as_float(0x4B400000u + (u32)(offset >> 23)), 12582912.f);    // conversions are slow
  const float f = sub_rn(__uint_as_float((offset & 0x7FFFFF) + 0x3F3504F3u), 1.f);
  float s = divide(f, add_rn(f, 2.f));
  const float t = mul_rn(s, s);
  float p = mul_rn(t, 1.f / 9);
  p = mul_rn(add_rn(p, 1.f / 7), t);
  p = mul_rn(add_rn(p, 1.f / 5), t);
  p = mul_rn(add_rn(p, 1.f / 3), t);
  s = mul_rn(s, -2.f);
  return add_rn(add_rn(mul_rn(p, s), s), mul_rn(k, -0.69314718f));
}

// Philox4x32-10 with key = seed and counter = (token / 4, position, 0, 0): the bits of tokens 4b .. 4b + 3.
struct Bits { u32 word[4]; };
__device__ __forceinline__ Bits philox(u32 block, u32 position, u64 seed) {
  u32 a = block, b = position, c = 0, d = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 low0 = a * 0xD2511F53u, high0 = mul_high(a, 0xD2511F53u);
    const u32 low1 = c * 0xCD9E8D57u, high1 = mul_high(c, 0xCD9E8D57u);
    a = high1 ^ b ^ k0; b = low1; c = high0 ^ d ^ k1; d = low0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// Gumbel noise of 32 bits: -log(-log(1 - w)), w = (bits + 1/2) / 2^32.
__device__ __forceinline__ float gumbel(u32 bits) {
  constexpr float UNIT = 1.f / 4294967296.f, HALF = 1.f / 8589934592.f;
  float e;
  if (bits < 1u << 26) {                         // near 0, 1 - w has lost w's low bits: the series of -log(1 - w)
    const float w = add_rn(mul_rn((float)bits, UNIT), HALF);
    e = mul_rn(w, 1.f / 4);
    e = mul_rn(add_rn(e, 1.f / 3), w);
    e = mul_rn(add_rn(e, 1.f / 2), w);
    e = mul_rn(add_rn(e, 1.f), w);
  } else {
    e = minus_log(add_rn(mul_rn((float)~bits, UNIT), HALF));
  }
  return minus_log(e);
}

// A key that orders as (value descending, id ascending); 0 for what may never be chosen (-inf; callers turn NaN into -inf).
__device__ __forceinline__ u64 rank_key(float v, u32 id) {
  return v > minus_infinity() ? choice_key(add_rn(v, 0.f), id) : 0;          // -0 + 0 = +0: they are equal
}
__device__ __forceinline__ float key_value(u64 key) {
  const u32 b = (u32)(key >> 32);
  return key ? __uint_as_float(b & 0x80000000u ? b & 0x7fffffffu : ~b) : minus_infinity();
}

__device__ __forceinline__ void no_nan(float (&v)[8]) {                      // NaN becomes -inf
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = fmaxf(v[e], minus_infinity());
}
// Of two pairs of bf16 the larger ones; a number rather than NaN.
__device__ __forceinline__ u32 max_bf16(u32 a, u32 b) {
#ifdef EMULATION
  return __float_as_uint(fmaxf(high_float(a), high_float(b))) | __float_as_uint(fmaxf(low_float(a), low_float(b))) >> 16;
#else
  u32 most;
  asm("max.bf16x2 %0,%1,%2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
#endif
}
// 8 values from token `at` on (a multiple of 8) of a row of logits in bf16 or fp32, as they lie there.
template <bool FLOAT32> struct Eight { uint4 word[FLOAT32 ? 2 : 1]; };
template <bool FLOAT32>
__device__ __forceinline__ Eight<FLOAT32> fetch_logits(const void* logits, long long at) {
  Eight<FLOAT32> got;
  if constexpr (FLOAT32) {
    got.word[0] = load16((const float*)logits + at);
    got.word[1] = load16((const float*)logits + at + 4);
  } else {
    got.word[0] = load16((const bf16*)logits + at);
  }
  return got;
}
template <bool FLOAT32>
__device__ __forceinline__ Eight<FLOAT32> no_logits() {                      // beyond the vocabulary: -inf
  Eight<FLOAT32> got;
  const u32 word = FLOAT32 ? 0xff800000u : 0xff80ff80u;
#pragma unroll
  for (int i = 0; i < (FLOAT32 ? 2 : 1); i++) got.word[i] = make_uint4(word, word, word, word);
  return got;
}
// As numbers.
template <bool FLOAT32>
__device__ __forceinline__ void as_floats(float (&v)[8], const Eight<FLOAT32>& got) {
  if constexpr (FLOAT32) {
    const uint4 a = got.word[0], b = got.word[1];
    const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = __uint_as_float(w[e]);
  } else {
    unpack8(v, got.word[0]);
  }
}
// The largest of all.
template <bool FLOAT32, int N>
__device__ __forceinline__ float highest_of(const Eight<FLOAT32> (&got)[N]) {
  float most = minus_infinity();
  u32 pair = 0xff80ff80u;
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int k = 0; k < (FLOAT32 ? 2 : 1); k++) {
      const uint4 w = got[i].word[k];
      if constexpr (FLOAT32) {
        most = fmaxf(most, fmaxf(__uint_as_float(w.x), __uint_as_float(w.y)));
        most = fmaxf(most, fmaxf(__uint_as_float(w.z), __uint_as_float(w.w)));
      } else {
        pair = max_bf16(pair, max_bf16(max_bf16(w.x, w.y), max_bf16(w.z, w.w)));
      }
    }
  return FLOAT32 ? most : fmaxf(low_float(pair), high_float(pair));
}
template <bool FLOAT32>
__device__ __forceinline__ void logits_of(float (&v)[8], const Eight<FLOAT32>& got) {          // NaN as -inf
  as_floats<FLOAT32>(v, got);
  no_nan(v);
}
template <bool FLOAT32>
__device__ __forceinline__ void load_logits(float (&v)[8], const void* logits, long long at) {
  logits_of<FLOAT32>(v, fetch_logits<FLOAT32>(logits, at));
}
