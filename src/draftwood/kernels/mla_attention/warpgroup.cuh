// Hopper's warpgroup products (sm_90a only) and what they need around them. emulation/warpgroup.h has the same names for a CPU.
//
// Operands are tiles in shared memory in pieces of 128-byte rows (64 values): 8 rows are 1,024 bytes, an aligned unit in which
// 16-byte chunk c of row r is at chunk c ^ r. A step has 16 of the summed index.
//  - along rows: the summed index runs within rows; a step is 32 bytes of each row; rows (of A 64, of B 8 N) follow each other.
//  - across rows: the summed index counts rows; a step is 16 rows, and the 64 values of a row are the 64 rows of A.
#pragma once

constexpr u32 UNIT_ROWS = 1024;                            // bytes of 8 rows

// Of an operand from shared address `at`: 128-byte swizzle, units 1,024 bytes apart. (The other distance, between pieces, is not used:
// no operand is wider than a piece. It is set alike.)
__device__ __forceinline__ u64 operand(u32 at) {
  constexpr u64 APART = UNIT_ROWS >> 4;
  return 1ull << 62 | APART << 32 | APART << 16 | (u64)((at & 0x3ffff) >> 4);
}

__device__ __forceinline__ u64 further(u64 of, int bytes) { return (of & 0xffffffff00000000ull) | ((u32)of + (u32)(bytes >> 4)); }

#include "../elected.cuh"
#ifdef EMULATION
#include "emulation/warpgroup.h"
#else
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the committed groups are on their way.
template <int N> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// After a wait, before results are used: the compiler does not know that they came late.
template <int N> __device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// What this thread wrote to shared memory, or knows to be written, is visible to products that begin later.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(u32 at) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s,[%0]; }" ::"r"(at) : "memory");
}
__device__ __forceinline__ u32 max_bf16_pair(u32 a, u32 b) { u32 d; asm("max.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
// 8x8 tiles of 16-bit values, turned: lane l gives the address of row l%8 of tile l/8; tile i is what registers i held as columns.
__device__ __forceinline__ void stmatrix4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix4(u32 at, u32 a, u32 b, u32 c, u32 d) {          // as rows, not turned
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix2_trans(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0],{%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PRODUCT(N, LIST, A, B, P, T, ...)                                                                                   \
  asm volatile("{ .reg .pred p; setp.ne.b32 p," P ",0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" LIST "}," \
               A "," B ",p,1,1," T ",0; }" : __VA_ARGS__ : "l"(a), "l"(b), "r"((int)add), "n"(ACROSS))
// One step of D += A B, D 64 x 8 E (D = A B if not `add`). A is across rows or along them, B along rows. Lane (g, q) of warp w of
// the four has of column tile j: d[4j], d[4j+1] row 16w + g, columns 8j + 2q, 8j + 2q + 1; d[4j+2], d[4j+3] the same of row 16w + g + 8.
template <int E, bool ACROSS> __device__ __forceinline__ void product(float (&d)[E * 4], u64 a, u64 b, bool add) {
  static_assert(E == 1 || E == 2 || E == 4 || E == 5 || E == 9, "the widths that are used");
  if constexpr (E == 1)
    PRODUCT("8", "%0,%1,%2,%3", "%4", "%5", "%6", "%7", D4(0));
  else if constexpr (E == 2)
    PRODUCT("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", D4(0), D4(4));
  else if constexpr (E == 4)
    PRODUCT("32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", D4(0), D4(4), D4(8), D4(12));
  else if constexpr (E == 5)
    PRODUCT("40", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19", "%20", "%21", "%22", "%23",
            D4(0), D4(4), D4(8), D4(12), D4(16));
  else
    PRODUCT("72", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,"
            "%31,%32,%33,%34,%35", "%36", "%37", "%38", "%39", D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28), D4(32));
}
// The same with A along rows, D 64 x 64; B is across rows or along them.
template <bool ACROSS> __device__ __forceinline__ void product_turned(float (&d)[32], u64 a, u64 b, bool add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p,%34,0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,"
               "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},%32,%33,p,1,1,0,%35; }"
               : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28) : "l"(a), "l"(b), "r"((int)add), "n"(ACROSS));
}
#undef PRODUCT
#undef D4
#endif
