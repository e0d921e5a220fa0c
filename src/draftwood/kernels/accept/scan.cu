// Reads verified nodes' logits once: all nodes', or those that rows' walks have come to. A block has one or several of a node's
// segments of 8192 tokens.
//
//   raw [M][S]       largest raw logit and sum of exp, for the log-probability (if step.logprobs)
//   best [M][S]      rows without a filter: key of the segment's choice, argmax of z + gumbel (greedy rows: of z)
//   lists [M][64][S] rows with a filter: the segment's 64 highest z; heat [M][S]: largest z and sum of exp (top-p alone)
//
// Instructions a token bind it, so: a segment has one barrier (its largest value, by a maximum of integers); sums and choices of
// all of a block's segments are put together at its end. Noise is found only for tokens that can still win: bits below a bound that
// z and the block's best so far give, one power of two for four tokens; at first that is the best of each lane's highest token.
// Skipping cannot change the best.
#include "node.cuh"
#include "../tree/running.cuh"

#ifndef FILTERS
#define FILTERS 1        // 0: no row of the batch has min-p, top-k or top-p
#endif
constexpr int MOST = 32; // segments of a vocabulary
constexpr float LEAST_NOISE = -3.2f;

// What a block knows of its segments, the i-th of them at [i]. Orders (float_order) of values, 0: nothing yet.
struct Found {
  u32 peak[MOST], raw_peak[MOST], first[MOST];         // largest z, and raw logit; greedy: the lowest id that has it
  u32 floor;                                           // otherwise: of the best choice so far
  float sum[MOST][SEGMENT_WARPS];
  u64 key[MOST][SEGMENT_WARPS];                        // and the keys of the warps' choices
};

__device__ __noinline__ u64 noisy_key(float z, u32 bits, int token) { return rank_key(add_rn(z, gumbel(bits)), token); }
// This warp's best key of z + gumbel, or 0 if the block has found better. most: the highest of v. floor: the order of a value that
// the block's choice reaches; shared: the same, as far as the block's warps have come. sampled: that has been drawn, and seldom a
// token is better: first all tokens' bits are held against what the thread's highest would need. Else each lane draws for its
// highest token first.
__device__ __forceinline__ u64 best_drawn(const float (&v)[PER], float most, int s, const Node& a, u32 floor, u32* shared,
                                          bool sampled) {
  u64 mine = 0;
  if (sampled) {
    const float known = value_of(floor);
    if (!__ballot_sync(ALL_LANES, add_rn(most, MOST_NOISE) >= known)) return 0;
    const u32 enough = bits_reaching(reach_of(known), most);
    u32 lowest = ~0u;
#pragma unroll
    for (int q = 0; q < PER / 4; q++) {
      const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, a.position, a.seed);
#pragma unroll
      for (int e = 0; e < 4; e++) lowest = min(lowest, bits.word[e]);
    }
    if (!__ballot_sync(ALL_LANES, lowest <= enough)) return 0;
  } else {
    int which = 0;
#pragma unroll
    for (int j = PER - 1; j >= 0; j--) if (v[j] == most) which = j;
    mine = drawn_key(a, most, token_of(s, which));
    floor = max(floor, warp_max_u32((u32)(mine >> 32)));
    if ((threadIdx.x & 31) == 0) raise(shared, floor);
    floor = max(floor, *shared);
  }
#pragma unroll
  for (int q = 0; q < PER / 4; q++) {                  // each token with a bound of its own
    const int token = token_of(s, 4 * q);
    const Bits bits = philox((u32)token >> 2, a.position, a.seed);
    const Reach reach = reach_of(value_of(floor));
    u32 hits = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) hits |= (u32)may_reach(reach, v[4 * q + e], bits.word[e]) << e;
    if (!__ballot_sync(ALL_LANES, hits != 0)) continue;
#pragma unroll 1
    do {                                               // of each lane one at a time
      if (hits) {
        const Hit hit = first_hit(hits, bits, v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
        mine = max(mine, noisy_key(hit.value, hit.bits, token + hit.which));
      }
      hits &= hits - 1;
    } while (__ballot_sync(ALL_LANES, hits != 0));
    floor = max(floor, warp_max_u32((u32)(mine >> 32)));
  }
  return warp_max_key(mine);
}

// What a block reads: segments first, first + every, ... of node m.
struct Share { int m, first, every; };
// Of the nodes that rows have come to (front [R], -1: none), so many blocks for each that all blocks have something to read. False
// if this block has nothing. All threads call it.
__device__ __noinline__ bool find_share(Share& share, const int* front, int R, int segments) {
  __shared__ int counts[SEGMENT_WARPS];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int live = 0, every = 1;
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {               // count the live ones, then find this block's
    int seen = 0;
#pragma unroll 1
    for (int from = 0; from < R; from += SEGMENT_THREADS) {
      const int mine = from + tid < R ? load_int(front + from + tid) : -1;
      const u32 bits = __ballot_sync(ALL_LANES, mine >= 0);
      if (lane == 0) counts[warp] = __popc(bits);
      __syncthreads();
      int before = seen + __popc(bits & ((1u << lane) - 1));
#pragma unroll 1
      for (int w = 0; w < SEGMENT_WARPS; w++) { before += w < warp ? counts[w] : 0; seen += counts[w]; }
      if (pass && mine >= 0 && before == (int)blockIdx.x / every) share = {mine, (int)blockIdx.x % every, every};
      __syncthreads();
    }
    live = seen;
    every = max(1, min(segments, (int)gridDim.x / max(live, 1)));
    if ((int)blockIdx.x / every >= live) return false;
  }
  return true;
}

