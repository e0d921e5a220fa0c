// Linear for many tokens by the warp-group products of sm_90: a block has 64 * GROUPS rows of weights and 8 * TILES tokens, and all of K:
// its segments follow each other and are added up in registers, so nothing is folded between blocks. TOGETHER blocks of a cluster
// have the same weights and neighbouring tokens: each asks L2 for its part of a step's weights, and all of them get it. See
// fold.cuh for the law and the layouts, groups.cuh and ../warpgroup.cuh for x's place in shared memory.
#include "fold.cuh"
#include "../warpgroup.cuh"
#include "groups.cuh"
#include "pipe.cuh"

#ifndef TILES
#define TILES 16         // 8-token tiles
#endif
#ifndef GROUPS
#define GROUPS 2         // groups of four warps, 64 rows of weights each
#endif
#ifndef SEGMENTS
#define SEGMENTS 4       // S
#endif
#ifndef TOGETHER
#define TOGETHER 2       // blocks of a cluster, along the tokens
#endif
#ifndef DEPTH
#define DEPTH 6          // K64 steps of weights in the ring, of which DEPTH - 2 are on their way
#endif
#ifndef XDEPTH
#define XDEPTH 2         // K64 steps of x on their way
#endif
#if TOGETHER > 1 && !defined(EMULATION)
#define TOGETHER_SHAPE __cluster_dims__(TOGETHER, 1, 1)
#else
#define TOGETHER_SHAPE
#endif

constexpr int WARPS = 4 * GROUPS, BLOCK = WARPS, WSLOT = BLOCK * 2048, XSLOT = TILES * 1024, XSLOTS = XDEPTH + 2;
constexpr u32 RS = BLOCK * 16 + 4, BARRIERS = XSLOTS * XSLOT + DEPTH * WSLOT;

// Grid: (groups of tokens, a multiple of TOGETHER; 1; heads * groups), groups = ceil(N / 16 / BLOCK). Arguments as linear_wide's.
// Shared memory: max(BARRIERS + 16 DEPTH, TILES*8*RS*4) bytes.
// Weights of step s: slot s % DEPTH, `full` when they are there, `empty` when every block of the cluster has read them: said at
// the barrier of step s + 1, looked at a step later. Only what somebody waits for is said, so a block may leave when it has all
// it waits for. A block whose tokens are not there copies its part of the weights all the same. x of step s: slot s % XSLOTS; at the barrier of step s it is there, and the
// products of step s - 2 are done, whose slot is the next to fill.
extern "C" __global__ void TOGETHER_SHAPE __launch_bounds__(32 * WARPS)
linear_many(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
            int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 base = shared_address(smem), wring = base + XSLOTS * XSLOT, full = base + BARRIERS, empty = full + 8 * DEPTH;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int T = (K + 63) >> 6, head = blockIdx.z / groups, group = blockIdx.z % groups, tiles = N >> 4;
  const int first = blockIdx.x * (TILES * 8), have = min(BLOCK, tiles - group * BLOCK), rank = blockIdx.x % TOGETHER;
  if (threadIdx.x == 0)
    for (int i = 0; i < DEPTH; i++) { mbarrier_begin(full + 8 * i, 1); mbarrier_begin(empty + 8 * i, SHARERS); }
  barriers_begun();
  // Weights: the first lane of a warp copies the warp's row tile to the whole cluster, if that is this block's part.
  const bool on = warp < have, copies = on && lane == 0 && (SHARERS == 1 || warp % SHARERS == rank);
  const unsigned char* w = W + ((long long)head * tiles + group * BLOCK + (on ? warp : 0)) * T * 2048;
  const u32 wput = wring + warp * 2048;
  auto load_w = [&](int step, u32 slot) {
    if (threadIdx.x == 0) mbarrier_expect(full + 8 * slot, have * 2048);
    if (copies) bulk_to_all(wput + slot * WSLOT, w + (long long)step * 2048, 2048, full + 8 * slot);
  };
  for (int i = 0; i < DEPTH && i < T; i++) load_w(i, i);
  pdl_wait();                                    // weights do not depend on the kernel before; x and rows do
  pdl_go();
  if (rows) n = min(n, load_int(rows));
  if (first - rank * (TILES * 8) >= n) {         // the whole cluster
    for (int i = 0; i < DEPTH && i < T; i++) mbarrier_wait(full + 8 * i, 0);
    return;
  }
  Tokens<TILES * 8, WARPS> x(X + head * x_head + first * x_stride, x_stride, n - first, K, base);
  auto load_x = [&](int step, u32 o) { x.load(step < T, o); copy_commit(); };
#pragma unroll
  for (int i = 0; i < XDEPTH; i++) load_x(i, i * XSLOT);
  float acc[TILES][4], total[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[t][i] = 0.f;
  u32 xo = 0, slot = 0, parity = 0;
  auto turn = [&](Weights& v, int step) {        // the products under way read the other weights
    copy_wait<XDEPTH - 1>();
    mbarrier_wait(full + 8 * slot, parity);
    warpgroup_wait<1>();
    if (on) fetch(v, wput + slot * WSLOT + lane * 16);          // else it multiplies zeros
    publish(); __syncthreads();
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) warpgroup_mma<TILES>(acc, v.a[k], base + xo + k * 32);
    warpgroup_commit();
    if (warp == 0 && step > 0 && step - 1 + DEPTH < T) mbarrier_arrive_all(empty + 8 * (slot > 0 ? slot - 1 : DEPTH - 1));
    if (step > 1 && step - 2 + DEPTH < T) {
      const u32 old = slot > 1 ? slot - 2 : slot + DEPTH - 2;
      if (copies) mbarrier_wait(empty + 8 * old, slot > 1 ? parity : parity ^ 1);
      load_w(step - 2 + DEPTH, old);
    }
    load_x(step + XDEPTH, xo + XDEPTH * XSLOT < XSLOTS * XSLOT ? xo + XDEPTH * XSLOT : xo + (XDEPTH - XSLOTS) * XSLOT);
    xo = xo == (XSLOTS - 1) * XSLOT ? 0 : xo + XSLOT;
    if (++slot == DEPTH) { slot = 0; parity ^= 1; }
  };
  Weights even = {}, odd = {};
  int step = 0;
#pragma unroll 1
  for (int s = 0; s < SEGMENTS; s++) {
    const int end = T * (s + 1) / SEGMENTS;
#pragma unroll 1
    while (step < end) {
      turn(even, step++);
      if (step < end) turn(odd, step++);
    }
    warpgroup_wait<0>();
    if (SEGMENTS > 1)
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          total[t][i] = s == 0 ? acc[t][i] : add_rn(total[t][i], acc[t][i]);
          acc[t][i] = 0.f;
        }
  }
  copy_wait<0>();
  __syncthreads();                               // the rings become the sums [token][BLOCK*16 + 4]
  const u32 p = base + (warp * 16 + g) * 4;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      shared_store(p + ((t * 8 + 2 * q + (i & 1)) * RS + (i >> 1) * 8) * 4, SEGMENTS > 1 ? total[t][i] : acc[t][i]);
  __syncthreads();
  const long long y0 = head * y_head;
  const Output out = {wide ? (void*)((float*)Y + y0) : (void*)((bf16*)Y + y0), residual ? residual + y0 : nullptr, y_stride, wide != 0};
  fold<1, 0, RS, BLOCK * 16, 32 * WARPS, 4>(base, 0, TILES * 8, group * (BLOCK * 16), first, n, N, out);
}
