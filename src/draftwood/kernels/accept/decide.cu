// The choice at each verified node from what `scan` left: a block per node, or a warp if no row of the batch has a filter.
//
// Rows without a filter: the best of the segments. With filters: the first 64 of all candidates, in order, usually tell what min-p,
// top-k and top-p keep; if not, all candidates down to the highest end of a full list do (they are exact that far); if not, the
// node is left to `settle` (token -1). Weights are integers (node.cuh), so it does not matter which of the three decides.
#include "node.cuh"
#include "../tree/running.cuh"

#ifndef FILTERS
#define FILTERS 1        // 0: no row of the batch has min-p, top-k or top-p
#endif
constexpr int ALL = 32 * TOP, LISTS = ALL / SEGMENT_THREADS, NODES_OF_BLOCK = 4;       // the last: without filters

// Sum over the block, in every thread.
template <class T>
__device__ __forceinline__ T block_sum(T v, T* room) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(ALL_LANES, v, d);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  v = room[0];
#pragma unroll
  for (int w = 1; w < SEGMENT_THREADS / 32; w++) v += room[w];
  return v;
}
// Sum over the threads before this one.
__device__ __forceinline__ u64 block_before(u64 v, u64* room) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = v;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u64 other = __shfl_up_sync(ALL_LANES, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) room[warp] = sum;
  __syncthreads();
  u64 before = sum - v;
  for (int w = 0; w < warp; w++) before += room[w];
  return before;
}

// How many of sorted[0..n) the filters keep, or -1 when that depends on what comes after them. complete: nothing does.
__device__ __forceinline__ int kept_of(const Node& a, const u64* sorted, int n, bool complete, int V, const float2* heat,
                                       int segments, u64* room, int* small) {
  const int first = threadIdx.x * LISTS;
  const float peak = key_value(sorted[0]), bound = least_kept(a.min_p, peak);
  int mine = 0;
  for (int i = first; i < min(first + LISTS, n); i++) mine += key_value(sorted[i]) >= bound;
  const int above = block_sum(mine, small);
  const bool ends = complete || above < n;             // where the tokens min-p leaves end is known
  const int limit = a.top_k > 0 ? min(a.top_k, V) : V, inside = min(limit, above);
  if (!ends && limit > n && (limit < V || a.top_p >= 1.f || a.min_p > 0.f)) return -1;
  if (!(a.top_p < 1.f)) return inside;
  u64 weights[LISTS], sum = 0;
#pragma unroll
  for (int k = 0; k < LISTS; k++) {
    weights[k] = first + k < inside ? weight_of(key_value(sorted[first + k]), peak) : 0;
    sum += weights[k];
  }
  u64 before = block_before(sum, room);
  const u64 all = block_sum(sum, room);
  const double total = limit < V || a.min_p > 0.f ? to_double(all) : whole_weight(heat, segments, peak);
  const double target = times((double)a.top_p, total);
  mine = 0;
#pragma unroll
  for (int k = 0; k < LISTS; k++) {
    mine += first + k < inside && to_double(before) < target;
    before += weights[k];
  }
  const int nucleus = block_sum(mine, small);
  if (!ends && limit > n && nucleus == n) return -1;
  return min(inside, max(nucleus, 1));
}

// Sort ALL keys of shared memory, descending (bitonic).
__device__ __forceinline__ void sort_all(u64* keys) {
  for (int size = 2; size <= ALL; size <<= 1)
    for (int by = size >> 1; by > 0; by >>= 1) {
      __syncthreads();
      for (int i = threadIdx.x; i < ALL / 2; i += SEGMENT_THREADS) {
        const int low = (i & ~(by - 1)) * 2 + (i & (by - 1)), high = low + by;
        const u64 a = keys[low], b = keys[high];
        if ((a < b) == !(low & size)) { keys[low] = b; keys[high] = a; }
      }
    }
  __syncthreads();
}

// What a node's choice changes. A warp. next: null without fronts.
struct Results { long long* choices; float* scores; int* where; };
__device__ __forceinline__ void conclude(const Step& step, int m, int row, int node, u64 key, bool settled, const float2* raw,
                                         const Results& to, int* next) {
  const int lane = threadIdx.x & 31, token = key ? (int)choice_id(key) : 0;    // nothing above -inf: token 0
  if (settled && step.logprobs) {
    const long long at = m * step.stride + token;
    const float logit = WIDE ? ((const float*)step.logits)[at] : __bfloat162float(((const bf16*)step.logits)[at]);
    const float norm = log_sum_exp(raw + (long long)m * step.segments, step.segments);
    if (lane == 0) to.scores[m] = sub_rn(fmaxf(logit, minus_infinity()), norm);
  }
  if (lane == 0) {
    to.choices[m] = settled ? token : -1;
    to.where[(long long)row * step.N + node] = m;
  }
  if (next && settled) {
    const int child = next_of({step.parents, step.tokens, step.rows, step.nodes, to.where, step.live, step.N, row, node}, token);
    if (lane == 0) *next = child;
  }
}

