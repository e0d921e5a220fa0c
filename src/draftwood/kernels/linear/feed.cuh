// Copies by the copy engine of sm_90 (../mbarrier.cuh) to blocks of a cluster, and what warps that multiply need to be fed.
// ALONG: blocks of the cluster that have the same weights, side by side along the tokens; ACROSS: that have the same tokens, along
// the rows of weights. Block (along, across) of a cluster has rank across * ALONG + along. Included after warpgroup.cuh.
#pragma once
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
template <int T> inline void settled(float (&)[T][4]) {}
inline void store4_if(bool on, void* to, u32 v) { if (on) memcpy(to, &v, 4); }
inline void store8_if(bool on, void* to, uint2 v) { if (on) *(uint2*)to = v; }
inline uint2 load8_if(bool on, const void* from) { return on ? *(const uint2*)from : uint2{0, 0}; }
#else
constexpr int SAME_ROWS = ALONG, SAME_TOKENS = ACROSS;
// By all threads: the barriers of the cluster may be used.
__device__ __forceinline__ void barriers_begun() {
  mbarriers_begun();
  if (ALONG * ACROSS > 1) asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else __syncthreads();
}
// By all threads: nobody leaves while others copy to it or tell its barriers. Released, or what a thread has told last could reach a
// block that has left: a launch failure, which blocks that only skip tiles met at once.
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
__device__ __forceinline__ void store8_if(bool on, void* to, uint2 v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%3,0; @p st.global.v2.u32 [%0],{%1,%2}; }"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"((u32)on) : "memory");
}
__device__ __forceinline__ uint2 load8_if(bool on, const void* from) {
  uint2 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%3,0; mov.u32 %0,0; mov.u32 %1,0; @p ld.global.v2.u32 {%0,%1},[%2]; }"
               : "=r"(v.x), "=r"(v.y) : "l"(from), "r"((u32)on) : "memory");
  return v;
}
#endif
