// Linear for 8 * TILES tokens per block: a warp owns 32 rows x one K segment; weights come through the warp's own ring,
// x is staged in shared memory for the block.  See fold.cuh for the law and the layouts.
#include "fold.cuh"

#ifndef TILES
#define TILES 2          // 8-token tiles
#endif
#ifndef BLOCK
#define BLOCK 8          // row tiles of 16 in a block
#endif
#ifndef DEPTH
#define DEPTH 4          // K64 steps (4 KB each) in a warp's ring
#endif
#ifndef XSTEPS
#define XSTEPS 2         // K64 steps between barriers of the block
#endif

constexpr int WARPS = (BLOCK + 1) / 2;                 // two row tiles each; the last one has one if BLOCK is odd
constexpr int STEP = 4096, XSLOT = TILES * 1024, AHEAD = DEPTH - 2 + XSTEPS, XSLOTS = AHEAD + XSTEPS;

// Grid (CLUSTER = S, ceil(n / 8 / TILES), heads * groups), groups = ceil(N / 16 / BLOCK): with many tokens, neighbouring blocks
// share their weights; arguments as in stream.cu.
// Shared memory: max(WARPS*DEPTH*STEP + XSLOTS*XSLOT, TILES*8*(WARPS*32+4)*4) bytes.
// The 16-byte chunk c of token t lies at chunk c ^ 4*(t&1): reads without bank conflicts.
// Copy group g holds the weights of step g and x of step g+XSTEPS-1 (group 0 also the first x); at step s, groups 0..s
// are complete, and a barrier every XSTEPS steps makes everybody's x visible.
extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * WARPS)
linear_wide(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
            int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 base = shared_address(smem);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  constexpr int S = CLUSTER;
  const int s = blockIdx.x, T = (K + 63) >> 6, low = T * s / S, steps = T * (s + 1) / S - low;
  const int head = blockIdx.z / groups, group = blockIdx.z % groups;
  const int first = blockIdx.y * (TILES * 8), tile = group * BLOCK + warp * 2, tiles = N >> 4;
  const bool on = tile < tiles;
  const unsigned char* w = W + (((long long)head * tiles + (on ? tile : 0)) * T + low) * 2048 + lane * 16;
  const bool two = warp * 2 + 1 < BLOCK && tile + 1 < tiles;                 // else nobody reads what becomes of the second
  const long long second = two ? (long long)T * 2048 : 0;
  const u32 wring = base + warp * (DEPTH * STEP) + lane * 16, xring = base + WARPS * DEPTH * STEP;
  auto load_w = [&](int step, u32 o) {           // step = 0, 1, 2, ...: the pointer runs
    if (on && step < steps) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        copy16(wring + o + k * 512, w + k * 512);
        copy16_if(two, wring + o + 2048 + k * 512, w + second + k * 512);
      }
    }
    w += 2048;
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) load_w(i, i * STEP);
  pdl_wait();                                    // weights do not depend on the kernel before; x and rows do
  pdl_go();
  if (rows) n = min(n, load_int(rows));
  if (first >= n) { copy_commit(); copy_wait<0>(); return; }                 // the same in every block of a cluster
  constexpr int PASS = 4 * WARPS, PASSES = (TILES * 8 + PASS - 1) / PASS;    // x: PASS tokens at a time
  const bf16* xp[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int t = first + p * PASS + (tid >> 3);
    xp[p] = X + head * x_head + (long long)(t < n ? t : first) * x_stride + low * 64 + (tid & 7) * 8;
  }
  const u32 xput = xring + (tid >> 3) * 128 + (((tid & 7) ^ ((tid >> 3 & 1) << 2)) * 16);
  auto load_x = [&](int step, u32 o) {
    if (step < steps) {
      const bool inside = !TAIL || (low + step) * 64 + (tid & 7) * 8 < K;
#pragma unroll
      for (int p = 0; p < PASSES; p++)
        if ((TILES * 8) % PASS == 0 || p + 1 < PASSES || p * PASS + (tid >> 3) < TILES * 8) {
          if (TAIL) copy16_or_zero(inside, xput + p * PASS * 128 + o, inside ? xp[p] : X);
          else copy16(xput + p * PASS * 128 + o, xp[p]);
        }
    }
#pragma unroll
    for (int p = 0; p < PASSES; p++) xp[p] += 64;
  };
#pragma unroll
  for (int i = 0; i < XSTEPS - 1; i++) load_x(i, i * XSLOT);
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) { load_x(i + XSTEPS - 1, (i + XSTEPS - 1) * XSLOT); copy_commit(); }
  float acc[2][TILES][4];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][t][i] = 0.f;
  u32 wo = 0, wl = (DEPTH - 1) * STEP, xo = 0, xl = AHEAD * XSLOT;
  const u32 x0 = xring + g * 128 + ((q ^ ((g & 1) << 2)) * 16), x1 = x0 ^ 64;
  int since = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    copy_wait<DEPTH - 2>();
    if (since == 0) __syncthreads();
    since = since == XSTEPS - 1 ? 0 : since + 1;
    load_w(step + DEPTH - 1, wl); load_x(step + AHEAD, xl); copy_commit();
    wl = wl == (DEPTH - 1) * STEP ? 0 : wl + STEP; xl = xl == (XSLOTS - 1) * XSLOT ? 0 : xl + XSLOT;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 a = wring + wo + h * 1024;
      const uint4 p0 = shared_load16(a), p1 = shared_load16(a + 512);
      const uint4 r0 = shared_load16(a + 2048), r1 = shared_load16(a + 2560);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint4 x = shared_load16((h ? x1 : x0) + xo + t * 1024);
        mma(acc[0][t], p0, x.x, x.y); mma(acc[1][t], r0, x.x, x.y);
        mma(acc[0][t], p1, x.z, x.w); mma(acc[1][t], r1, x.z, x.w);
      }
    }
    wo = wo == (DEPTH - 1) * STEP ? 0 : wo + STEP; xo = xo == (XSLOTS - 1) * XSLOT ? 0 : xo + XSLOT;
  }
  copy_wait<0>();
  __syncthreads();                               // the rings become the partials [token][WARPS*32 + 4]
  constexpr u32 RS = WARPS * 32 + 4;
  const u32 p = base + (warp * 32 + g) * 4;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) shared_store(p + ((t * 8 + 2 * q + (i & 1)) * RS + m * 16 + (i >> 1) * 8) * 4, acc[m][t][i]);
  show_partials();
  const long long y0 = head * y_head;
  const Output out = {wide ? (void*)((float*)Y + y0) : (void*)((bf16*)Y + y0), residual ? residual + y0 : nullptr, y_stride, wide != 0};
  fold<1, 0, RS, BLOCK * 16, 32 * WARPS, 2>(base, s, TILES * 8, group * (BLOCK * 16), first, n, N, out);
  leave_together();
}
