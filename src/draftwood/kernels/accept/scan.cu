// Reads every verified node's logits once: grid (any, M), a block for each of, or several of, a node's segments of 8192 tokens.
//
//   raw [M][S]       largest raw logit and sum of exp, for the log-probability (if step.logprobs)
//   best [M][S]      rows without a filter: key of the segment's choice, argmax of z + gumbel (greedy rows: of z)
//   lists [M][S][64] rows with a filter: the segment's 64 highest z; heat [M][S]: largest z and sum of exp (top-p alone)
//
// Noise is found only for tokens that can still win: its bits give a bound on it at once, and the logarithms are taken only if
// z + bound reaches the best of the warp so far, at first that of its threads' highest z. Skipping cannot change the best.
#include "node.cuh"
#include "../tree/top.cuh"

#ifndef FILTERS
#define FILTERS 1        // 0: no row of the batch has min-p, top-k or top-p
#endif

__device__ __forceinline__ u64 block_best(u64 key, u64* room) {
  key = warp_max(key);
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = key;
  __syncthreads();
  for (int w = 0; w < SEGMENT_THREADS / 32; w++) key = max(key, room[w]);
  return key;
}

extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, 2)
scan(STEP_ARGUMENTS, float2* raw, float2* heat, u64* best,
     u64* lists) {
#if FILTERS
  __shared__ TopWork<PER> work;
#endif
  __shared__ float room[SEGMENT_THREADS / 32];
  __shared__ u64 keys[SEGMENT_THREADS / 32];
  __shared__ int path[LONGEST];
  __shared__ Node a;
  const Step step = STEP;
  const int m = blockIdx.y, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if (!is_live(step, m)) return;
  for (int s = blockIdx.x; s < segments; s += gridDim.x) {
    Eight<WIDE != 0> held[CHUNKS];                       // the logits travel while the node's parameters are looked up
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int at = chunk_token(s, i);
      held[i] = at < V ? fetch_logits<WIDE != 0>(logits, m * stride + at) : no_logits<WIDE != 0>();
    }
    if (s == (int)blockIdx.x) prepare(a, step, m, path);
    else __syncthreads();                                // shared memory is free again
    const long long part = (long long)m * segments + s;
    float v[PER];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      float x[8];
      logits_of<WIDE != 0>(x, held[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) v[i * 8 + e] = x[e];
    }
    float most, peak = 0.f;                              // highest of this thread, and once it is known of the block
    auto highest = [&]() {
      most = v[0];
#pragma unroll
      for (int j = 1; j < PER; j++) most = fmaxf(most, v[j]);
    };
    auto sums = [&]() {
      peak = block_max(most, room);
      const float sum = block_exp_sum(v, peak, room);
      return make_float2(peak, sum);                     // the sum in thread 0
    };
    highest();
    float2 found = make_float2(0.f, 0.f);
    if (logprobs) {
      found = sums();
      if (tid == 0) raw[part] = found;
    }
    if (a.adjusted) {
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const int at = chunk_token(s, i);
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = v[i * 8 + e];
        if (at < V) adjust(x, step, a, at, path);
#pragma unroll
        for (int e = 0; e < 8; e++) v[i * 8 + e] = x[e];
      }
      highest();
    }
#if FILTERS
    if (a.filtered) {
      if (a.top_p < 1.f) {
        if (a.adjusted || !logprobs) found = sums();
        if (tid == 0) heat[part] = found;
      }
      segment_top(work, v, s);
      if (tid < TOP) lists[part * TOP + tid] = work.top[tid];
      continue;
    }
#endif
    auto first = [&]() {                                 // of the thread's highest ones: the lowest id
      int which = PER - 1;
#pragma unroll
      for (int j = PER - 2; j >= 0; j--) if (v[j] == most) which = j;
      return token_of(s, which);
    };
    u64 mine;
    if (!a.hot) {
      if (a.adjusted || !logprobs) peak = block_max(most, room);
      mine = most == peak ? rank_key(most, first()) : 0;
    } else {
      mine = drawn_key(a, most, first());
      float least = key_value((u64)warp_max_u32((u32)(mine >> 32)) << 32);     // the warp's best so far
#pragma unroll
      for (int q = 0; q < PER / 4; q++) {
        const Bits bits = philox((u32)token_of(s, 4 * q) >> 2, a.position, a.seed);
        bool some = false;
#pragma unroll
        for (int e = 0; e < 4; e++) some |= add_rn(v[4 * q + e], gumbel_bound(bits.word[e])) >= least;
        if (!__ballot_sync(ALL_LANES, some)) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (add_rn(v[4 * q + e], gumbel_bound(bits.word[e])) >= least)
            mine = max(mine, rank_key(add_rn(v[4 * q + e], gumbel(bits.word[e])), token_of(s, 4 * q) + e));
        }
        const u32 high = warp_max_u32((u32)(mine >> 32));
        least = key_value((u64)high << 32);
      }
    }
    const u64 key = block_best(mine, keys);
    if (tid == 0) best[part] = key;
  }
}
