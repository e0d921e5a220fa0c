// What the norm and rotary kernels share.
//
// ROUNDING (Hugging Face's modules, model/layers.py): a sum of residuals is rounded to bf16; a norm is taken in fp32,
// x * rsqrt(mean(x^2) + eps) is rounded to bf16 and then multiplied by the bf16 weight, rounded again; a rotation is
// fp32 on bf16 values (two products, then their sum or difference, each rounded, not fused), rounded to bf16 once.
// LAW 1.  A row belongs to one block, or a head to one group of lanes, whatever else runs; all sums have one order:
//   a lane's own values ascending, the butterfly of warp_sum, then the warps ascending through a second butterfly.
// PDL.  A kernel that goes early lets the next one's blocks start before this one has waited, so that they fetch their weights while
//   the kernel before this one ends, not only while this one runs: common.cuh, rule (b).
#pragma once
#include "../rounded.cuh"

__device__ __forceinline__ void go_and_wait() {
  pdl_go_early();
  pdl_wait();
}
__device__ __forceinline__ void go_late() { pdl_go(); }                // some time after the wait
// By common.cuh's rule (d): read through load_new, wait at the end.
__device__ __forceinline__ void go_beside() { pdl_go(); }

__device__ __forceinline__ float squares(const float (&v)[8]) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) s = fma_rn(v[i], v[i], s);
  return s;
}
__device__ __forceinline__ float scale_of(float sum, int width, float eps) { return rsqrt_fast(add_rn(div_rn(sum, (float)width), eps)); }
__device__ __forceinline__ void normalise(float (&v)[8], float scale, const uint4& weight) {   // the caller rounds the product
  float w[8];
  unpack8(w, weight);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = rounded(v[i] * scale) * w[i];
}
__device__ __forceinline__ void round8(float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = rounded(v[i]);
}

// A turn is (amplitude cos, amplitude sin) of an angle; the table is [positions, width / 2].
__device__ __forceinline__ const float2* turns_at(const float2* table, long long position, int positions, int half) {
  position = position < 0 ? 0 : position >= positions ? positions - 1 : position;   // what stands beyond is never committed
  return table + position * half;
}
// Pairs (2i, 2i+1) of 8 values whose first pair is turned by t[0].
__device__ __forceinline__ void turn_pairs(float (&v)[8], const float2* t) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 c = t[i];
    const float a = v[2 * i], b = v[2 * i + 1];
    v[2 * i] = sub_rn(mul_rn(a, c.x), mul_rn(b, c.y));
    v[2 * i + 1] = add_rn(mul_rn(a, c.y), mul_rn(b, c.x));
  }
}
// The turns of 8 values: four, which begin on 32 bytes.
__device__ __forceinline__ void load_turns(float2 (&t)[4], const float2* from) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 v = load16(from + 2 * i);
    t[2 * i] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    t[2 * i + 1] = make_float2(__uint_as_float(v.z), __uint_as_float(v.w));
  }
}
// Halves (i, i + width/2) of a head held 8 values a lane; the partner lane is `apart` lanes away (lane id xor).
// second: this lane holds values of the second half.  t: the turn of this lane's first value in its half.
__device__ __forceinline__ void turn_halves(float (&v)[8], const float2* t, int apart, bool second) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 c = t[i];
    const float other = __shfl_xor_sync(ALL_LANES, v[i], apart);
    const float cross = mul_rn(other, c.y), own = mul_rn(v[i], c.x);
    v[i] = second ? add_rn(own, cross) : sub_rn(own, cross);
  }
}
