// Logits -> the 64 best candidates of each (row, depth) and the log-sum-exp of z = log q / T + beta_d * gumbel.
//
//   pick     each block reads one or several segments of 8192 tokens of a (depth, row) once: keys [R][D][64][parts], sums [R][D][S]
//   merge    one block per (depth, row): ids, z, place (each candidate's rank by id) [R][D][64], norm [R][D]
//
// Where a list has one block, that block gives the results too.
//
// LAW 1. Segments depend on the vocabulary only; a segment's sum has one order (segment.cuh), the segments follow in order, and
// the 64 highest of distinct keys (value descending, id ascending) are what they are. z is rounded as written in ref.py.
// Rows from *rows on, and rows without a budget, are neither read nor written.
#include "running.cuh"

#ifndef WIDE
#define WIDE 0           // 1: float32 logits
#endif
constexpr float COLD = 1e-5f;

// Where a list's results go, all [R][D] and all but norm [64].
struct Results { int *ids; float* z; int* places; float* norm; };
// run.top: the 64 best of list `at`. sums: of its segments, null if its log-sum-exp is not wanted. All threads.
__device__ __forceinline__ void give(const Running& run, long long at, const float2* sums, int segments, const Results& to) {
  const int tid = threadIdx.x;
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
    to.ids[at * TOP + tid] = (int)id;
    to.places[at * TOP + tid] = place;
    to.z[at * TOP + tid] = key_value(key);
  }
  if (tid >= SEGMENT_THREADS - 32) {
    const float found = sums ? log_sum_exp(sums, segments) : minus_infinity();
    if ((tid & 31) == 0) to.norm[at] = found;
  }
}

#ifdef PICK
constexpr int MOST = 32;                               // segments of a vocabulary
constexpr bool AHEAD = !WIDE;                          // a segment ahead in registers; float32: asked of L2

// One row of logits and how they become z.
struct Row {
  const void* logits;                                  // of token 0
  float heat, scale;
  u64 seed;
  u32 position;
  bool heated, noisy;                                  // divided by heat; with noise (at scale 0 the noise is 0)
};
__device__ __forceinline__ float noise_of(u32 token, u32 position, u64 seed, float scale) {
  const Bits bits = philox(token >> 2, position, seed);
  const u32 word = token & 2 ? (token & 1 ? bits.word[3] : bits.word[2]) : (token & 1 ? bits.word[1] : bits.word[0]);
  return mul_rn(gumbel(word), scale);
}
// The key of one token, from the logits. Few tokens come here: it is read again.
__device__ __forceinline__ u64 key_of(const Row& row, int token, int V) {
  if (token >= V) return 0;
  float z = WIDE ? ((const float*)row.logits)[token] : __bfloat162float(((const bf16*)row.logits)[token]);
  z = fminf(fmaxf(z, minus_infinity()), 1e30f);
  if (row.heated) z = divide_any(z, row.heat);
  if (row.noisy) z = add_rn(z, noise_of(token, row.position, row.seed, row.scale));
  return rank_key(z, token);
}

__device__ __forceinline__ void put_drawn(Running& run, float value, u32 bits, float scale, int token, u32 bound) {
  const u64 key = rank_key(add_rn(value, mul_rn(gumbel(bits), scale)), token);
  if (key && (u32)(key >> 32) >= bound) put(run, key);
}
// Where only the best count and scale > 0: puts the keys of v + scale * noise that reach the bound. Noise is found of the few
// tokens alone whose bits may be enough: for the highest of four first, then for their own value. highest: of v.
__device__ __forceinline__ void put_noisy(Running& run, const Row& row, const float (&v)[PER], float highest, int s) {
  const u32 bound = run.bound;
  const float least = least_of(bound);
  if (!__ballot_sync(ALL_LANES, add_rn(highest, mul_rn(MOST_NOISE, row.scale)) >= least)) return;
  const Reach reach = reach_of(least, row.scale);
#pragma unroll
  for (int q = 0; q < PER / 4; q++) {
    const int token = token_of(s, 4 * q);
    const u32 enough = bits_reaching(reach, fmaxf(fmaxf(v[4 * q], v[4 * q + 1]), fmaxf(v[4 * q + 2], v[4 * q + 3])));
    const Bits bits = philox((u32)token >> 2, row.position, row.seed);
    if (!__ballot_sync(ALL_LANES, min(min(bits.word[0], bits.word[1]), min(bits.word[2], bits.word[3])) <= enough)) continue;
    u32 hits = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) hits |= (u32)may_reach(reach, v[4 * q + e], bits.word[e]) << e;
#pragma unroll 1
    while (__ballot_sync(ALL_LANES, hits != 0)) {      // of each lane one at a time
      if (hits) {
        const Hit hit = first_hit(hits, bits, v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
        put_drawn(run, hit.value, hit.bits, row.scale, token + hit.which, bound);
      }
      hits &= hits - 1;
    }
  }
}
// A segment had more keys than the list holds (ties): again, one key a thread at a time. Rare. before: how many were in the list.
__device__ __noinline__ void put_again(Running& run, u32 before, const Row& row, int s, int V) {
  __syncthreads();
  if (threadIdx.x == 0) run.count = before;
  __syncthreads();
  cut(run);
#pragma unroll 1
  for (int j = 0; j < PER; j++) put_and_cut(run, key_of(row, token_of(s, j), V));
}

