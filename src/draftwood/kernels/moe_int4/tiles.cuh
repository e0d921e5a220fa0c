// The kernels around ring_tile (staged.cu, group.cu), which waits and goes after it has asked for its first weights (and
// for x, where that is older than the kernel before). Grid (rows / (16*WARP_TILES*WARPS), most jobs): the jobs of one expert
// run side by side, so its weights come from DRAM once. early: see moe.cuh.
#ifndef WARP_TILES
#define WARP_TILES 2     // row tiles of a warp
#endif
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
ENTRY(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
      const int* __restrict__ njobs, const int* __restrict__ pairs, Out* __restrict__ out, int early) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 sm = shared_address(smem);
  if (!early) pdl_wait();
  const int4 job = job_and_count(jobs + blockIdx.y, njobs);
  if ((int)blockIdx.y >= job.w) { pdl_wait(); return; }
  const int tile = blockIdx.x * (WARP_TILES * WARPS), count = job.z;
  pairs += job.y;
  switch ((count + 7) >> 3) {
#define RUN(N) case N: if constexpr (N <= TOKENS) ring_tile<N>(sm, W, S, x, pairs, count, job.x, tile, out); break;
    RUN(1) RUN(2) RUN(3) RUN(4) RUN(5) RUN(6) RUN(7) RUN(8) RUN(9) RUN(10) RUN(11) RUN(12) RUN(13) RUN(14) RUN(15)
    RUN(16)
#undef RUN
  }
}
