// Linear for 8 * TILES tokens per block by the warp-group products of sm_90: a warp owns 16 rows x one K segment, as in
// stream.cu: weights come through the warp's own ring straight into the A registers, no barrier. x is staged in shared memory
// for the block and read there by the tensor cores, once for 64 rows. See fold.cuh for the law and the layouts, ../warpgroup.cuh
// for x's place in shared memory and for the bits.
#include "fold.cuh"
#include "../warpgroup.cuh"
#include "groups.cuh"

#ifndef TILES
#define TILES 9          // 8-token tiles
#endif
#ifndef BLOCK
#define BLOCK 8          // row tiles of 16 in a block, a warp each
#endif
#ifndef DEPTH
#define DEPTH 4          // K64 steps (2 KB each) in a warp's ring
#endif
#ifndef XSTEPS
#define XSTEPS 1         // K64 steps between barriers of the block
#endif

constexpr int WARPS = (BLOCK + 3) / 4 * 4;             // whole groups of four; those beyond BLOCK multiply zeros
constexpr int FIT = TILES > 9 ? 16 : TILES > 5 ? 20 : TILES > 3 ? 24 : 28;       // warps of a multiprocessor (plan.py: GMMA_WARPS)
constexpr int RESIDENT = FIT < WARPS || TILES == 12 ? 1 : FIT / WARPS;           // blocks; two of 12 tiles would spill
constexpr int STEP = 2048, XSLOT = TILES * 1024, AHEAD = DEPTH - 2 + XSTEPS, XSLOTS = AHEAD + XSTEPS + 1;

// Grid and arguments as linear_wide's: (CLUSTER = S, ceil(n / 8 / TILES), heads * groups), groups = ceil(N / 16 / BLOCK).
// Shared memory: max(XSLOTS*XSLOT + BLOCK*DEPTH*STEP, TILES*8*(BLOCK*16+4)*4) bytes, x first: its slots start at multiples of 1024.
// Copy group g holds the weights of step g and x of step g+XSTEPS-1 (group 0 also the first x); at step s, groups 0..s are
// complete, and a barrier every XSTEPS steps makes everybody's x visible and says that all products but those of the step before
// it are done: the tensor cores always have a step to work on.
extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * WARPS, RESIDENT)
linear_gmma(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
            int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 base = shared_address(smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  constexpr int S = CLUSTER;
  const int s = blockIdx.x, T = (K + 63) >> 6, low = T * s / S, steps = T * (s + 1) / S - low;
  const int head = blockIdx.z / groups, group = blockIdx.z % groups;
  const int first = blockIdx.y * (TILES * 8), tile = group * BLOCK + warp, tiles = N >> 4;
  const bool on = warp < BLOCK && tile < tiles;
  const unsigned char* w = W + (((long long)head * tiles + (on ? tile : 0)) * T + low) * 2048 + lane * 16;
  const u32 wring = base + XSLOTS * XSLOT + (on ? warp : 0) * (DEPTH * STEP) + lane * 16;
  auto load_w = [&](int step, u32 o) {           // step = 0, 1, 2, ...: the pointer runs
#pragma unroll
    for (int k = 0; k < 4; k++) copy16_if(on && step < steps, wring + o + k * 512, w + k * 512);
    w += 2048;
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) load_w(i, i * STEP);
  pdl_wait();                                    // weights do not depend on the kernel before; x and rows do
  pdl_go();
  if (rows) n = min(n, load_int(rows));
  if (first >= n) { copy_commit(); copy_wait<0>(); return; }                 // the same in every block of a cluster
  Tokens<TILES * 8, WARPS> x(X + head * x_head + first * x_stride + low * 64, x_stride, n - first, K - low * 64, base);
  auto load_x = [&](int step, u32 o) { x.load(step < steps, o); };
#pragma unroll
  for (int i = 0; i < XSTEPS - 1; i++) load_x(i, i * XSLOT);
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) { load_x(i + XSTEPS - 1, (i + XSTEPS - 1) * XSLOT); copy_commit(); }
  float acc[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[t][i] = 0.f;
  u32 wo = 0, wl = (DEPTH - 1) * STEP, xo = 0, xl = AHEAD * XSLOT;
  int since = 0;
  auto turn = [&](Weights& v, int step) {        // the products under way read the other weights
    copy_wait<DEPTH - 2>();
    warpgroup_wait<1>();
    if (on) fetch(v, wring + wo);                // a lane reads only what it copied
    if (since == 0) { publish(); __syncthreads(); }
    since = since == XSTEPS - 1 ? 0 : since + 1;
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) warpgroup_mma<TILES>(acc, v.a[k], base + xo + k * 32);
    warpgroup_commit();
    load_w(step + DEPTH - 1, wl); load_x(step + AHEAD, xl); copy_commit();
    wo = wo == (DEPTH - 1) * STEP ? 0 : wo + STEP; xo = xo == (XSLOTS - 1) * XSLOT ? 0 : xo + XSLOT;
    wl = wl == (DEPTH - 1) * STEP ? 0 : wl + STEP; xl = xl == (XSLOTS - 1) * XSLOT ? 0 : xl + XSLOT;
  };
  Weights even = {}, odd = {};
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
    turn(even, step);
    if (step + 1 < steps) turn(odd, step + 1);
  }
  warpgroup_wait<0>();
  copy_wait<0>();
  __syncthreads();                               // the rings become the partials [token][BLOCK*16 + 4]
  constexpr u32 RS = BLOCK * 16 + 4;
  const u32 p = base + (warp * 16 + g) * 4;
  if (warp < BLOCK)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) shared_store(p + ((t * 8 + 2 * q + (i & 1)) * RS + (i >> 1) * 8) * 4, acc[t][i]);
  show_partials();
  const long long y0 = head * y_head;
  const Output out = {wide ? (void*)((float*)Y + y0) : (void*)((bf16*)Y + y0), residual ? residual + y0 : nullptr, y_stride, wide != 0};
  fold<1, 0, RS, BLOCK * 16, 32 * WARPS, 4>(base, s, TILES * 8, group * (BLOCK * 16), first, n, N, out);
  leave_together();
}
