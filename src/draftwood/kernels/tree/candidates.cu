// Logits -> the 64 best candidates of each (row, depth) and the log-sum-exp of z = log q / T + beta_d * gumbel.
//
//   pick     one block per (segment of 8192 tokens, depth, row) reads its logits once: keys [R][D][S][64], sums [R][D][S]
//   merge    one block per (depth, row): ids, z, place (each candidate's rank by id) [R][D][64], norm [R][D]
//
// LAW 1. Segments depend on the vocabulary only; a segment's sum has one order (segment.cuh), the segments follow in order, and
// the 64 highest of distinct keys (value descending, id ascending) are what they are. z is rounded as written in ref.py.
// Rows from *rows on, and rows without a budget, are neither read nor written.
#include "segment.cuh"
#include "top.cuh"

#ifndef WIDE
#define WIDE 0           // 1: float32 logits
#endif
constexpr float COLD = 1e-5f;

#ifdef PICK
// Grid (S, D, R). logits: row r, depth d at r * row_stride + d * depth_stride. seeds null: no noise. norms: for how many depths
// the sum of all tokens is wanted. Position of the token at depth d (0 = first): lengths[r] + 1 + d.
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS)
pick(const void* logits, long long row_stride, long long depth_stride, const float* temperature, const float* beta,
       const long long* seeds, const long long* lengths, const int* budgets, const int* rows, u64* keys, float2* sums, int V,
       int norms) {
  __shared__ TopWork<PER> work;
  __shared__ float room[SEGMENT_THREADS / 32];
  const int s = blockIdx.x, d = blockIdx.y, r = blockIdx.z, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if ((rows && r >= load_int(rows)) || load_int(budgets + r) <= 0) return;
  const float heat = temperature[r];
  const bool hot = heat > COLD, noisy = hot && seeds;
  const u64 seed = noisy ? (u64)seeds[r] : 0;
  const u32 position = noisy ? (u32)(lengths[r] + 1 + d) : 0;
  const float scale = beta[d];
  float v[PER];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = chunk_token(s, i);
    float x[8];
    if (at < V) load_logits<WIDE != 0>(x, logits, r * row_stride + d * depth_stride + at);
#pragma unroll
    for (int e = 0; e < 8; e++) v[i * 8 + e] = at < V ? fminf(x[e], 1e30f) : minus_infinity();
  }
  if (hot) {
#pragma unroll
    for (int j = 0; j < PER; j++) v[j] = div_rn(v[j], heat);
  }
  if (noisy) {
#pragma unroll
    for (int q = 0; q < PER / 4; q++) {
      const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, position, seed);
#pragma unroll
      for (int e = 0; e < 4; e++) v[4 * q + e] = add_rn(v[4 * q + e], mul_rn(gumbel(bits.word[e]), scale));
    }
  }
  const long long part = ((long long)r * gridDim.y + d) * gridDim.x + s;
  if (d < norms) {
    float most = v[0];
#pragma unroll
    for (int j = 1; j < PER; j++) most = fmaxf(most, v[j]);
    const float peak = block_max(most, room), sum = block_exp_sum(v, peak, room);
    if (tid == 0) sums[part] = make_float2(peak, sum);
  }
  block_top<PER>(work, [&](int j) { return rank_key(v[j], token_of(s, j)); });
  if (tid < TOP) keys[part * TOP + tid] = work.top[tid];
}
#endif

#ifdef MERGE
constexpr int LISTS = 8;                               // keys of a thread: up to 32 segments
// Grid (D, R).
extern "C" __global__ void __launch_bounds__(TOP_THREADS)
merge(const u64* keys, const float2* sums, const int* budgets, const int* rows, int* ids, float* z, int* places, float* norm,
      int segments, int norms) {
  __shared__ TopWork<LISTS> work;
  const int d = blockIdx.x, r = blockIdx.y, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if ((rows && r >= load_int(rows)) || load_int(budgets + r) <= 0) return;
  const long long at = (long long)r * gridDim.x + d;
  u64 mine[LISTS];
#pragma unroll
  for (int j = 0; j < LISTS; j++) {
    const int i = j * TOP_THREADS + tid;
    mine[j] = i < segments * TOP ? keys[at * segments * TOP + i] : 0;
  }
  block_top<LISTS>(work, [&](int j) { return mine[j]; });
  if (tid < TOP) {
    const u64 key = work.top[tid];
    const u32 id = key ? choice_id(key) : ~0u;
    int place = 0;
#pragma unroll 8
    for (int o = 0; o < TOP; o++) {
      const u64 other = work.top[o];
      const u32 other_id = other ? choice_id(other) : ~0u;
      place += other_id < id || (other_id == id && o < tid);         // several may be nothing
    }
    ids[at * TOP + tid] = (int)id;
    places[at * TOP + tid] = place;
    z[at * TOP + tid] = key_value(key);
  }
  if (tid >= TOP_THREADS - 32) {
    const float found = d < norms ? log_sum_exp(sums + at * segments, segments) : minus_infinity();
    if ((tid & 31) == 0) norm[at] = found;
  }
}
#endif
