// Linear for up to 8 tokens per block: a warp owns 16 rows x one K segment and streams its weights through a private
// ring of cp.async copies; x comes from L1; no barrier before the fold.  See fold.cuh for the law and the layouts.
#include "fold.cuh"

#ifndef KWARPS
#define KWARPS 1         // segments of K in a block, one warp each: S = CLUSTER * KWARPS
#endif
#ifndef NWARPS
#define NWARPS 4         // row tiles of 16 in a block
#endif
#ifndef DEPTH
#define DEPTH 4          // K64 steps (2 KB each) in a warp's ring
#endif

// Grid (CLUSTER, ceil(n / 8), heads * groups), groups = ceil(N / 16 / NWARPS).  Head h multiplies x + h*x_head by
// w + h*N*T*128 B into y + h*y_head; strides count elements.  rows: null, or where the device keeps the actual n.
// Shared memory: max(NWARPS*KWARPS*DEPTH*2048, KWARPS*8*(NWARPS*16+4)*4) bytes.
extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * NWARPS * KWARPS)
linear_stream(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
              int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 ring0 = shared_address(smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  constexpr int S = CLUSTER * KWARPS;
  const int kw = warp % KWARPS, nw = warp / KWARPS, s = blockIdx.x * KWARPS + kw, T = (K + 63) >> 6;
  const int low = T * s / S, steps = T * (s + 1) / S - low;
  const int head = blockIdx.z / groups, group = blockIdx.z % groups;
  const int first = blockIdx.y * 8, tile = group * NWARPS + nw;
  const bool on = tile * 16 < N;
  const unsigned char* w = W + (((long long)head * (N >> 4) + (on ? tile : 0)) * T + low) * 2048 + lane * 16;
  const u32 ring = ring0 + warp * (DEPTH * 2048) + lane * 16;
  const int m = on ? steps : 0;
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
#pragma unroll
    for (int k = 0; k < 4; k++) copy16_if(i < m, ring + i * 2048 + k * 512, w + k * 512);
    w += 2048; copy_commit();
  }
  pdl_wait();                                    // weights do not depend on the kernel before; x and rows do
  pdl_go();
  const int live = rows ? min(n, load_int(rows)) : n;       // x need not wait for it: a row beyond it is there, whatever it holds
  const bf16* x = X + head * x_head + (long long)(first + g < n ? first + g : first) * x_stride + low * 64 + q * 8;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  int left = K - low * 64 - q * 8;               // TAIL: values of x from this lane's place on
  auto load_x = [&](uint4& u, uint4& v) {        // the lane's 2 x 8 values of the next step
    u = !TAIL || left > 0 ? load16(x) : zero;
    v = !TAIL || left > 32 ? load16(x + 32) : zero;
    x += 64; left -= 64;
  };
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
  uint4 a0 = zero, a1 = zero, b0 = zero, b1 = zero;                            // x runs two steps ahead
  if (m > 0) load_x(a0, a1);
  if (m > 1) load_x(b0, b1);
  if (first >= live) { copy_wait<0>(); return; } // the same in every block of a cluster
  u32 o = 0;
#pragma unroll 2
  for (int i = 0; i < m; i++) {
    uint4 c0 = zero, c1 = zero;
    if (i + 2 < m) load_x(c0, c1);
    copy_wait<DEPTH - 1>();                      // a lane reads only what it copied: no barrier of the warp
    const uint4 w0 = shared_load16(ring + o), w1 = shared_load16(ring + o + 512);
    const uint4 w2 = shared_load16(ring + o + 1024), w3 = shared_load16(ring + o + 1536);
    mma(acc, w0, a0.x, a0.y); mma(acc, w1, a0.z, a0.w);
    mma(acc, w2, a1.x, a1.y); mma(acc, w3, a1.z, a1.w);
#pragma unroll
    for (int k = 0; k < 4; k++) copy16_if(i + DEPTH < m, ring + o + k * 512, w + k * 512);
    w += 2048; copy_commit();
    o = o == (DEPTH - 1) * 2048 ? 0 : o + 2048;
    a0 = b0; a1 = b1; b0 = c0; b1 = c1;
  }
  copy_wait<0>();
  __syncthreads();                               // the rings become the partials
  constexpr u32 RS = NWARPS * 16 + 4, PS = 8 * RS * 4;
  const u32 p = ring0 + kw * PS + (nw * 16 + g) * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) shared_store(p + ((2 * q + (i & 1)) * RS + (i >> 1) * 8) * 4, acc[i]);
  show_partials();
  const long long y0 = head * y_head;
  const Output out = {wide ? (void*)((float*)Y + y0) : (void*)((bf16*)Y + y0), residual ? residual + y0 : nullptr, y_stride, wide != 0};
  fold<KWARPS, PS, RS, NWARPS * 16, 32 * NWARPS * KWARPS, 2>(ring0, blockIdx.x, 8, group * NWARPS * 16, first, live, N, out);
  leave_together();
}
