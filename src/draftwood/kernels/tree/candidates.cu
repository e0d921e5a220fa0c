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
constexpr int FEW = 2;                                 // tokens of a thread that may be left
__device__ __forceinline__ u64 noisy_key(float z, u32 token, u32 position, u64 seed, float scale) {
  const Bits bits = philox(token >> 2, position, seed);
  const u32 word = token & 2 ? (token & 1 ? bits.word[3] : bits.word[2]) : (token & 1 ? bits.word[1] : bits.word[0]);
  return rank_key(add_rn(z, mul_rn(gumbel(word), scale)), token);
}
// Where only the best count. Every thread finds the noise of its highest z; the 64 best of these bound the 64 best of all, and only
// tokens whose bits allow as much need their noise found. They are listed, and shared out evenly. False, and nothing is changed, if
// they are too many; true with work.top complete. Which tokens are listed does not change the best 64.
__device__ __forceinline__ bool few_noisy(TopWork<PER>& work, const float (&v)[PER], int s, u32 position, u64 seed, float scale) {
  float most = v[0];
  int which = 0;
#pragma unroll
  for (int j = 1; j < PER; j++) if (v[j] > most) { most = v[j]; which = j; }
  const u64 first = noisy_key(most, token_of(s, which), position, seed, scale);
  block_bound(work, (u32)(first >> 32));
  const u32 bound = work.bound;
  const float least = key_value((u64)bound << 32);
  __syncthreads();
  if (bound == 1) return false;                        // the same in all threads
  u32 mask = 0;
#pragma unroll
  for (int q = 0; q < PER / 4; q++) {
    const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, position, seed);
#pragma unroll
    for (int e = 0; e < 4; e++)
      mask |= (u32)(add_rn(v[4 * q + e], mul_rn(gumbel_bound(bits.word[e]), scale)) >= least) << (4 * q + e);
  }
  const int lane = threadIdx.x & 31;
  u32 upto = __popc(mask);
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u32 before = __shfl_up_sync(ALL_LANES, upto, by);
    if (lane >= by) upto += before;
  }
  u32 at = 0;
  if (lane == 31) at = count_up(&work.count, upto);
  at = __shfl_sync(ALL_LANES, at, 31) + upto - __popc(mask);
  if (at + __popc(mask) <= FEW * SEGMENT_THREADS) {
#pragma unroll
    for (int j = 0; j < PER; j++)
      if (mask >> j & 1) work.list[at++] = (u64)__float_as_uint(v[j]) << 32 | (u32)token_of(s, j);
  }
  __syncthreads();
  const int n = work.count;
  u64 mine[FEW];
#pragma unroll
  for (int k = 0; k < FEW; k++) {
    const int i = k * SEGMENT_THREADS + threadIdx.x;
    mine[k] = 0;
    if (i < n && n <= FEW * SEGMENT_THREADS) {
      const u32 token = (u32)work.list[i];
      mine[k] = noisy_key(__uint_as_float((u32)(work.list[i] >> 32)), token, position, seed, scale);
    }
  }
  __syncthreads();
  if (n > FEW * SEGMENT_THREADS) return false;
  TopWork<FEW>& small = reinterpret_cast<TopWork<FEW>&>(work);       // the list is in registers now
  block_top<FEW>(small, [&](int k) { return mine[k]; });
  const u64 key = threadIdx.x < TOP ? small.top[threadIdx.x] : 0;
  __syncthreads();
  if (threadIdx.x < TOP) work.top[threadIdx.x] = key;
  return true;
}

// Grid (S, D, R). logits: row r, depth d at r * row_stride + d * depth_stride. seeds null: no noise. norms: for how many depths
// the sum of all tokens is wanted. Position of the token at depth d (0 = first): lengths[r] + 1 + d.
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, 2)
pick(const void* logits, long long row_stride, long long depth_stride, const float* temperature, const float* beta,
       const long long* seeds, const long long* lengths, const int* budgets, const int* rows, u64* keys, float2* sums, int V,
       int norms) {
  __shared__ TopWork<PER> work;
  __shared__ float room[SEGMENT_THREADS / 32];
  const int s = blockIdx.x, d = blockIdx.y, r = blockIdx.z, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if ((rows && r >= load_int(rows)) || load_int(budgets + r) <= 0) return;
  Eight<WIDE != 0> held[CHUNKS];                       // the logits travel while the row's parameters are looked up
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = chunk_token(s, i);
    held[i] = at < V ? fetch_logits<WIDE != 0>(logits, r * row_stride + d * depth_stride + at) : no_logits<WIDE != 0>();
  }
  const float heat = temperature[r], scale = beta[d];
  const u64 given = seeds ? (u64)seeds[r] : 0;
  const u32 next = seeds ? (u32)(lengths[r] + 1 + d) : 0;
  const bool hot = heat > COLD, noisy = hot && seeds;
  const u64 seed = noisy ? given : 0;
  const u32 position = noisy ? next : 0;
  float v[PER];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    float x[8];
    logits_of<WIDE != 0>(x, held[i]);
#pragma unroll
    for (int e = 0; e < 8; e++) v[i * 8 + e] = fminf(x[e], 1e30f);
  }
  if (hot && heat != 1.f) {
#pragma unroll
    for (int j = 0; j < PER; j++) v[j] = divide_any(v[j], heat);
  }
  const long long part = ((long long)r * gridDim.y + d) * gridDim.x + s;
  if (noisy && d >= norms && few_noisy(work, v, s, position, seed, scale)) {
    if (tid < TOP) keys[part * TOP + tid] = work.top[tid];
    return;
  }
  if (noisy) {
#pragma unroll
    for (int q = 0; q < PER / 4; q++) {
      const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, position, seed);
#pragma unroll
      for (int e = 0; e < 4; e++) v[4 * q + e] = add_rn(v[4 * q + e], mul_rn(gumbel(bits.word[e]), scale));
    }
  }
  if (d < norms) {
    float most = v[0];
#pragma unroll
    for (int j = 1; j < PER; j++) most = fmaxf(most, v[j]);
    const float peak = block_max(most, room), sum = block_exp_sum(v, peak, room);
    if (tid == 0) sums[part] = make_float2(peak, sum);
  }
  segment_top(work, v, s);
  if (tid < TOP) keys[part * TOP + tid] = work.top[tid];
}
#endif

#ifdef MERGE
constexpr int LISTS = 32 * TOP / TOP_THREADS;          // keys of a thread: up to 32 segments
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
