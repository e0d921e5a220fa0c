// Logits -> the 64 best candidates of each (row, depth) and the log-sum-exp of z = log q / T + beta_d * gumbel.
//
//   pick     each block reads one or several segments of 8192 tokens of a (depth, row) once: keys [R][D][parts][64], sums [R][D][S]
//   merge    one block per (depth, row): ids, z, place (each candidate's rank by id) [R][D][64], norm [R][D]
//
// LAW 1. Segments depend on the vocabulary only; a segment's sum has one order (segment.cuh), the segments follow in order, and
// the 64 highest of distinct keys (value descending, id ascending) are what they are. z is rounded as written in ref.py.
// Rows from *rows on, and rows without a budget, are neither read nor written.
#include "running.cuh"

#ifndef WIDE
#define WIDE 0           // 1: float32 logits
#endif
constexpr float COLD = 1e-5f;

#ifdef PICK
constexpr int FEW = 2;                                 // tokens of a thread that may be left
constexpr int MOST = 32;                               // segments of a vocabulary
struct Pending {                                       // tokens whose noise may be high enough
  u64 list[FEW * SEGMENT_THREADS];                     // value << 32 | token
  u32 count;
};

__device__ __noinline__ u64 noisy_key(float z, u32 token, u32 position, u64 seed, float scale) {
  const Bits bits = philox(token >> 2, position, seed);
  const u32 word = token & 2 ? (token & 1 ? bits.word[3] : bits.word[2]) : (token & 1 ? bits.word[1] : bits.word[0]);
  return rank_key(add_rn(z, mul_rn(gumbel(word), scale)), token);
}
// Where only the best count and scale > 0: keys of v + scale * gumbel that count for the 64 highest. The bound allows noise only of few
// bits; tokens that have them are listed, and shared out evenly. At first every thread finds the noise of its highest value: the 64th
// of these is the bound. False, and nothing is changed, if too many are left. Which tokens are listed changes nothing.
__device__ __forceinline__ bool take_noisy(Running& run, Pending& few, const float (&v)[PER], float highest, int s, u32 position, u64 seed,
                                           float scale) {
  const u32 known = run.bound, before = run.count;
  if (threadIdx.x == 0) few.count = 0;
  __syncthreads();
  if (known <= 1) {
    int which = 0;
#pragma unroll
    for (int j = PER - 1; j >= 0; j--) if (v[j] == highest) which = j;
    find_bound(run, (u32)(noisy_key(highest, token_of(s, which), position, seed, scale) >> 32));
  }
  const u32 bound = run.bound;
  if (bound <= 1) return false;                        // the same in all threads
  const float least = least_of(bound), turn = scale > 1e-6f ? divide(1.f, scale) : 1e30f;          // less noise is within the slack
  u32 mask = 0;
#pragma unroll
  for (int q = 0; q < PER / 4; q++) {
    const float high = fmaxf(fmaxf(v[4 * q], v[4 * q + 1]), fmaxf(v[4 * q + 2], v[4 * q + 3]));
    const u32 allowed = allowed_bits(high, least, turn);
    const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, position, seed);
#pragma unroll
    for (int e = 0; e < 4; e++) mask |= (u32)(bits.word[e] <= allowed) << (4 * q + e);
  }
  const int lane = threadIdx.x & 31;
  u32 upto = __popc(mask);
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u32 earlier = __shfl_up_sync(ALL_LANES, upto, by);
    if (lane >= by) upto += earlier;
  }
  u32 at = 0;
  if (lane == 31) at = count_up(&few.count, upto);
  at = __shfl_sync(ALL_LANES, at, 31) + upto - __popc(mask);
  if (mask && at + __popc(mask) <= FEW * SEGMENT_THREADS) {
#pragma unroll
    for (int j = 0; j < PER; j++)
      if (mask >> j & 1) few.list[at++] = (u64)__float_as_uint(v[j]) << 32 | (u32)token_of(s, j);
  }
  __syncthreads();
  const int n = few.count;
  if (n > FEW * SEGMENT_THREADS) return false;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += SEGMENT_THREADS) {
    const u64 key = noisy_key(__uint_as_float((u32)(few.list[i] >> 32)), (u32)few.list[i], position, seed, scale);
    if ((u32)(key >> 32) >= bound) put(run, key);
  }
  __syncthreads();
  if (run.count > MOST_KEYS) {                         // ties
    __syncthreads();
    if (threadIdx.x == 0) run.count = before;
    __syncthreads();
    return false;
  }
  if (run.count > MANY_KEYS) cut(run);
  return true;
}

