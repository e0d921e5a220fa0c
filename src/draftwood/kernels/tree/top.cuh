// The 64 highest keys of a block, exactly and in order. Keys are distinct, except 0, which means nothing.
//
// 1. Each group of threads (t, t + 128, ...) knows its highest key. The 64th highest of these 128 bounds the 64th of all from below.
// 2. Keys that reach the bound are collected: about 90 of 8192 for logits; their order in the list does not matter.
// 3. Each finds its rank by counting. Ranks are distinct, so the result has one form.
// Step 1 compares values alone, which is cheap; only if ties make step 2 overflow is it done again with whole keys.
#pragma once
#include "segment.cuh"

constexpr int TOP = 64, TOP_THREADS = SEGMENT_THREADS, GROUPS = 128, SHARE = TOP_THREADS / GROUPS;

template <int PER>
struct TopWork {
  static constexpr int CAPACITY = TOP * SHARE * PER;       // 64 groups hold no more
  static_assert(CAPACITY >= TOP_THREADS, "the list also holds a key per thread");
  alignas(16) u64 list[CAPACITY];
  u64 top[TOP];                                        // the result: descending, then zeros
  alignas(16) u32 maxima[TOP_THREADS], group[GROUPS];
  alignas(16) u64 group_key[GROUPS];
  u64 bound_key;
  u32 bound, count;
};

// Rank of g among the groups: higher ones, and equal ones before it.
template <class T>
__device__ __forceinline__ int rank_among(const T* groups, T g, int at) {
  constexpr int EACH = 16 / sizeof(T);                 // of them in one load
  int rank = 0;
#pragma unroll 8
  for (int i = 0; i < GROUPS; i += EACH) {
    alignas(16) T some[EACH];
    *reinterpret_cast<uint4*>(some) = *reinterpret_cast<const uint4*>(groups + i);
#pragma unroll
    for (int k = 0; k < EACH; k++) rank += some[k] > g || (some[k] == g && i + k < at);
  }
  return rank;
}

// Put this thread's keys j < PER that `reach` the bound into the list, if there is room for them.
template <int PER, class Key, class Reach>
__device__ __forceinline__ void collect(TopWork<PER>& work, Key key, Reach reach) {
  u32 n = 0;
#pragma unroll
  for (int j = 0; j < PER; j++) n += reach(j);
  if (!n) return;
  u32 at = count_up(&work.count, n);
  if (at + n > TopWork<PER>::CAPACITY) return;
#pragma unroll
  for (int j = 0; j < PER; j++) if (reach(j)) work.list[at++] = key(j);
}

// mine: the value part of this thread's highest key. work.bound: a value part that at least 64 keys reach (1: fewer than 64 groups of
// threads have a key). All threads of the block call it; it ends with a barrier.
template <int PER>
__device__ __forceinline__ void block_bound(TopWork<PER>& work, u32 mine) {
  const int tid = threadIdx.x;
  work.maxima[tid] = mine;
  if (tid == 0) { work.bound = 1; work.bound_key = 1; work.count = 0; }
  __syncthreads();
  if (tid < GROUPS) {
    u32 most = work.maxima[tid];
#pragma unroll
    for (int k = 1; k < SHARE; k++) most = max(most, work.maxima[tid + k * GROUPS]);
    work.group[tid] = most;
  }
  __syncthreads();
  if (tid < GROUPS) {
    const u32 g = work.group[tid];
    if (g && rank_among(work.group, g, tid) == TOP - 1) work.bound = g;
  }
  __syncthreads();
}

// work.top is complete after the last barrier. key(j), j < PER: this thread's keys; mine: the value part of the highest; reach(bound)
// returns a test of j: is the value part of key(j) at least the bound. All threads of the block call it.
template <int PER, class Key, class Reach>
__device__ __forceinline__ void block_top(TopWork<PER>& work, Key key, u32 mine, Reach reach) {
  const int tid = threadIdx.x;
  if (tid < TOP) work.top[tid] = 0;
  block_bound<PER>(work, mine);
  if (mine >= work.bound) collect<PER>(work, key, reach(work.bound));
  __syncthreads();
  if (work.count > TopWork<PER>::CAPACITY) {           // the same in all threads
    __syncthreads();
    u64 best = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) best = max(best, key(j));
    work.list[tid] = best;
    if (tid == 0) work.count = 0;
    __syncthreads();
    if (tid < GROUPS) {
      best = work.list[tid];
#pragma unroll
      for (int k = 1; k < SHARE; k++) best = max(best, work.list[tid + k * GROUPS]);
      work.group_key[tid] = best;
    }
    __syncthreads();
    if (tid < GROUPS) {
      const u64 g = work.group_key[tid];
      if (g && rank_among(work.group_key, g, tid) == TOP - 1) work.bound_key = g;
    }
    __syncthreads();
    const u64 bound = work.bound_key;
    collect<PER>(work, key, [&](int j) { return key(j) >= bound; });
    __syncthreads();
  }
  const int n = work.count;
  for (int e = tid; e < n; e += TOP_THREADS) {
    const u64 k = work.list[e];
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < n - 1; i += 2) {               // two in one load
      alignas(16) u64 pair[2];
      *reinterpret_cast<uint4*>(pair) = *reinterpret_cast<const uint4*>(work.list + i);
      rank += (pair[0] > k) + (pair[1] > k);
    }
    if (n & 1) rank += work.list[n - 1] > k;
    if (rank < TOP) work.top[rank] = k;
  }
  __syncthreads();
}

// The 64 best of keys.
template <int PER, class Key>
__device__ __forceinline__ void block_top(TopWork<PER>& work, Key key) {
  u32 mine = 0;
#pragma unroll
  for (int j = 0; j < PER; j++) mine = max(mine, (u32)(key(j) >> 32));
  block_top<PER>(work, key, mine, [&](u32 bound) { return [&key, bound](int j) { return (u32)(key(j) >> 32) >= bound; }; });
}
// The 64 best of a segment's values: keys are made for the few that reach the bound.
__device__ __forceinline__ void segment_top(TopWork<PER>& work, const float (&v)[PER], int s) {
  float most = v[0];
#pragma unroll
  for (int j = 1; j < PER; j++) most = fmaxf(most, v[j]);
  auto key = [&](int j) { return rank_key(v[j], token_of(s, j)); };
  block_top<PER>(work, key, (u32)(rank_key(most, 0) >> 32), [&](u32 bound) {
    const float least = bound > 1 ? key_value((u64)bound << 32) : -3.4028235e38f;                // lowest above -inf
    return [&v, least](int j) { return v[j] >= least; };
  });
}
