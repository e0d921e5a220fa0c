// Gates in shared memory (mbarrier of sm_90) at which warps of a block meet one-sidedly, the copy engine that tells them, and
// registers handed from warps that fetch to warps that multiply. A gate's phase ends when `count` arrivals and all bytes that
// were expected have come; phases are waited for by their parity: 0, 1, 0, ... Included after ../warpgroup.cuh.
#pragma once

#ifdef EMULATION
namespace emulated {
struct Gate { int count = 0, arrived = 0, bytes = 0; unsigned phase = 0; std::deque<Copy> copies; };
static Gate gates[SHARED / 8];
inline Gate& gate(u32 at) { place(at, 8); return gates[at / 8]; }
inline void advance(Gate& b) {
  if (b.arrived == b.count && b.bytes == 0) { b.arrived = 0; b.phase++; }
}
inline void land(Gate& b) {
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
inline void gate_begin(u32 at, int count) { auto& b = emulated::gate(at); b = {}; b.count = count; }
inline void gates_begun() {}
inline void gate_wait(u32 at, u32 parity) {
  auto& b = emulated::gate(at);
  while ((b.phase & 1) == parity) {
    if (b.copies.empty()) emulated::leave();
    else emulated::land(b);
  }
}
inline void gate_arrive(u32 at) {
  emulated::meet_warp();
  auto& b = emulated::gate(at);
  if ((threadIdx.x & 31) == 0) { b.arrived++; emulated::advance(b); }
}
inline void gate_arrive_copied(u32 at) {
  auto& b = emulated::gate(at);
  auto& mine = emulated::copies[threadIdx.x];
  for (const auto& group : mine)
    for (const auto& c : group) { b.copies.push_back(c); b.bytes += c.bytes; }
  mine.clear();
  mine.push_back({});
  b.arrived++;
  emulated::advance(b);
}
inline void gate_expect(u32 at, int bytes) {
  auto& b = emulated::gate(at);
  b.arrived++; b.bytes += bytes;
  emulated::advance(b);
}
inline void bulk_copy(u32 to, const void* from, int bytes, u32 gate) {
  auto& b = emulated::gate(gate);
  b.copies.push_back({to, from, false, bytes});
  if (emulated::early) emulated::land(b);
}
inline u32 shared_load4(u32 a) { u32 v; memcpy(&v, emulated::place(a, 4), 4); return v; }
inline void shared_store4(u32 a, u32 v) { memcpy(emulated::place(a, 4), &v, 4); }
inline void bulk_copies(u32 to, const void* from, int bytes, u32 to2, const void* from2, int bytes2, u32 gate) {
  if ((threadIdx.x & 31) != 0) return;
  gate_expect(gate, bytes + bytes2);
  bulk_copy(to, from, bytes, gate);
  bulk_copy(to2, from2, bytes2, gate);
}
template <int N> inline void give_registers() {}
template <int N> inline void take_registers() {}
#else
__device__ __forceinline__ void gate_begin(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(at), "r"(count) : "memory");
}
// By the thread that began them, ahead of a barrier of the block.
__device__ __forceinline__ void gates_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Until the phase of this parity has ended; a gate that has just begun lets pass whoever waits for parity 1.
__device__ __forceinline__ void gate_wait(u32 at, u32 parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra again; }"
               ::"r"(at), "r"(parity) : "memory");
}
// By a whole warp: what its lanes did before is seen by whoever has waited.
__device__ __forceinline__ void gate_arrive(u32 at) {
  __syncwarp();
  asm volatile("{ .reg .pred p; setp.eq.u32 p,%1,0; @p mbarrier.arrive.shared::cta.b64 _,[%0]; }"
               ::"r"(at), "r"(threadIdx.x & 31) : "memory");
}
// By a thread: its arrival counts as soon as all its cp.async so far are done. Who waits fences (publish) before tensor cores read.
__device__ __forceinline__ void gate_arrive_copied(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// By one thread: arrives, and so many bytes must come in this phase.
__device__ __forceinline__ void gate_expect(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory");
}
// By a whole warp, one of whose lanes does it: two copies that the gate expects. Their registers are the same in all lanes.
__device__ __forceinline__ void bulk_copies(u32 to, const void* from, int bytes, u32 to2, const void* from2, int bytes2, u32 gate) {
  asm volatile("{ .reg .pred e; elect.sync _|e,0xffffffff; @e mbarrier.arrive.expect_tx.shared::cta.b64 _,[%6],%7;\n"
               "@e cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%6];\n"
               "@e cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%3],[%4],%5,[%6]; }"
               ::"r"(to), "l"(from), "r"(bytes), "r"(to2), "l"(from2), "r"(bytes2), "r"(gate), "r"(bytes + bytes2) : "memory");
}
// By the copy engine, which tells the gate. 16 divides addresses and bytes.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(gate) : "memory");
}
__device__ __forceinline__ u32 shared_load4(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void shared_store4(u32 a, u32 v) { asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory"); }
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
#endif
