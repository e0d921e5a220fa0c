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

// Put this thread's keys from `bound` on into the list, if there is room for them.
template <int PER, class Key>
__device__ __forceinline__ void collect(TopWork<PER>& work, Key key, u64 bound) {
  u32 n = 0;
#pragma unroll
  for (int j = 0; j < PER; j++) n += key(j) >= bound;
  if (!n) return;
  u32 at = count_up(&work.count, n);
  if (at + n > TopWork<PER>::CAPACITY) return;
#pragma unroll
  for (int j = 0; j < PER; j++) if (key(j) >= bound) work.list[at++] = key(j);
}

// key(j), j < KEYS: this thread's keys; returns the highest's value part. work.bound: a value part that at least 64 keys reach (1: fewer
// than 64 groups of threads have a key). All threads of the block call it; it ends with a barrier.
template <int KEYS, int PER, class Key>
__device__ __forceinline__ u32 block_bound(TopWork<PER>& work, Key key) {
  const int tid = threadIdx.x;
  u32 mine = 0;
#pragma unroll
  for (int j = 0; j < KEYS; j++) mine = max(mine, (u32)(key(j) >> 32));
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
  return mine;
}

// work.top is complete after the last barrier. All threads of the block call it.
template <int PER, class Key>
__device__ __forceinline__ void block_top(TopWork<PER>& work, Key key) {
  const int tid = threadIdx.x;
  if (tid < TOP) work.top[tid] = 0;
  const u32 mine = block_bound<PER>(work, key);
  const u32 bound = work.bound;
  if (mine >= bound) collect<PER>(work, key, (u64)bound << 32);
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
    collect<PER>(work, key, work.bound_key);
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

// The 64 best of a segment's values.
__device__ __forceinline__ void segment_top(TopWork<PER>& work, const float (&v)[PER], int s) {
  u32 order[PER];                                      // takes the place of v in the registers
#pragma unroll
  for (int j = 0; j < PER; j++) order[j] = v[j] > minus_infinity() ? float_order(add_rn(v[j], 0.f)) : 0;
  block_top<PER>(work, [&](int j) { return order[j] ? (u64)order[j] << 32 | (u32)~token_of(s, j) : 0; });
}