// Grid (parts, D, R): block p reads segments p, p + parts, ... logits: row r, depth d at r * row_stride + d * depth_stride. seeds null:
// no noise. norms: for how many depths the sum of all tokens is wanted. Position of the token at depth d (0 = first): lengths[r] + 1 + d.
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, 2)
pick(const void* logits, long long row_stride, long long depth_stride, const float* temperature, const float* beta,
       const long long* seeds, const long long* lengths, const int* budgets, const int* rows, u64* keys, float2* sums, int V,
       int segments, int norms) {
  __shared__ Running run;
  __shared__ Pending few;
  __shared__ u32 peaks[MOST];
  __shared__ float parts[MOST][SEGMENT_THREADS / 32];
  const int d = blockIdx.y, r = blockIdx.z, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  const int budget = load_int(budgets + r);
  if ((rows && r >= load_int(rows)) || budget <= 0) return;
  begin(run);
  if (tid < MOST) peaks[tid] = 0;
  __syncthreads();
  const long long row = (long long)r * gridDim.y + d;
#pragma unroll 1
  for (int s = blockIdx.x, i = 0; s < segments; s += gridDim.x, i++) {
    Eight<WIDE != 0> held[CHUNKS];                     // the logits travel while the row's parameters are looked up
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int at = chunk_token(s, c);
      held[c] = at < V ? fetch_logits<WIDE != 0>(logits, r * row_stride + d * depth_stride + at) : no_logits<WIDE != 0>();
    }
    ask_ahead<WIDE != 0>(logits, r * row_stride + d * depth_stride, s + gridDim.x, V);
    const float heat = temperature[r], scale = beta[d];
    const bool hot = heat > COLD, noisy = hot && seeds && scale > 0.f;         // at scale 0 the noise is 0
    const u64 seed = noisy ? (u64)seeds[r] : 0;
    const u32 position = noisy ? (u32)(lengths[r] + 1 + d) : 0;
    float v[PER];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      float x[8];
      as_floats<WIDE != 0>(x, held[c]);                // NaN may stand: maxima, sums and bounds take it as -inf
#pragma unroll
      for (int e = 0; e < 8; e++) v[c * 8 + e] = x[e];
    }
    float highest = highest_of(v);
    if (highest > 1e30f) {
#pragma unroll
      for (int j = 0; j < PER; j++) v[j] = v[j] > 1e30f ? 1e30f : v[j];
    }
    if (hot && heat != 1.f) divide_all(v, heat);
    highest = fmaxf(highest_of(v), minus_infinity());
    if (noisy && d >= norms && take_noisy(run, few, v, highest, s, position, seed, scale)) continue;
    if (noisy) {
#pragma unroll
      for (int q = 0; q < PER / 4; q++) {
        const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, position, seed);
#pragma unroll
        for (int e = 0; e < 4; e++) v[4 * q + e] = add_rn(v[4 * q + e], mul_rn(gumbel(bits.word[e]), scale));
      }
      highest = fmaxf(highest_of(v), minus_infinity());
    }
    if (d < norms) {
      const u32 peak = block_peak(highest, &peaks[i]);
      warp_exp_sum(v, value_of(peak), parts[i]);
    }
    take_values(run, v, highest, s);
  }
  cut(run);
  if (tid < TOP) keys[(row * gridDim.x + blockIdx.x) * TOP + tid] = run.top[tid];
  const int s = blockIdx.x + tid * gridDim.x;
  if (d < norms && s < segments) sums[row * segments + s] = make_float2(value_of(peaks[tid]), sum_of(parts[tid]));
}
#endif

#ifdef MERGE
constexpr int LISTS = 32 * TOP / SEGMENT_THREADS;          // keys of a thread: up to 32 segments
// Grid (D, R). parts: lists of 64 keys for each.
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS)
merge(const u64* keys, const float2* sums, const int* budgets, const int* rows, int* ids, float* z, int* places, float* norm,
      int parts, int segments, int norms) {
  __shared__ Running run;
  const int d = blockIdx.x, r = blockIdx.y, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  const int budget = load_int(budgets + r);
  if ((rows && r >= load_int(rows)) || budget <= 0) return;
  begin(run);
  const long long at = (long long)r * gridDim.x + d;
  u64 mine[LISTS];
#pragma unroll
  for (int j = 0; j < LISTS; j++) {
    const int i = j * SEGMENT_THREADS + tid;
    mine[j] = i < parts * TOP ? keys[at * parts * TOP + i] : 0;
  }
  __syncthreads();
  take_keys(run, mine);
  cut(run);
  if (tid < TOP) {
    const u64 key = run.top[tid];
    const u32 id = key ? choice_id(key) : ~0u;
    int place = 0;
#pragma unroll 8
    for (int o = 0; o < TOP; o++) {
      const u64 other = run.top[o];
      const u32 other_id = other ? choice_id(other) : ~0u;
      place += other_id < id || (other_id == id && o < tid);         // several may be nothing
    }
    ids[at * TOP + tid] = (int)id;
    places[at * TOP + tid] = place;
    z[at * TOP + tid] = key_value(key);
  }
  if (tid >= SEGMENT_THREADS - 32) {
    const float found = d < norms ? log_sum_exp(sums + at * segments, segments) : minus_infinity();
    if ((tid & 31) == 0) norm[at] = found;
  }
}
#endif
