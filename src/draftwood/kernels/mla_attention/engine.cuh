// The copy engine of sm_90 with tensor maps: boxes of 64 x 64 values of a matrix to shared memory, swizzled, in all blocks of a
// cluster. Arrivals at barriers of other blocks say nothing of what was written: a release for the cluster costs 700 cycles.
#pragma once

struct __align__(64) Map { u64 words[16]; };               // the driver's, of a matrix: boxes of 64 x 64 values, 128-byte swizzle

#ifdef EMULATION         // a box, or what is sent to the other block, is an arrival too
#define CLUSTER
#define BOXES_OF(matrix) const Map
constexpr int page_arrivals(int boxes) { return 1 + boxes; }
constexpr int sent_arrivals(int copies) { return 1 + copies + 16; }
inline int block_of_cluster() { return block_of_crew(); }
template <int COUNT> void cluster_begun() { wait_for(crew_barrier, COUNT * TOGETHER); }
inline void cluster_ended() { wait_for(crew_barrier, blockDim.x * TOGETHER); }
inline void arrive_at_all(u32 at) { if ((threadIdx.x & 31) == 0) arrive({at, nullptr, 3, block_of_crew()}); }
inline void mbarrier_expect(u32 at, int) { arrive({at, nullptr, 3, block_of_crew()}); }
inline void box(u32 to, const void* map, int x, int y, u32 tell) {
  const bf16* from = *(const bf16* const*)map + (size_t)y * WIDTH + x;
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 8; c++) copy16(to + r * 128 + ((c ^ r & 7) << 4), from + (size_t)r * WIDTH + c * 8);
  enqueue({tell, nullptr, 3, block_of_crew()});
}
inline void box_to_all(u32 to, const void* map, int x, int y, u32 tell) { box(to, map, x, y, tell); }
inline u32 beyond(u32 at, int) { return at; }
inline void arrive_beyond(u32 at) { arrive({at, nullptr, 3, 1 - block_of_crew()}); }
inline void expect_beyond(u32 at, int) { arrive_beyond(at); }
inline void copy_beyond(u32 to, u32 from, int bytes, u32 tell) {
  for (int i = 0; i < bytes; i += 16) enqueue({to + i, raw + from + i, 1, 1 - block_of_crew()});
  enqueue({tell, nullptr, 3, 1 - block_of_crew()});
}
inline void store_beyond(u32 to, float v, u32 tell) {
  u32 word;
  memcpy(&word, &v, 4);
  enqueue({to, nullptr, 4, 1 - block_of_crew(), word});
  enqueue({tell, nullptr, 3, 1 - block_of_crew()});
}
#else
#define CLUSTER __cluster_dims__(TOGETHER, 1, 1)
#define BOXES_OF(matrix) const __grid_constant__ Map       // a parameter
__device__ constexpr int page_arrivals(int) { return 1; }
__device__ constexpr int sent_arrivals(int) { return 1; }
__device__ __forceinline__ int block_of_cluster() { int r; asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(r)); return r; }
// By all threads, after barriers were begun.
template <int COUNT> __device__ __forceinline__ void cluster_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// By all threads: nobody writes into a block that has left, or tells its barriers. So arrivals come before (release).
__device__ __forceinline__ void cluster_ended() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// By a warp: one arrival at the barrier in this place of every block.
__device__ __forceinline__ void arrive_at_all(u32 at) {
  const u32 rank = threadIdx.x & 31;
  if (rank < TOGETHER)
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r,%0,%1; mbarrier.arrive.shared::cluster.b64 _,[r]; }"
                 ::"r"(at), "r"(rank) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory");
}
// Columns x.. of rows y.. to this place, and the barrier is told.
__device__ __forceinline__ void box(u32 to, const void* map, int x, int y, u32 tell) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];"
               ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(tell) : "memory");
}
// The same to this place of every block, and each one's barrier is told.
__device__ __forceinline__ void box_to_all(u32 to, const void* map, int x, int y, u32 tell) {
  if (TOGETHER > 1)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0],[%1,{%2,%3}],[%4],%5;"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(tell), "h"((unsigned short)((1 << TOGETHER) - 1)) : "memory");
  else
    box(to, map, x, y, tell);
}
// This place in another block, as the next four take it.
__device__ __forceinline__ u32 beyond(u32 at, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
__device__ __forceinline__ void arrive_beyond(u32 at) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" ::"r"(at) : "memory");
}
// An arrival, and so many bytes that are on their way there.
__device__ __forceinline__ void expect_beyond(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_beyond(u32 to, u32 from, int bytes, u32 tell) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               ::"r"(to), "r"(from), "r"(bytes), "r"(tell) : "memory");
}
__device__ __forceinline__ void store_beyond(u32 to, float v, u32 tell) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0],%1,[%2];"
               ::"r"(to), "r"(__float_as_uint(v)), "r"(tell) : "memory");
}
#endif
