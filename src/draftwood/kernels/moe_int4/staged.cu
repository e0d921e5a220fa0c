// W4A16 experts, staged: a block of WARPS warps owns 32*WARPS rows x whole K and at most 8*TOKENS tokens of one expert. A stage holds
// SPAN steps of weights and x together: one wait and one barrier a stage, and its steps unrolled. See moe.cuh.
//
// A stage: for each warp its 2 tiles (SPAN x 512 B each) and their scales (SPAN x 64 B each), then x as SPAN slices of TOKENS*8
// tokens x 128 B. The 16-byte chunk c of token t lies at chunk c ^ 4*(t&1): a quarter warp (2 tokens x 4 chunks) touches all 32
// banks once. STAGES stages, one cp.async group each.
#include "moe.cuh"

#ifndef TOKENS
#define TOKENS 4         // most 8-token tiles of a job
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BLOCKS
#define BLOCKS 3         // of a multiprocessor
#endif
#ifndef SPAN
#define SPAN 2           // K64 steps of a stage
#endif
#ifndef UNROLL
#define UNROLL SPAN      // how far the steps of a stage are unrolled (1 where registers are short)
#endif
#ifndef STAGES
#define STAGES 4
#endif
constexpr int W_STAGE = SPAN * 2 * (TILE_BYTES + SCALE_BYTES), X_SLICE = TOKENS * 1024, STAGE = WARPS * W_STAGE + SPAN * X_SLICE;
static_assert(Part<PART>::TILES % (2 * WARPS) == 0, "a block's rows divide the expert's");
static_assert(Part<PART>::STEPS % SPAN == 0, "whole stages");

template <int NT>
__device__ __forceinline__ void ring_tile(u32 sm, const uint4* W, const uint2* S, const bf16* x, const int* pairs, int count,
                                          int expert, int tile, Out* out) {
  constexpr int ST = Part<PART>::STEPS, NS = ST / SPAN, TP = 4 * WARPS, XP = (NT * 8 + TP - 1) / TP;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const long long first = (long long)expert * Part<PART>::TILES + tile + warp * 2;
  const uint4* w = W + first * ST * 32 + lane;
  const char* s = (const char*)(S + (first + lane / (4 * SPAN) % 2) * ST * 8) + lane % (4 * SPAN) * 16;
  const u32 wb = sm + warp * W_STAGE, xb = sm + WARPS * W_STAGE, dw = wb + lane * 16;
  const u32 dx = xb + (tid >> 3) * 128 + (((tid & 7) ^ ((tid >> 3 & 1) << 2)) * 16);       // TP is even: same swizzle each pass
  const bf16* xp[XP];
#pragma unroll
  for (int p = 0; p < XP; p++) {
    const int t = p * TP + (tid >> 3);
    xp[p] = input_row(x, load_new(pairs + (t < count ? t : 0))) + (tid & 7) * 8;
  }
  const int live = count - (tid >> 3);         // columns without a token keep what was there: no product mixes columns
  auto load_w = [&](u32 o) {                   // the next stage; the pointers run
#pragma unroll
    for (int u = 0; u < SPAN; u++) { copy16(dw + o + u * 512, w + u * 32); copy16(dw + o + (SPAN + u) * 512, w + (ST + u) * 32); }
    if (lane < 8 * SPAN) copy16(dw + o + SPAN * 1024, s);
    w += SPAN * 32; s += SPAN * 64;
  };
  auto load_x = [&](u32 o) {
#pragma unroll
    for (int p = 0; p < XP; p++) {
#pragma unroll
      for (int u = 0; u < SPAN; u++) copy16_if(p * TP < live, dx + o + p * TP * 128 + u * X_SLICE, xp[p] + u * 64);
      xp[p] += SPAN * 64;
    }
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) if (i < NS) load_w(i * STAGE);
  if (!PART) wait_and_go();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) { if (i < NS) load_x(i * STAGE); copy_commit(); }
  if (PART) wait_and_go();
  float acc[2][NT][4];
  clear(acc);
  const u32 rs = wb + SPAN * 1024 + g * 8, rx0 = xb + g * 128 + ((q ^ ((g & 1) << 2)) * 16), rx1 = rx0 ^ 64;
  u32 o = 0, ol = (STAGES - 1) * STAGE;
#pragma unroll 1
  for (int st = 0; st < NS; st++) {
    copy_wait<STAGES - 2>();
    __syncthreads();                           // stage st is here for all; stage st-1 is free for all
    if (st + STAGES - 1 < NS) { load_w(ol); load_x(ol); }
    copy_commit();
    ol = ol == (STAGES - 1) * STAGE ? 0 : ol + STAGE;
#pragma unroll (UNROLL)
    for (int u = 0; u < SPAN; u++) {
      const uint4 wv[2] = {shared_load16(dw + o + u * 512), shared_load16(dw + o + (SPAN + u) * 512)};
      const uint2 sv[2] = {shared_load8(rs + o + u * 64), shared_load8(rs + o + (SPAN + u) * 64)};
      step64(acc, wv, sv, rx0 + o + u * X_SLICE, rx1 + o + u * X_SLICE);
    }
    o = o == (STAGES - 1) * STAGE ? 0 : o + STAGE;
  }
  store_tiles<PART>(acc, pairs, count, tile + warp * 2, out);
}

#ifdef GATE_UP
#define ENTRY gate_up_staged
#else
#define ENTRY down_staged
#endif
// Grid (rows / (32*WARPS), most jobs): the jobs of one expert run side by side, so its weights come from DRAM once. ring_tile waits
// and goes after it has asked for its first weights (and for x, where that is older than the kernel before). early: see moe.cuh.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
ENTRY(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
      const int* __restrict__ njobs, const int* __restrict__ pairs, Out* __restrict__ out, int early) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 sm = shared_address(smem);
  if (!early) pdl_wait();
  const int4 job = job_and_count(jobs + blockIdx.y, njobs);
  if ((int)blockIdx.y >= job.w) { pdl_wait(); return; }
  const int tile = blockIdx.x * (2 * WARPS), count = job.z;
  pairs += job.y;
  switch ((count + 7) >> 3) {
#define RUN(N) case N: if constexpr (N <= TOKENS) ring_tile<N>(sm, W, S, x, pairs, count, job.x, tile, out); break;
    RUN(1) RUN(2) RUN(3) RUN(4) RUN(5) RUN(6) RUN(7) RUN(8) RUN(9) RUN(10) RUN(11) RUN(12) RUN(13) RUN(14) RUN(15)
    RUN(16)
#undef RUN
  }
}
