// RMSNorm of whole rows with the residual added and kept, and the two norms, rotation and write of a latent.
#include "pieces.cuh"

#ifdef WIDTH
// One row per block of THREADS threads: grid n.
// h = x[index ? index[row] : row] (+ delta[row], rounded); residual, tap <- h where given; y = norm(h) * weight.
// index: rows of an embedding, or the rows that are wanted.  residual may be x when there is no index.
#ifndef THREADS
#define THREADS 256
#endif
constexpr int CHUNKS = WIDTH / 8, OWN = (CHUNKS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(WIDTH % 8 == 0 && THREADS % 32 == 0 && WARPS <= 32, "whole chunks and warps");

extern "C" __global__ void __launch_bounds__(THREADS, 1)   // 1: else ptxas stops at 40 registers on sm_100a and spills
rms_norm(const bf16* x, const bf16* delta, const bf16* weight, const long long* index, const int* rows, bf16* residual,
         bf16* tap, bf16* y, long long x_stride, long long delta_stride, long long residual_stride, long long tap_stride,
         long long y_stride, float eps) {
  __shared__ float sums[32];
  const int tid = threadIdx.x, row = blockIdx.x;
  uint4 w[OWN], raw[OWN], more[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (tid + i * THREADS < CHUNKS) w[i] = load16_once(weight + (tid + i * THREADS) * 8);
  go_and_wait();
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
  float v[OWN][8], sum = 0.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int c = (tid + i * THREADS) * 8;
    if (c >= WIDTH) continue;
    unpack8(v[i], raw[i]);
    if (delta) {
      float d[8];
      unpack8(d, more[i]);
#pragma unroll
      for (int k = 0; k < 8; k++) v[i][k] = rounded(v[i][k] + d[k]);
    }
    const uint4 h = pack8(v[i]);
    if (residual) store16(residual + row * residual_stride + c, h);
    if (tap) store16(tap + row * tap_stride + c, h);
    sum += squares(v[i]);
  }
  if (!y) return;
  sum = warp_sum(sum);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  sum = warp_sum((tid & 31) < WARPS ? sums[tid & 31] : 0.f);
  const float scale = scale_of(sum, WIDTH, eps);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int c = (tid + i * THREADS) * 8;
    if (c >= WIDTH) continue;
    normalise(v[i], scale, w[i]);
    store16(y + row * y_stride + c, pack8(v[i]));
  }
}
#endif

#ifdef Q_WIDTH
// A row of the fused down projection [query latent Q_WIDTH | latent L_WIDTH | rotary key P_WIDTH]: grid n.
// q <- norm of the query latent; cache[slot] <- norm of the latent, then the key turned in pairs by its position.
// A negative slot is written nowhere.  The first warps have the query, the next ones the latent, the last one the key.
constexpr int Q_WARPS = (Q_WIDTH / 8 + 31) / 32, L_WARPS = (L_WIDTH / 8 + 31) / 32, CACHE = L_WIDTH + P_WIDTH;
constexpr int LATENT_THREADS = 32 * (Q_WARPS + L_WARPS + 1);
static_assert(Q_WIDTH % 8 == 0 && L_WIDTH % 8 == 0 && P_WIDTH % 8 == 0 && P_WIDTH <= 256, "whole chunks, one warp of keys");

extern "C" __global__ void __launch_bounds__(LATENT_THREADS)
latent_write(const bf16* x, const bf16* q_weight, const bf16* l_weight, const float2* turns, const long long* positions,
             const long long* slots, const int* rows, bf16* q, bf16* cache, long long x_stride, long long q_stride,
             int table, float eps) {
  __shared__ float sums[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x;
  const bool is_q = warp < Q_WARPS, is_l = !is_q && warp < Q_WARPS + L_WARPS;
  const int c = (is_q ? threadIdx.x : is_l ? threadIdx.x - 32 * Q_WARPS : lane) * 8;   // within the part
  const bool on = c < (is_q ? Q_WIDTH : is_l ? L_WIDTH : P_WIDTH);
  uint4 w = make_uint4(0, 0, 0, 0);
  if (on && (is_q || is_l)) w = load16_once((is_q ? q_weight : l_weight) + c);
  go_and_wait();
  const int live = rows ? load_int(rows) : row + 1;   // all loads before the first is waited for
  const long long slot = load_long(slots + row), position = load_long(positions + row);
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (on) raw = load16(x + row * x_stride + (is_q ? 0 : is_l ? Q_WIDTH : Q_WIDTH + L_WIDTH) + c);
  float2 turn[4] = {};
  if (on && !is_q && !is_l) load_turns(turn, turns_at(turns, position, table, P_WIDTH / 2) + c / 2);
  if (row >= live) return;
  float v[8];
  unpack8(v, raw);
  float sum = warp_sum(squares(v));
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (is_q || is_l) {
    const int begin = is_q ? 0 : Q_WARPS, warps = is_q ? Q_WARPS : L_WARPS;
    sum = warp_sum(lane < warps ? sums[begin + lane] : 0.f);
    normalise(v, scale_of(sum, is_q ? Q_WIDTH : L_WIDTH, eps), w);
  } else if (on) {
    turn_pairs(v, turn);
  }
  if (!on) return;
  if (is_q) store16(q + row * q_stride + c, pack8(v));
  else if (slot >= 0) store16(cache + slot * CACHE + (is_l ? 0 : L_WIDTH) + c, pack8(v));
}
#endif
