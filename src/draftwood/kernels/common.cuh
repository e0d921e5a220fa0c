// Small device pieces that every kernel here may use: types, loads, cp.async, ldmatrix, mma, conversions, warp reductions.
// Include as "../common.cuh" (the cache key follows that path). Everything is inline; nothing here holds state.
//
// Rules that the pieces keep:
//  - mma.sync, ldmatrix and cp.async only: sm_90a, sm_100a, sm_103a and sm_120a all have them.
//  - Reductions have one fixed order, so a row's bits do not depend on what else runs (law 1).
//  - No L2 cache hint on cp.async: with a uniform shared offset ptxas 13.0.88 emits LDGSTS [R+UR0],desc[UR1], an illegal
//    instruction at run time.
#pragma once
#ifdef EMULATION         // on a CPU, for tests: the same names
#include "emulation.h"
#else
#include <cuda_bf16.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;

constexpr u32 ALL_LANES = 0xffffffffu;

// The block's dynamic shared memory; once in a kernel.
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) type name[]

// ---------------------------------------------------------------- programmatic dependent launch
// pdl_wait: everything the previous kernel of the stream wrote is visible after it; returns at once without a PDL edge.
// pdl_go: the next kernel's blocks may start, when all blocks of this one have called it or left.
//
// What may be read when (tests/kernels/test_launch_order.py looks at the sources):
//  (a) In every grid at least one block waits. So "my predecessor is done" implies that all earlier kernels are done too, and
//      after its wait a kernel may read and write whatever it likes.
//  (b) The rule is wait, then go. A kernel that goes first (pdl_go_early) lets the next one start while the one
//      before it still runs. What follows k of those in a row may before its own wait read only what is older than the last k + 1
//      kernels: weights, and tables that no step writes.
//  (c) A kernel that reads before its wait what a step has written (down of moe_int4) needs a predecessor that waits and then goes,
//      which says so in a line of its own: "go after wait".
//  (d) A kernel launched beside the one before it (`whole`, `settle` of moe_route; turn_and_store) goes at once and reads what is
//      older than that one, which must wait and then go: then all before it is done. It reads that through load_new, since no wait
//      has made L1 forget; it writes nothing that the one before reads or writes; and a block of it waits at its end, for (a).
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_go() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void pdl_go_early() { pdl_go(); }                 // ahead of the wait, by rule (b)

// ---------------------------------------------------------------- loads and stores of 16 and 8 bytes
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Plain: L1 keeps the line for the other warps of the multiprocessor. Volatile asm: the compiler leaves it where it stands.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Read-only data that is used once (weights): the non-coherent path, not kept in L1. Never for what this kernel waits for.
__device__ __forceinline__ uint4 load16_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// From L2, for what L1 may hold an older copy of.
__device__ __forceinline__ uint4 load16_new(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
template <class T> __device__ __forceinline__ T load_new(const T* p) { return __ldcg(p); }
__device__ __forceinline__ void store16(void* p, const uint4& v) { *reinterpret_cast<uint4*>(p) = v; }
__device__ __forceinline__ uint4 shared_load16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ uint2 shared_load8(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
__device__ __forceinline__ void shared_store16(u32 a, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---------------------------------------------------------------- cp.async: global -> shared, 16 bytes a lane
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
// Predicated inside the asm: a C++ if would cut an unrolled loop into basic blocks. Shared memory keeps what it held if off.
__device__ __forceinline__ void copy16_if(bool on, u32 to, const void* from) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%2,0; @p cp.async.cg.shared.global [%0],[%1],16; }"
               ::"r"(to), "l"(from), "r"((u32)on) : "memory");
}
// Writes zeros when off; `from` is then not read but must still be a valid address.
__device__ __forceinline__ void copy16_or_zero(bool on, u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(on ? 16u : 0u) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N of this thread's groups are still on their way.
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---------------------------------------------------------------- ldmatrix: 8x8 tiles of 16-bit values
// Lane l gives the address of row l%8 of matrix l/8 (16 bytes, 16-byte aligned); register i holds matrix i as an mma fragment.
__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void ldmatrix2(u32 (&r)[2], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void ldmatrix2_trans(u32 (&r)[2], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory");
}

// ---------------------------------------------------------------- mma m16n8k16, bf16 x bf16 -> fp32
// Lane (g = lane/4, q = lane%4). A: a[0] row g, k 2q..2q+1; a[1] row g+8; a[2] row g, k 2q+8..; a[3] row g+8, k 2q+8...
// B: b0 column g, k 2q..2q+1; b1 column g, k 2q+8... C/D: d[0], d[1] row g, columns 2q, 2q+1; d[2], d[3] row g+8.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {          // d += A B
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {    // d = A B
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Two fp32 -> bf16 pair, to nearest even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<u32*>(&v);
}
#endif  // EMULATION

// ---------------------------------------------------------------- bf16 pairs in one register (low half first in memory)
__device__ __forceinline__ float low_float(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_float(u32 v) { return __uint_as_float(v & 0xffff0000u); }
// 8 bf16 of 16 bytes -> fp32
__device__ __forceinline__ void unpack8(float (&f)[8], const uint4& v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) { f[2 * i] = low_float(w[i]); f[2 * i + 1] = high_float(w[i]); }
}
__device__ __forceinline__ uint4 pack8(const float (&f)[8]) {
  return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
}

// ---------------------------------------------------------------- warp reductions: every lane gets the same bits
// Butterfly over lane distance 16, 8, 4, 2, 1. a + b == b + a bitwise, so the order is the same seen from every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(ALL_LANES, v, d);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, d));
  return v;
}
__device__ __forceinline__ u64 warp_max(u64 v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) { const u64 o = __shfl_xor_sync(ALL_LANES, v, d); v = o > v ? o : v; }
  return v;
}
// A u32 that orders as the float does (-inf < ... < -0 < +0 < ... < inf < NaN with sign 0).
__device__ __forceinline__ u32 float_order(float f) {
  const u32 b = __float_as_uint(f);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
// Larger value first, then the smaller id: the maximum of these keys is the choice "ties to the lowest id".
__device__ __forceinline__ u64 choice_key(float f, u32 id) { return (u64)float_order(f) << 32 | (u32)~id; }
__device__ __forceinline__ u32 choice_id(u64 key) { return ~(u32)key; }
