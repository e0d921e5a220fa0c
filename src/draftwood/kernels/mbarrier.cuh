// Barriers in shared memory that a block's warps meet at one-sidedly (mbarrier of sm_90), the copy engine that tells them
// (cp.async.bulk), and registers handed from warps that fetch to warps that multiply. A phase of a barrier ends when `count`
// arrivals and all bytes that were expected have come; phases are waited for by their parity: 0, 1, 0, ... Included after
// warpgroup.cuh.
#pragma once

#ifdef EMULATION
namespace emulated {
struct Mbarrier { int count = 0, arrived = 0, bytes = 0; unsigned phase = 0; std::deque<Copy> copies; };
static Mbarrier mbarriers[SHARED / 8];
inline Mbarrier& mbarrier(u32 at) { place(at, 8); return mbarriers[at / 8]; }
inline void advance(Mbarrier& b) {
  if (b.arrived > b.count) fail("more arrivals than a barrier counts");
  if (b.arrived == b.count && b.bytes == 0) { b.arrived = 0; b.phase++; }
}
inline void land(Mbarrier& b) {
  const Copy c = b.copies.front();
  b.copies.pop_front();
  if (c.bytes <= 16) perform(c);               // cp.async
  else {
    if (c.to % 16 || (uintptr_t)c.from % 16 || c.bytes % 16) fail("bulk copy not aligned");
    memcpy(place(c.to, 16), c.from, c.bytes);
  }
  b.bytes -= c.bytes;
  advance(b);
}
}  // namespace emulated
inline void mbarrier_begin(u32 at, int count) { auto& b = emulated::mbarrier(at); b = {}; b.count = count; }
inline void mbarriers_begun() {}
inline void mbarrier_wait(u32 at, u32 parity) {
  auto& b = emulated::mbarrier(at);
  while ((b.phase & 1) == parity) {
    if (b.copies.empty()) emulated::leave();
    else emulated::land(b);
  }
}
inline void mbarrier_expect(u32 at, int bytes) {
  auto& b = emulated::mbarrier(at);
  b.arrived++; b.bytes += bytes;
  emulated::advance(b);
}
inline void mbarrier_arrive(u32 at) { mbarrier_expect(at, 0); }
inline void bulk_copy(u32 to, const void* from, int bytes, u32 mbarrier) {
  auto& b = emulated::mbarrier(mbarrier);
  b.copies.push_back({to, from, false, bytes});
  if (emulated::early) emulated::land(b);
}
template <int N> inline void give_registers() {}
template <int N> inline void take_registers() {}
#else
__device__ __forceinline__ void mbarrier_begin(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(at), "r"(count) : "memory");
}
// By the thread that began them, ahead of a barrier of the block or cluster.
__device__ __forceinline__ void mbarriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Until the phase of this parity has ended; a barrier that has just begun lets pass whoever waits for parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 at, u32 parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra again; }"
               ::"r"(at), "r"(parity) : "memory");
}
// By one thread: arrives, and so many bytes must come in this phase.
__device__ __forceinline__ void mbarrier_expect(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(at) : "memory");
}
// By the copy engine, which tells the barrier. 16 divides addresses and bytes.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(mbarrier) : "memory");
}
// Registers of a warp group, by all its threads: down to N, or up to it.
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
#endif
