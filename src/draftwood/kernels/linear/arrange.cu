// x in the order in which the tensor cores of sm_90 read it from shared memory, for kernels that take it by the copy engine: a
// copy of 8 tokens x 64 values is 1024 bytes in a row, so any number of tokens of a K64 step is one copy.
#include "fold.cuh"
#include "../turned.cuh"

// To: [heads][T = ceil(K/64)][tokens, a multiple of 8][128 B]: chunk c = 4b + w of a token (w = 0..3) holds word w of x[32b + 8q
// .. +7] for q = 0..3 and lies at place c ^ (token & 7); zeros past K. A warp makes 8 tokens of a step; lane (g, q) reads 16 bytes
// of token g for b = 0, 1, and four lanes exchange words, so that each writes 16 bytes. Grid: (ceil(n / (64 / k_warps)), ceil(T /
// STEPS / k_warps), heads), 256 threads: k_warps (1, 2, 4 or 8) of a block's warps take one step after another, the others more
// tokens: where K is short they would have nothing to do. Rows beyond the count are not written.
#ifndef STEPS
#define STEPS 2          // K64 steps of a warp
#endif
extern "C" __global__ void __launch_bounds__(256)
linear_arrange(const bf16* X, unsigned char* to, const int* rows, int n, int K, int tokens, long long x_stride, long long x_head,
               int k_warps) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int token = (blockIdx.x * (8 / k_warps) + warp / k_warps) * 8 + g;
  const int T = (K + 63) >> 6, head = blockIdx.z, first = (blockIdx.y * k_warps + warp % k_warps) * STEPS;
  pdl_wait();
  pdl_go();
  if (rows) n = min(n, load_int(rows));
  uint4 v[STEPS][2];
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const int k = (first + i) * 64 + b * 32 + q * 8;
      v[i][b] = make_uint4(0, 0, 0, 0);
      if (token < n && k < K) v[i][b] = load16(X + head * x_head + token * x_stride + k);
    }
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const uint4 w = turned(v[i][b]);
      if (token < n && first + i < T)
        store16(to + (((long long)head * T + first + i) * tokens + token) * 128 + ((4 * b + q) ^ (token & 7)) * 16, w);
    }
}
