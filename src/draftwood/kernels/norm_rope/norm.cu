// RMSNorm of whole rows with the residual added and kept.
#include "norm.cuh"

// One row per block: grid n.
// h = x[index ? index[row] : row] (+ delta[row], rounded); residual, tap <- h where given; y = norm(h) * weight.
// index: rows of an embedding, or the rows that are wanted.  residual may be x when there is no index.
// late: the next kernel starts when all has been read, for what it fetches would delay that; else before this one has waited.
extern "C" __global__ void __launch_bounds__(THREADS, 1)   // 1: else ptxas stops at 40 registers on sm_100a and spills
rms_norm(const bf16* x, const bf16* delta, const bf16* weight, const long long* index, const int* rows, bf16* residual,
         bf16* tap, bf16* y, long long x_stride, long long delta_stride, long long residual_stride, long long tap_stride,
         long long y_stride, float eps, int late) {
  __shared__ float sums[32];
  const int tid = threadIdx.x, row = blockIdx.x;
  uint4 w[OWN], raw[OWN], more[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (tid + i * THREADS < CHUNKS) w[i] = load16_once(weight + (tid + i * THREADS) * 8);
  if (!late) pdl_go_early();
  pdl_wait();
  // All loads before the first is waited for. A row of x itself may be one that does not count; a gathered one is nowhere then.
  const int live = rows ? load_int(rows) : row + 1;
  const long long at = index ? load_long(index + row) : (long long)row;
  if (index && row >= live) return;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int c = (tid + i * THREADS) * 8;
    if (c >= WIDTH) continue;
    raw[i] = load16(x + at * x_stride + c);
    if (delta) more[i] = load16(delta + row * delta_stride + c);
  }
  if (row >= live) return;
  auto chunk = [&](float (&v)[8], int i) {
    unpack8(v, raw[i]);
    if (delta) add8(v, more[i]);
  };
  auto keep = [&](int c, const uint4& h) {
    if (residual) store16(residual + row * residual_stride + c, h);
    if (tap) store16(tap + row * tap_stride + c, h);
  };
  auto store = [&](int c, const uint4& values) { store16(y + row * y_stride + c, values); };
  norm_row(w, eps, sums, chunk, keep, store, [&] { if (late) go_late(); });
}
