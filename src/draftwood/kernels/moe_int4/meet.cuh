// What the crews' warps meet by beside ../mbarrier.cuh: arrivals of whole warps and of copies by lanes, copies in pairs, words in
// shared memory. Included after ../warpgroup.cuh.
#pragma once
#include "../elected.cuh"
#include "../mbarrier.cuh"

#ifdef EMULATION
inline void warp_arrives(u32 at) {
  emulated::meet_warp();
  auto& b = emulated::mbarrier(at);
  if ((threadIdx.x & 31) == 0) { b.arrived++; emulated::advance(b); }
}
inline void mbarrier_arrive_copied(u32 at) {
  auto& b = emulated::mbarrier(at);
  auto& mine = emulated::copies[threadIdx.x];
  for (const auto& group : mine)
    for (const auto& c : group) { b.copies.push_back(c); b.bytes += c.bytes; }
  mine.clear();
  mine.push_back({});
  b.arrived++;
  emulated::advance(b);
}
inline u32 shared_load4(u32 a) { u32 v; memcpy(&v, emulated::place(a, 4), 4); return v; }
inline void shared_store4(u32 a, u32 v) { memcpy(emulated::place(a, 4), &v, 4); }
inline void bulk_copies(u32 to, const void* from, int bytes, u32 to2, const void* from2, int bytes2, u32 mbarrier) {
  if ((threadIdx.x & 31) != 0) return;
  mbarrier_expect(mbarrier, bytes + bytes2);
  bulk_copy(to, from, bytes, mbarrier);
  bulk_copy(to2, from2, bytes2, mbarrier);
}
#else
// By a whole warp: what its lanes did before is seen by whoever has waited.
__device__ __forceinline__ void warp_arrives(u32 at) {
  __syncwarp();
  asm volatile("{ .reg .pred p; setp.eq.u32 p,%1,0; @p mbarrier.arrive.shared::cta.b64 _,[%0]; }"
               ::"r"(at), "r"(threadIdx.x & 31) : "memory");
}
// By a thread: its arrival counts as soon as all its cp.async so far are done. Who waits fences (publish) before tensor cores read.
__device__ __forceinline__ void mbarrier_arrive_copied(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// By a whole warp, one of whose lanes does it: two copies that the barrier expects. Their registers are the same in all lanes.
__device__ __forceinline__ void bulk_copies(u32 to, const void* from, int bytes, u32 to2, const void* from2, int bytes2, u32 mbarrier) {
  asm volatile("{ .reg .pred e; elect.sync _|e,0xffffffff; @e mbarrier.arrive.expect_tx.shared::cta.b64 _,[%6],%7;\n"
               "@e cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%6];\n"
               "@e cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%3],[%4],%5,[%6]; }"
               ::"r"(to), "l"(from), "r"(bytes), "r"(to2), "l"(from2), "r"(bytes2), "r"(mbarrier), "r"(bytes + bytes2) : "memory");
}
__device__ __forceinline__ u32 shared_load4(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void shared_store4(u32 a, u32 v) { asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory"); }
#endif
