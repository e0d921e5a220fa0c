// Copies by the copy engine of sm_90 (../mbarrier.cuh) to blocks of a cluster, and what warps that multiply need to be fed.
// ALONG: blocks of the cluster that have the same weights, side by side along the tokens; ACROSS: that have the same tokens, along
// the rows of weights. Block (along, across) of a cluster has rank across * ALONG + along. Included after warpgroup.cuh.
#pragma once
#include "../elected.cuh"
#include "../mbarrier.cuh"

#ifdef EMULATION         // blocks run one after another: each copies everything itself
constexpr int SAME_ROWS = 1, SAME_TOKENS = 1;
inline void barriers_begun() { __syncthreads(); }
inline void cluster_end() {}
struct Peers {           // whom this block tells that its slots are empty
  u32 at;
  Peers(u32 empty, int, int) : at(empty) {}
  void tell(u32 slot) const { if ((threadIdx.x & 31) == 0) mbarrier_arrive(at + 8 * slot); }
};
inline void bulk_copy_to(u32 to, const void* from, int bytes, u32 mbarrier, u32) { bulk_copy(to, from, bytes, mbarrier); }
inline u32 transposed(u32 v) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u32 low = emulated::from_lane(v, 8 * q + g / 2), high = emulated::from_lane(v, 8 * q + 4 + g / 2);
  return (low >> g % 2 * 16 & 0xffff) | (high >> g % 2 * 16) << 16;
}
// stmatrix: element (row lane / 4, columns 2 q, 2 q + 1) of matrix m; turned: the same of the transpose.
inline void store_chunks(u32 at, uint4 v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  const int lane = threadIdx.x & 31;
  for (int m = 0; m < 4; m++) {
    const u32 to = emulated::from_lane(at, m * 8 + lane / 4);
    memcpy(emulated::place(to, 16) + lane % 4 * 4, &w[m], 4);
  }
}
inline void store_turned(u32 at, u32 a, u32 b) {
  const u32 v[2] = {a, b};
  const int lane = threadIdx.x & 31;
  for (int m = 0; m < 2; m++)
    for (int e = 0; e < 2; e++) {
      const u32 to = emulated::from_lane(at, m * 8 + lane % 4 * 2 + e);
      memcpy(emulated::place(to, 16) + lane / 4 * 2, (const char*)&v[m] + 2 * e, 2);
    }
}
static emulated::Barrier group_barriers[2];
inline void group_meets(int group) { emulated::meet(group_barriers[group], 128); }
inline int thread_here() { return threadIdx.x; }
inline float exponential(float x) { return __expf(x); }
inline float reciprocal(float x) { return 1.f / x; }
template <int T> inline void settled(float (&)[T][4]) {}
inline void store4_if(bool on, void* to, u32 v) { if (on) memcpy(to, &v, 4); }
inline void store16_if(bool on, void* to, const uint4& v) { if (on) *(uint4*)to = v; }
inline uint4 load16_if(bool on, const void* from) { return on ? *(const uint4*)from : uint4{0, 0, 0, 0}; }
#else
constexpr int SAME_ROWS = ALONG, SAME_TOKENS = ACROSS;
// By all threads: the barriers of the cluster may be used.
__device__ __forceinline__ void barriers_begun() {
  mbarriers_begun();
  if (ALONG * ACROSS > 1) asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else __syncthreads();
}
// By all threads: nobody leaves while others copy to it or tell its barriers. Released, or what a thread has told last could reach
// a block that has left: a launch failure, which blocks that only skip tiles met at once.
__device__ __forceinline__ void cluster_end() {
  if (ALONG * ACROSS > 1) asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Whom this block tells that its slots are empty: those that copy to it, one for each of a warp's first lanes.
struct Peers {
  u32 at;
  bool on;
  __device__ __forceinline__ Peers(u32 empty, int along, int across) {
    const int lane = threadIdx.x & 31, other = lane - ALONG;
    const u32 rank = lane < ALONG ? across * ALONG + lane : (other + (other >= across)) * ALONG + along;
    on = lane < ALONG + ACROSS - 1;
    asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(empty), "r"(on ? rank : 0));
  }
  __device__ __forceinline__ void tell(u32 slot) const {
    if (on) asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" ::"r"(at + 8 * slot) : "memory");
  }
};
// To this place of every block of the cluster whose bit is in `mask`, and it tells each one's barrier.
__device__ __forceinline__ void bulk_copy_to(u32 to, const void* from, int bytes, u32 mbarrier, u32 mask) {
  if (mask & (mask - 1))
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(mbarrier), "h"((unsigned short)mask) : "memory");
  else bulk_copy(to, from, bytes, mbarrier);
}
// An 8 x 8 matrix of 16-bit values, two of row g in lane (g, q), to its transpose in the same form.
__device__ __forceinline__ u32 transposed(u32 v) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(v));
  return r;
}
// Word m of lanes (g, 0..3) becomes the 16 bytes at the address that lane 8m + g gives.
__device__ __forceinline__ void store_chunks(u32 at, uint4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};"
               ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Two 8 x 8 matrices of 16-bit values, two of row g in lane (g, q): column c becomes the 16 bytes at the address that lane c
// gives, of the second one lane 8 + c.
__device__ __forceinline__ void store_turned(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0],{%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
// By all threads of the group: a barrier of its four warps.
__device__ __forceinline__ void group_meets(int group) { asm volatile("bar.sync %0,128;" ::"r"(group + 1) : "memory"); }
// threadIdx.x, read where it stands: nothing that is made of it takes registers in the loop of products.
__device__ __forceinline__ int thread_here() {
  int x;
  asm volatile("mov.u32 %0,%%tid.x;" : "=r"(x));
  return x;
}
// e^x as __expf has it but for results that are no normal numbers, and 1 / x to one place of the last; both are 0 there.
__device__ __forceinline__ float exponential(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(e) : "f"(x * 1.4426950216293335f));
  return e;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}
// After a wait for products: nothing that reads d moves above it (then ptxas would wait after each product).
template <int T> __device__ __forceinline__ void settled(float (&d)[T][4]) {
#pragma unroll
  for (int t = 0; t < T; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[t][i])::"memory");
}
// Predicated inside the asm: a C++ if would cut an unrolled loop into basic blocks.
__device__ __forceinline__ void store4_if(bool on, void* to, u32 v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%2,0; @p st.global.u32 [%0],%1; }" ::"l"(to), "r"(v), "r"((u32)on) : "memory");
}
__device__ __forceinline__ void store16_if(bool on, void* to, const uint4& v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%5,0; @p st.global.v4.u32 [%0],{%1,%2,%3,%4}; }"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((u32)on) : "memory");
}
__device__ __forceinline__ uint4 load16_if(bool on, const void* from) {        // zeros if off
  uint4 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%5,0; mov.u32 %0,0; mov.u32 %1,0; mov.u32 %2,0; mov.u32 %3,0;\n"
               "@p ld.global.v4.u32 {%0,%1,%2,%3},[%4]; }"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "r"((u32)on) : "memory");
  return v;
}
#endif
