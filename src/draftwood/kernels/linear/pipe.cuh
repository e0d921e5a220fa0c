// Copies by the copy engine of sm_90 (cp.async.bulk) to all blocks of a cluster, and the barriers in shared memory that tell of them.
// TOGETHER: blocks of the cluster. Included after warpgroup.cuh.
//
// A barrier's phase ends when its count of arrivals came and all bytes that were expected; phases are waited for by their parity.
#pragma once

#ifdef EMULATION         // blocks run one after another: each copies everything itself
constexpr int SHARERS = 1;
namespace emulated {
struct Mbarrier { int count = 0, arrived = 0, bytes = 0; unsigned phase = 0; std::deque<Copy> copies; };
static Mbarrier mbarriers[SHARED / 8];
inline Mbarrier& mbarrier(u32 at) { place(at, 8); return mbarriers[at / 8]; }
inline void advance(Mbarrier& b) {
  if (b.arrived == b.count && b.bytes == 0) { b.arrived = 0; b.phase++; }
}
inline void land(Mbarrier& b) {
  const Copy c = b.copies.front();
  b.copies.pop_front();
  if (c.to % 16 || (uintptr_t)c.from % 16 || c.bytes % 16) fail("bulk copy not aligned");
  memcpy(place(c.to, 16), c.from, c.bytes);
  b.bytes -= c.bytes;
  advance(b);
}
}  // namespace emulated
inline void mbarrier_begin(u32 at, int count) { auto& b = emulated::mbarrier(at); b = {}; b.count = count; }
inline void barriers_begun() { __syncthreads(); }
inline void mbarrier_wait(u32 at, int parity) {
  auto& b = emulated::mbarrier(at);
  while ((int)(b.phase & 1) == parity) {
    if (b.copies.empty()) emulated::leave();
    else emulated::land(b);
  }
}
inline void mbarrier_expect(u32 at, int bytes) {
  auto& b = emulated::mbarrier(at);
  b.arrived++; b.bytes += bytes;
  emulated::advance(b);
}
inline void mbarrier_arrive_all(u32 at) {
  if ((threadIdx.x & 31) == 0) { auto& b = emulated::mbarrier(at); b.arrived++; emulated::advance(b); }
}
inline void bulk_to_all(u32 to, const void* from, int bytes, u32 barrier) {
  auto& b = emulated::mbarrier(barrier);
  b.copies.push_back({to, from, false, bytes});
  if (emulated::early) emulated::land(b);
}
#else
constexpr int SHARERS = TOGETHER;
__device__ __forceinline__ void mbarrier_begin(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(at), "r"(count) : "memory");
}
// By all threads: the barriers of the cluster may be used.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if (TOGETHER > 1) asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else __syncthreads();
}
__device__ __forceinline__ void mbarrier_wait(u32 at, int parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra again; }"
               ::"r"(at), "r"(parity) : "memory");
}
// Arrives, and so many bytes must come in this phase.
__device__ __forceinline__ void mbarrier_expect(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory");
}
// By a warp: arrives at the barrier in this place of every block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_all(u32 at) {
  const u32 rank = threadIdx.x & 31;
  if (rank < TOGETHER)
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r,%0,%1; mbarrier.arrive.shared::cluster.b64 _,[r]; }" ::"r"(at), "r"(rank) : "memory");
}
// To this place of every block of the cluster, and it tells each one's barrier. 16 divides addresses and bytes.
__device__ __forceinline__ void bulk_to_all(u32 to, const void* from, int bytes, u32 barrier) {
  if (TOGETHER > 1)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)((1 << TOGETHER) - 1)) : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif
