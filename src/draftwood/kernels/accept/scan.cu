// Reads every verified node's logits once: grid (S, M), a block per segment of 8192 tokens.
//
//   raw [M][S]       largest raw logit and sum of exp, for the log-probability (if step.logprobs)
//   best [M][S]      rows without a filter: key of the segment's choice, argmax of z + gumbel (greedy rows: of z)
//   lists [M][S][64] rows with a filter: the segment's 64 highest z; heat [M][S]: largest z and sum of exp (top-p alone)
//
// Noise is found only for tokens that can still win: its bits give a bound on it at once, and the logarithms are taken only if
// z + bound reaches the best of the warp so far, at first that of its threads' highest z. Skipping cannot change the best.
#include "node.cuh"
#include "../tree/top.cuh"

__device__ __forceinline__ u64 block_best(u64 key, u64* room) {
  key = warp_max(key);
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = key;
  __syncthreads();
  for (int w = 0; w < SEGMENT_THREADS / 32; w++) key = max(key, room[w]);
  return key;
}

extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, 2)
scan(const void* logits, const long long* rows, const long long* nodes, const int* live, const float* numbers, const int* top_k,
     const long long* seeds, const long long* lengths, const long long* tokens, const long long* parents, const long long* depths,
     const unsigned char* forced, const int* bias_ptr, const int* bias_ids, const float* bias_values, const int* history,
     const int* history_rows, long long stride, int N, int V, int segments, int logprobs, float2* raw, float2* heat, u64* best,
     u64* lists) {
  __shared__ TopWork<PER> work;
  __shared__ float room[SEGMENT_THREADS / 32];
  __shared__ u64 keys[SEGMENT_THREADS / 32];
  __shared__ int path[LONGEST];
  const Step step = {logits, rows, nodes, live, numbers, top_k, seeds, lengths, tokens, parents, depths, forced, bias_ptr, bias_ids,
                     bias_values, history, history_rows, stride, N, V, segments, logprobs};
  const int s = blockIdx.x, m = blockIdx.y, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  Node a;
  if (!prepare(a, step, m, path)) return;
  const long long part = (long long)m * segments + s;
  float v[PER];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = chunk_token(s, i);
    float x[8];
    if (at < V) load_raw(x, step, a, at);
#pragma unroll
    for (int e = 0; e < 8; e++) v[i * 8 + e] = at < V ? x[e] : minus_infinity();
  }
  auto sums = [&](float2* out) {
    float most = v[0];
#pragma unroll
    for (int j = 1; j < PER; j++) most = fmaxf(most, v[j]);
    const float peak = block_max(most, room), sum = block_exp_sum(v, peak, room);
    if (tid == 0) out[part] = make_float2(peak, sum);
  };
  if (logprobs) sums(raw);
  if (a.bias_from < a.bias_to || a.penalised || (a.hot && a.temperature != 1.f)) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int at = chunk_token(s, i);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; e++) x[e] = v[i * 8 + e];
      if (at < V) adjust(x, a, at, bias_ids, bias_values, path);
#pragma unroll
      for (int e = 0; e < 8; e++) v[i * 8 + e] = x[e];
    }
  }
  if (a.filtered) {
    if (a.top_p < 1.f) sums(heat);
    segment_top(work, v, s);
    if (tid < TOP) lists[part * TOP + tid] = work.top[tid];
    return;
  }
  u64 mine = 0;
  if (!a.hot) {
#pragma unroll
    for (int j = 0; j < PER; j++) mine = max(mine, rank_key(v[j], token_of(s, j)));
  } else {
    float most = v[0];
    int which = 0;
#pragma unroll
    for (int j = 1; j < PER; j++) if (v[j] > most) { most = v[j]; which = j; }
    mine = drawn_key(a, most, token_of(s, which));
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
