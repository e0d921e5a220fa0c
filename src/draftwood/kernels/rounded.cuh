// Arithmetic whose rounding is part of a kernel's meaning: nothing is fused or reordered by a compiler. And loads of what an
// earlier kernel wrote, one number at a time. Include as "../rounded.cuh"; it brings common.cuh.
#pragma once
#include "common.cuh"

#ifdef EMULATION
inline float add_rn(float a, float b) { return a + b; }
inline float sub_rn(float a, float b) { return a - b; }
inline float mul_rn(float a, float b) { return a * b; }
inline float div_rn(float a, float b) { return a / b; }
inline float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rcp_rn(float a) { return 1.f / a; }
inline float rsqrt_fast(float a) { return 1.f / sqrtf(a); }
inline float exp2_fast(float x) { return exp2f(x); }
inline int load_int(const int* p) { return *p; }
inline long long load_long(const long long* p) { return *p; }
#else
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float rcp_rn(float a) { return __frcp_rn(a); }
__device__ __forceinline__ float rsqrt_fast(float a) { return rsqrtf(a); }       // 2 units in the last place
__device__ __forceinline__ float exp2_fast(float x) {                            // exact at 0 and -inf
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// Not the read-only path: an earlier kernel may have written it while this one's blocks already ran.
__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ long long load_long(const long long* p) {
  long long v;
  asm volatile("ld.global.s64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
#endif

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16(v)); }   // to bf16 and back
