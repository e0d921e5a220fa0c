// INT4 weights as A fragments of an mma: two instructions for two weights, and a shift for eight.
//
// A code q of 0..15 in bits 0..3 or 4..7 of an otherwise empty half word is the bfloat16 number q * 2^-133 or q * 2^-129: bfloat16
// counts evenly from 0 to 0xff (subnormal, and the first exponent). So one fma(q, scale, -8 scale) with a scale shifted by as
// many powers of two gives (code - 8) * scale in one rounding, exactly as if the difference had been formed first. The usual
// way, q in the mantissa of 128 and minus 136, takes an instruction more where weights are scaled (136 scale is no
// bfloat16), and a shift for each nibble.
//
// 2^133 is too large for a bfloat16: weights come out smaller by a power of two, and so does every sum; `finish` undoes it. That
// moves no bit: every step scales exactly (of the scaled chain from scales of 2^-110 to 2^10, beyond which checkpoints do not go).
#pragma once
#include "../common.cuh"

#ifdef EMULATION
__device__ __forceinline__ u32 fma_bf16(u32 a, u32 b, u32 c) {
  return pack_bf16(fmaf(low_float(a), low_float(b), low_float(c)), fmaf(high_float(a), high_float(b), high_float(c)));
}
__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
  return pack_bf16(low_float(a) * low_float(b), high_float(a) * high_float(b));
}
__device__ __forceinline__ u32 low_twice(u32 v) { return (v & 0xffffu) | v << 16; }
__device__ __forceinline__ u32 high_twice(u32 v) { return (v & 0xffff0000u) | v >> 16; }
#else
// a * b + c of two bfloat16 pairs, rounded to nearest even once; subnormals count.
__device__ __forceinline__ u32 fma_bf16(u32 a, u32 b, u32 c) {
  u32 o;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(o) : "r"(a), "r"(b), "r"(c));
  return o;
}
__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
  u32 o;
  asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(o) : "r"(a), "r"(b));
  return o;
}
// The low (high) half of v in both halves: no instruction where a product reads it (HFMA2 has .H0_H0; a byte_perm would stay).
__device__ __forceinline__ u32 low_twice(u32 v) {
  u32 o;
  asm("{ .reg .b16 l,h; mov.b32 {l,h},%1; mov.b32 %0,{l,l}; }" : "=r"(o) : "r"(v));
  return o;
}
__device__ __forceinline__ u32 high_twice(u32 v) {
  u32 o;
  asm("{ .reg .b16 l,h; mov.b32 {l,h},%1; mov.b32 %0,{h,h}; }" : "=r"(o) : "r"(v));
  return o;
}
#endif

// What the codes of a row are multiplied by, and what is added: for rows 0..7 of a tile, whose codes are in bits 0..3, in the low
// half, for rows 8..15 (bits 4..7) in the high half.
struct Factors { u32 factor, zero; };
constexpr u32 BF16_2_127_2_123 = 0x7d007f00u, BF16_MINUS_2_M3 = 0xbe00be00u;
constexpr u32 BF16_2_117_2_113 = 0x78007a00u, BF16_MINUS_2_M13 = 0xb900b900u;

// (code - 8) / 64
__device__ __forceinline__ Factors whole_factors() { return {BF16_2_127_2_123, BF16_MINUS_2_M3}; }
// (code - 8) * scale / 65536; scales: of the upper rows in the low half, of the lower rows in the high half
__device__ __forceinline__ Factors scaled_factors(u32 scales) {
  return {multiply_bf16(scales, BF16_2_117_2_113), multiply_bf16(scales, BF16_MINUS_2_M13)};
}
#ifdef SCALED
constexpr float FINISH = 65536.f;
#else
constexpr float FINISH = 64.f;
#endif
__device__ __forceinline__ float finish(float sum) { return sum * FINISH; }

// One word -> one A fragment: register p holds nibbles p and p + 4; even ones are of upper rows.
__device__ __forceinline__ void int4_weights(u32 (&a)[4], u32 v, const Factors& f) {
  const u32 later = v >> 8;
  const u32 upper = low_twice(f.factor), upper_zero = low_twice(f.zero);
  const u32 lower = high_twice(f.factor), lower_zero = high_twice(f.zero);
  a[0] = fma_bf16(v & 0x000f000fu, upper, upper_zero);
  a[1] = fma_bf16(v & 0x00f000f0u, lower, lower_zero);
  a[2] = fma_bf16(later & 0x000f000fu, upper, upper_zero);
  a[3] = fma_bf16(later & 0x00f000f0u, lower, lower_zero);
}