// front: null: grid (any, M), node m = blockIdx.y; or [R], the nodes to read: grid (at least R).
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, 2)
scan(STEP_ARGUMENTS, const int* front, int R, float2* raw, float2* heat, u64* best, u64* lists) {
#if FILTERS
  __shared__ Running run;
#endif
  __shared__ Found found;
  __shared__ Share share;
  __shared__ int path[LONGEST];
  __shared__ Node a;
  const Step step = STEP;
  const int tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if (!front && tid == 0) share = {(int)blockIdx.y, (int)blockIdx.x, (int)gridDim.x};
  if (front && !find_share(share, front, R, segments)) return;
  if (tid < MOST) { found.peak[tid] = found.raw_peak[tid] = 0; found.first[tid] = ~0u; }
  if (tid == 0) found.floor = 0;
  __syncthreads();
  const int m = share.m;
  if (!is_live(step, m)) return;
  const void* row = WIDE ? (const void*)((const float*)logits + m * stride) : (const void*)((const bf16*)logits + m * stride);
#pragma unroll 1
  for (int s = share.first, i = 0; s < segments; s += share.every, i++) {
    float v[PER];
    {
      Eight<WIDE != 0> held[CHUNKS];                   // the logits travel while the node's parameters are looked up
      fetch_segment(held, row, s, V);
      ask_ahead<WIDE != 0>(row, s + share.every, V);
      if (i == 0) prepare(a, step, m, path);           // with a barrier
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        float x[8];
        as_floats<WIDE != 0>(x, held[c]);              // NaN may stand: maxima, sums and bounds take it as -inf
#pragma unroll
        for (int e = 0; e < 8; e++) v[c * 8 + e] = x[e];
      }
    }
    const long long part = (long long)m * segments + s;
    float most = highest_of(v);
    u32 peak = 0;
    if (logprobs) {
      peak = block_peak(most, &found.raw_peak[i]);
      warp_exp_sum(v, value_of(peak), found.sum[i]);
    }
    const bool fresh = a.adjusted || !logprobs;
    if (a.adjusted) {
      if (a.special) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          const int at = chunk_token(s, c);
          float x[8];
#pragma unroll
          for (int e = 0; e < 8; e++) x[e] = v[c * 8 + e];
          no_nan(x);
          if (at < V) adjust(x, a, at, path);
#pragma unroll
          for (int e = 0; e < 8; e++) v[c * 8 + e] = x[e];
        }
      } else {
        divide_all(v, a.temperature);
      }
      most = highest_of(v);
    }
#if FILTERS
    if (a.filtered) {
      if (a.top_p < 1.f) {
        if (fresh) {
          peak = block_peak(most, &found.peak[i]);
          if (logprobs) {                              // the raw sums are done with
            __syncthreads();
            if (tid == 0) raw[part] = make_float2(value_of(found.raw_peak[i]), sum_of(found.sum[i]));
            __syncthreads();
          }
          warp_exp_sum(v, value_of(peak), found.sum[i]);
        }
        __syncthreads();
        if (tid == 0) {
          const float2 both = make_float2(value_of(peak), sum_of(found.sum[i]));
          heat[part] = both;
          if (!fresh) raw[part] = both;
        }
      } else if (logprobs) {
        __syncthreads();
        if (tid == 0) raw[part] = make_float2(value_of(peak), sum_of(found.sum[i]));
      }
      begin(run);
      __syncthreads();
      take_values(run, v, most, s);
      finish(run);
      if (tid < TOP) lists[((long long)m * TOP + tid) * segments + s] = run.top[tid];
      continue;
    }
#endif
    if (fresh) peak = block_peak(most, &found.peak[i]);
    else if (tid == 0) found.peak[i] = peak;
    if (!a.hot) {
      if (most == value_of(peak)) {                    // of the thread's highest ones: the lowest id
        int which = PER - 1;
#pragma unroll
        for (int j = PER - 2; j >= 0; j--) if (v[j] == most) which = j;
        lower(&found.first[i], token_of(s, which));
      }
    } else {
      const u32 floor = found.floor;                   // of segments before; whatever of this one is there already does no harm
      const u32 least = max(floor, order_of(add_rn(value_of(peak), LEAST_NOISE)));
      const u64 best_here = best_drawn(v, most, s, a, least, &found.floor, i > 0);
      if ((tid & 31) == 0) {
        found.key[i][tid >> 5] = best_here;
        raise(&found.floor, (u32)(best_here >> 32));
      }
    }
  }
#if FILTERS
  if (a.filtered) return;
#endif
  __syncthreads();
  const int s = share.first + tid * share.every;
  if (s < segments) {
    const int i = tid;
    const long long part = (long long)m * segments + s;
    if (logprobs) raw[part] = make_float2(value_of(found.raw_peak[i]), sum_of(found.sum[i]));
    u64 key = 0;
#pragma unroll 4
    for (int w = 0; w < SEGMENT_WARPS; w++) key = max(key, a.hot ? found.key[i][w] : 0);
    best[part] = a.hot ? key : found.first[i] != ~0u ? rank_key(value_of(found.peak[i]), found.first[i]) : 0;
  }
}
