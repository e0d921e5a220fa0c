// Linear for up to 8 tokens per block: a warp owns 16 rows x one K segment and streams its weights through a private
// ring of cp.async copies; x comes from L1; no barrier before the fold.  See fold.cuh for the law and the layouts.
#include "fold.cuh"

#ifndef NORM
#define NORM 0           // 1: x is normed on its way, as rms_norm of norm_rope does it
#endif
#ifndef GOES_EARLY
#define GOES_EARLY 0     // 1: the next kernel may start, and fetch its weights, before this one has waited
#endif

#ifndef KWARPS
#define KWARPS 1         // segments of K in a block, one warp each: S = CLUSTER * KWARPS
#endif
#ifndef NWARPS
#define NWARPS 4         // row tiles of 16 in a block
#endif
#ifndef DEPTH
#define DEPTH 4          // K64 steps (2 KB each) in a warp's ring
#endif

struct Step {            // a lane's 2 x 8 values of x for 64 of K, and the norm's weight for them
  uint4 x[2];
#if NORM
  uint4 weight[2];
#endif
};

#if NORM
#include "../norm_rope/pieces.cuh"

// What the rows of this block, of K values each, are divided by: of row g in the lanes of group g. By all threads.
__device__ __forceinline__ float scale_of_rows(const bf16* X, long long x_stride, int K, float eps, int first, int live) {
  __shared__ float sums[8][32];                  // [row][256 values]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = (K + 255) >> 8, rows = min(8, live - first);
  for (int part = warp; part < parts; part += NWARPS * KWARPS) {
    const int c = part * 256 + lane * 8;
    uint4 raw[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {                // all loads before the first is waited for
      raw[r] = make_uint4(0, 0, 0, 0);
      if (r < rows && c < K) raw[r] = load16(X + (first + r) * x_stride + c);
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
      if (r >= rows) break;
      float v[8];
      unpack8(v, raw[r]);
      const float sum = warp_sum(squares(v));
      if (lane == 0) sums[r][part] = sum;
    }
  }
  __syncthreads();
  float scale = 0.f;
  for (int r = 0; r < rows; r++) {
    const float sum = warp_sum(lane < parts ? sums[r][lane] : 0.f);
    if (r == lane >> 2) scale = scale_of(sum, K, eps);
  }
  return scale;
}
__device__ __forceinline__ void norm_step(Step& s, float scale) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float v[8];
    unpack8(v, s.x[i]);
    normalise(v, scale, s.weight[i]);
    s.x[i] = pack8(v);
  }
}
#endif

// Grid (CLUSTER, ceil(n / 8), heads * groups), groups = ceil(N / 16 / NWARPS).  Head h multiplies x + h*x_head by
// w + h*N*T*128 B into y + h*y_head; strides count elements.  rows: null, or where the device keeps the actual n.
// Shared memory: max(NWARPS*KWARPS*DEPTH*2048, KWARPS*8*(NWARPS*16+4)*4) bytes.
extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * NWARPS * KWARPS)
linear_stream(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
              int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide,
              const bf16* norm, float eps) {
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
  if (GOES_EARLY) pdl_go_early();
  pdl_wait();                                    // weights do not depend on the kernel before; x and rows do
  if (!GOES_EARLY) pdl_go();
  const int live = rows ? min(n, load_int(rows)) : n;       // x need not wait for it: a row beyond it is there, whatever it holds
  const bf16* x = X + head * x_head + (long long)(first + g < n ? first + g : first) * x_stride + low * 64 + q * 8;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  int left = K - low * 64 - q * 8;               // TAIL: values of x from this lane's place on
#if NORM
  const bf16* weight = norm + low * 64 + q * 8;
#endif
  auto load_x = [&](Step& s) {                   // the next step
    s.x[0] = !TAIL || left > 0 ? load16(x) : zero;
    s.x[1] = !TAIL || left > 32 ? load16(x + 32) : zero;
#if NORM
    s.weight[0] = load16(weight); s.weight[1] = load16(weight + 32);
    weight += 64;
#endif
    x += 64; left -= 64;
  };
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
  Step a = {}, b = {};                           // x runs two steps ahead
  if (m > 0) load_x(a);
  if (m > 1) load_x(b);
  if (first >= live) { copy_wait<0>(); return; } // the same in every block of a cluster
#if NORM
  const float scale = scale_of_rows(X, x_stride, K, eps, first, live);
#endif
  u32 o = 0;
#pragma unroll 2
  for (int i = 0; i < m; i++) {
    Step c = {};
    if (i + 2 < m) load_x(c);
#if NORM
    norm_step(a, scale);
#endif
    copy_wait<DEPTH - 1>();                      // a lane reads only what it copied: no barrier of the warp
    const uint4 w0 = shared_load16(ring + o), w1 = shared_load16(ring + o + 512);
    const uint4 w2 = shared_load16(ring + o + 1024), w3 = shared_load16(ring + o + 1536);
    mma(acc, w0, a.x[0].x, a.x[0].y); mma(acc, w1, a.x[0].z, a.x[0].w);
    mma(acc, w2, a.x[1].x, a.x[1].y); mma(acc, w3, a.x[1].z, a.x[1].w);
#pragma unroll
    for (int k = 0; k < 4; k++) copy16_if(i + DEPTH < m, ring + o + k * 512, w + k * 512);
    w += 2048; copy_commit();
    o = o == (DEPTH - 1) * 2048 ? 0 : o + 2048;
    a = b; b = c;
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