// Grid (parts, R, D): block p reads segments p, p + parts, ... logits: row r, depth d at r * row_stride + d * depth_stride. seeds
// null: no noise. norms: for how many depths the sum of all tokens is wanted; these take longest, so they come first. Position of
// the token at depth d (0 = first): lengths[r] + 1 + d.
//
// Two barriers a segment. Behind the first its peak is known, and what the one before put into the list; the sum stands between
// them, so nobody waits long; behind the second nobody reads the list's length any more, and keys are put in.
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, 2)
pick(const void* logits, long long row_stride, long long depth_stride, const float* temperature, const float* beta,
     const long long* seeds, const long long* lengths, const int* budgets, const int* rows, u64* keys, float2* sums, int* ids,
     float* z, int* places, float* norm, int V, int segments, int norms) {
  __shared__ Running run;
  __shared__ Row row;                                  // not in registers, of which there are none to spare
  __shared__ u32 peaks[MOST];
  __shared__ float parts[MOST][SEGMENT_THREADS / 32];
  const int r = blockIdx.y, d = blockIdx.z, D = gridDim.z, tid = threadIdx.x, every = gridDim.x;
  pdl_wait();
  pdl_go();
  const int budget = load_int(budgets + r), live = rows ? load_int(rows) : r + 1;
  const float heat = temperature[r], scale = beta[d];
  const u64 seed = seeds ? (u64)seeds[r] : 0;
  const u32 position = seeds ? (u32)(lengths[r] + 1 + d) : 0;
  if (r >= live || budget <= 0) return;
  const long long from = r * row_stride + d * depth_stride;
  const void* tokens = WIDE ? (const void*)((const float*)logits + from) : (const void*)((const bf16*)logits + from);
  const bool summed = d < norms;
  Eight<WIDE != 0> held[CHUNKS];
  fetch_segment(held, tokens, blockIdx.x, V);
  if (tid == 0) row = {tokens, heat, scale, seed, position, heat > COLD && heat != 1.f, heat > COLD && seeds && scale > 0.f};
  begin(run);
  if (tid < MOST) peaks[tid] = 0;
  __syncthreads();
  u32 before = 0, many = GROUPS;                       // keys in the list when the last segment put its own; the bound is due above
#pragma unroll 1
  for (int s = blockIdx.x, i = 0; s < segments; s += every, i++) {
    float v[PER], highest = highest_of(held);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      float x[8];
      as_floats<WIDE != 0>(x, held[c]);                // NaN may stand: maxima, sums and bounds take it as -inf
#pragma unroll
      for (int e = 0; e < 8; e++) v[c * 8 + e] = x[e];
    }
    if (AHEAD && s + every < segments) fetch_segment(held, tokens, s + every, V);
    if (!AHEAD) ask_ahead<WIDE != 0>(tokens, s + every, V);
    if (highest > 1e30f) {
#pragma unroll
      for (int j = 0; j < PER; j++) v[j] = v[j] > 1e30f ? 1e30f : v[j];
      highest = 1e30f;
    }
    if (row.heated) {
      divide_all(v, row.heat);
      highest = highest_of(v);
    }
    if (row.noisy && summed) {
#pragma unroll
      for (int q = 0; q < PER / 4; q++) {
        const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, row.position, row.seed);
#pragma unroll
        for (int e = 0; e < 4; e++) v[4 * q + e] = add_rn(v[4 * q + e], mul_rn(gumbel(bits.word[e]), row.scale));
      }
      highest = highest_of(v);
    }
    highest = fmaxf(highest, minus_infinity());
    if (summed) {
      const u32 order = warp_max_u32(order_of(highest));
      if ((tid & 31) == 0) raise(&peaks[i], order);
    }
    __syncthreads();
    const u32 n = run.count, known = run.bound;
    if (summed) warp_exp_sum(v, value_of(peaks[i]), parts[i]);
    __syncthreads();
    if (n > MOST_KEYS) put_again(run, before, row, s - every, V);
    else if (n > MANY_KEYS) finish(run);
    else if (n > many) tighten(run, n);
    before = n > MANY_KEYS ? (u32)TOP : n;
    if (n > min(many, (u32)MANY_KEYS)) many = before + MORE_KEYS;
    const bool sampled = row.noisy && !summed;         // noise is found where it can matter only
    if (known <= 1) {
      float z = highest;
      if (sampled) {                                   // the 64th of the noisy values of every thread's highest token is a bound
        int which = 0;
#pragma unroll
        for (int j = PER - 1; j >= 0; j--) if (v[j] == highest) which = j;
        z = add_rn(z, noise_of(token_of(s, which), row.position, row.seed, row.scale));
      }
      find_bound(run, (u32)(rank_key(z, 0) >> 32));
    }
    if (sampled) put_noisy(run, row, v, highest, s);
    else put_values(run, v, highest, s);
    if (!AHEAD && s + every < segments) fetch_segment(held, tokens, s + every, V);
  }
  __syncthreads();
  if (run.count > MOST_KEYS) put_again(run, before, row, blockIdx.x + (segments - 1 - (int)blockIdx.x) / every * every, V);
  finish(run);
  const long long at = (long long)r * D + d;
  const int s = blockIdx.x + tid * every;
  if (summed && s < segments) sums[at * segments + s] = make_float2(value_of(peaks[tid]), sum_of(parts[tid]));
  if (every == 1) {
    __syncthreads();                                   // the sums
    give(run, at, summed ? sums + at * segments : nullptr, segments, {ids, z, places, norm});
  } else if (tid < TOP) {
    keys[(at * TOP + tid) * every + blockIdx.x] = run.top[tid];
  }
}
#endif

#ifdef MERGE
constexpr int LISTS = 32 * TOP / SEGMENT_THREADS;          // keys of a thread: up to 32 segments
// Grid (D, R). parts: lists of 64 keys for each, the highest of all lists first: so every group of threads gets one of the highest,
// and what reaches their bound is little more than 64.
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
  give(run, at, d < norms ? sums + at * segments : nullptr, segments, {ids, z, places, norm});
}
#endif
