// The sum over a row's experts (combine of moe_int4), the residual and the next RMSNorm in one kernel, with the bits of the two.
#include "norm.cuh"
constexpr int AT_ONCE = TOPK < 8 ? TOPK : 8;   // slots that a thread asks for before it waits for the first, of one of its chunks

// A warp's 256 values of 32 chunks, 4 a lane from 4 lane on and 4 from 128 + 4 lane on, so that its loads are whole lines.
struct Quads { float of[2][4]; };
__device__ __forceinline__ void add_slot(Quads& v, float c, const uint4 (&y)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    v.of[half][0] = fma_rn(c, __uint_as_float(y[half].x), v.of[half][0]);
    v.of[half][1] = fma_rn(c, __uint_as_float(y[half].y), v.of[half][1]);
    v.of[half][2] = fma_rn(c, __uint_as_float(y[half].z), v.of[half][2]);
    v.of[half][3] = fma_rn(c, __uint_as_float(y[half].w), v.of[half][3]);
  }
}
// The sum over slots, in order, of what stands at y, where it is a row's; scales[slot] of 0: nothing is read.
__device__ __forceinline__ Quads sum_slots(const float* y, const float* scales, const bool (&on)[2]) {
  Quads v = {};
#pragma unroll
  for (int k = 0; k < TOPK; k += AT_ONCE) {
    uint4 a[AT_ONCE][2];
#pragma unroll
    for (int b = 0; b < AT_ONCE && k + b < TOPK; b++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (on[half] && scales[k + b] != 0.f) a[b][half] = load16(y + (k + b) * WIDTH + half * 128);
#pragma unroll
    for (int b = 0; b < AT_ONCE && k + b < TOPK; b++)
      if (scales[k + b] != 0.f) add_slot(v, scales[k + b], a[b]);
  }
  return v;
}
// + shared, rounded, as chunks of 8: chunk `lane` is in lanes 2 lane and 2 lane + 1 of the first half, or of the second.
__device__ __forceinline__ uint4 chunk_of(const Quads& v, const uint2 (&shared)[2]) {
  const int lane = threadIdx.x & 31;
  u32 mine[2][2], d[4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float* s = v.of[half];
    mine[half][0] = pack_bf16(s[0] + low_float(shared[half].x), s[1] + high_float(shared[half].x));
    mine[half][1] = pack_bf16(s[2] + low_float(shared[half].y), s[3] + high_float(shared[half].y));
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 low = __shfl_sync(ALL_LANES, mine[0][j & 1], (2 * lane + (j >> 1)) & 31);
    const u32 high = __shfl_sync(ALL_LANES, mine[1][j & 1], (2 * lane + (j >> 1)) & 31);
    d[j] = lane < 16 ? low : high;
  }
  return make_uint4(d[0], d[1], d[2], d[3]);
}

// delta = sum over slots 0..TOPK-1, in order, of weights[row][slot] * y[row * TOPK + slot], then + shared[row], rounded; a slot of
// weight 0 is not read. x, tap <- h = x + delta; out <- norm(h) * weight. Grid n. All but y is older than the kernel before, which
// waits and then goes (rule (c) of common.cuh): it is asked for ahead of the wait, from L2. One block a multiprocessor: 128
// registers hold a chunk of all slots; with four slots at once and two blocks it gained nothing.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sum_norm(const float* y, const float* weights, const bf16* shared, const bf16* weight, const int* rows, bf16* x, bf16* tap,
         bf16* out, long long x_stride, long long tap_stride, long long out_stride, float eps) {
  __shared__ float sums[32], scales[TOPK];
  const int tid = threadIdx.x, lane = tid & 31, row = blockIdx.x;
  auto quad = [&](int i, int half) { return (tid + i * THREADS) * 8 - lane * 4 + half * 128; };
  if (tid < TOPK) scales[tid] = load_new(weights + row * TOPK + tid);
  const int live = load_new(rows);
  uint4 raw[OWN], w[OWN];
  uint2 more[OWN][2];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int c = (tid + i * THREADS) * 8;
    if (c < WIDTH) { raw[i] = load16_new(x + row * x_stride + c); w[i] = load16_once(weight + c); }
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (quad(i, half) < WIDTH) more[i][half] = load_new((const uint2*)(shared + row * (long long)WIDTH + quad(i, half)));
  }
  go_and_wait();
  __syncthreads();
  if (row >= live) return;
  uint4 delta[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const bool on[2] = {quad(i, 0) < WIDTH, quad(i, 1) < WIDTH};
    delta[i] = chunk_of(sum_slots(y + row * (long long)(TOPK * WIDTH) + quad(i, 0), scales, on), more[i]);
  }
  auto chunk = [&](float (&v)[8], int i) {
    unpack8(v, raw[i]);
    add8(v, delta[i]);
  };
  auto keep = [&](int c, const uint4& h) {
    store16(x + row * x_stride + c, h);
    if (tap) store16(tap + row * tap_stride + c, h);
  };
  auto store = [&](int c, const uint4& values) { store16(out + row * out_stride + c, values); };
  norm_row(w, eps, sums, chunk, keep, store, [] {});
}