// Grid (count), or without filters 4 of them a block. choices, scores [M]; where [R][N]: m of each verified node. With fronts
// (count = R; null: all nodes, count = M): row r's node is front[r], -1: none; next[r] becomes the verified child that holds the
// choice, or -1.
extern "C" __global__ void __launch_bounds__(FILTERS ? SEGMENT_THREADS : 32 * NODES_OF_BLOCK)
decide(STEP_ARGUMENTS, const float2* raw, const float2* heat,
       const u64* best, const u64* lists, long long* choices, float* scores, int* where, const int* front, int* next, int count) {
  const Results to = {choices, scores, where};
#if !FILTERS
  const Step step = STEP;
  const int i = blockIdx.x * NODES_OF_BLOCK + threadIdx.x / 32, lane = threadIdx.x & 31;
  pdl_wait();
  pdl_go();
  if (i >= count) return;
  const int m = front ? load_int(front + i) : i;
  if (front && lane == 0) next[i] = -1;
  if (m < 0) return;
  const long long row = rows[m], node = nodes[m];      // all travel together
  const u64 key = lane < segments ? best[(long long)m * segments + lane] : 0;
  if (is_live(step, m)) conclude(step, m, (int)row, (int)node, warp_max_key(key), true, raw, to, front ? next + i : nullptr);
#else
  __shared__ Running run;
  __shared__ u64 all[ALL], room[SEGMENT_THREADS / 32];
  __shared__ int small[SEGMENT_THREADS / 32], path[LONGEST];
  __shared__ Node a;
  const Step step = STEP;
  const int tid = threadIdx.x, lane = tid & 31;
  pdl_wait();
  pdl_go();
  const int m = front ? load_int(front + blockIdx.x) : blockIdx.x;
  if (front && tid == 0) next[blockIdx.x] = -1;
  if (m < 0 || !prepare(a, step, m, path)) return;
  u64 key = 0;
  bool settled = true;
  if (!a.filtered) {
    if (tid >= 32) return;
    if (lane < segments) key = best[(long long)m * segments + lane];
    key = warp_max_key(key);
  } else {
    const u64* mine = lists + (long long)m * segments * TOP;
    u64 some[LISTS], end = 0;                          // end: the highest last key of a full list
#pragma unroll
    for (int j = 0; j < LISTS; j++) {
      const int i = j * SEGMENT_THREADS + tid;
      some[j] = i < segments * TOP ? mine[i] : 0;
      if (i >= (TOP - 1) * segments) end = max(end, some[j]);
    }
    begin(run);
    __syncthreads();
    take_keys(run, some);
    cut(run);
    int held = 0;
#pragma unroll
    for (int j = 0; j < LISTS; j++) held += some[j] != 0;
    held = block_sum(held, small);
    int n = min(held, TOP), kept = 0;
    const u64* sorted = run.top;
    if (held) {
      kept = kept_of(a, sorted, n, held < TOP, V, heat + (long long)m * segments, segments, room, small);
      if (kept < 0) {                                  // the same in all threads
        end = warp_max(end);
        __syncthreads();
        if (lane == 0) room[tid >> 5] = end;
#pragma unroll
        for (int j = 0; j < LISTS; j++) all[j * SEGMENT_THREADS + tid] = some[j];
        __syncthreads();
        for (int w = 0; w < SEGMENT_THREADS / 32; w++) end = max(end, room[w]);
        sort_all(all);
        int reach = 0;
#pragma unroll
        for (int j = 0; j < LISTS; j++) reach += some[j] != 0 && some[j] >= end;
        n = block_sum(reach, small);
        sorted = all;
        kept = kept_of(a, sorted, n, end == 0, V, heat + (long long)m * segments, segments, room, small);
      }
    }
    settled = kept >= 0;
    for (int i = tid; i < kept; i += SEGMENT_THREADS) key = max(key, drawn_key(a, key_value(sorted[i]), choice_id(sorted[i])));
    key = warp_max(key);
    __syncthreads();
    if (lane == 0) room[tid >> 5] = key;
    __syncthreads();
    for (int w = 0; w < SEGMENT_THREADS / 32; w++) key = max(key, room[w]);
    if (tid >= 32) return;
  }
  conclude(step, m, a.row, a.node, key, settled, raw, to, front ? next + blockIdx.x : nullptr);
#endif
}
