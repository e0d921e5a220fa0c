// The 64 highest keys of what a block reads, one segment after another. Keys are distinct, except 0, which means nothing.
//
// A bound that at least 64 keys reach lets nearly all tokens go by one comparison of values. At first it is the 64th highest of 128
// groups' highest values; as the list of what reached it grows, the same of the list. Ranking is quadratic, so only the few keys
// that reach the last bound are ranked, at the end. What the bound is and the order of the list change nothing: ranks among
// distinct keys are what they are.
#pragma once
#include "segment.cuh"

constexpr int TOP = 64, GROUPS = 128, SHARE = SEGMENT_THREADS / GROUPS;
constexpr int MOST_KEYS = TOP + SEGMENT_THREADS, MANY_KEYS = 384;              // room of the list; it is cut above MANY_KEYS
constexpr int MORE_KEYS = 96;                                                  // more in the list: the bound is found anew
constexpr float LOWEST = -3.4028235e38f;                                       // above -inf

struct Running {
  alignas(16) u64 list[MOST_KEYS];
  u64 top[TOP];                                        // after `cut`: the highest of the list, descending, then zeros
  alignas(16) u32 maxima[SEGMENT_THREADS], group[GROUPS];
  u32 bound, count;                                    // bound: order of a value, 0: none yet
};

__device__ __forceinline__ void begin(Running& run) { if (threadIdx.x == 0) run.bound = run.count = 0; }
__device__ __forceinline__ float least_of(u32 bound) { return bound > 1 ? key_value((u64)bound << 32) : LOWEST; }

// mine: the order of a value that this thread's keys reach (1 or less: none do). run.bound: one that at least 64 keys reach, 1 if
// fewer than 64 groups of threads have any. All threads of the block call it; it ends with a barrier.
__device__ __noinline__ void find_bound(Running& run, u32 mine) {
  const int tid = threadIdx.x;
  run.maxima[tid] = mine;
  if (tid == 0) run.bound = 1;
  __syncthreads();
  if (tid < GROUPS) {
    u32 most = run.maxima[tid];
#pragma unroll
    for (int k = 1; k < SHARE; k++) most = max(most, run.maxima[tid + k * GROUPS]);
    run.group[tid] = most;
  }
  __syncthreads();
  const u32 g = run.group[tid / SHARE];
  int reach = 0;                                       // groups that reach this one's; four threads share it
#pragma unroll
  for (int i = 4 * (tid % SHARE); i < GROUPS; i += 4 * SHARE) {
    const uint4 some = *reinterpret_cast<const uint4*>(run.group + i);
    reach += (some.x >= g) + (some.y >= g) + (some.z >= g) + (some.w >= g);
  }
  static_assert(SHARE == 4, "as many threads as a group has");
  reach += __shfl_xor_sync(ALL_LANES, reach, 1);
  reach += __shfl_xor_sync(ALL_LANES, reach, 2);
  const u32 best = warp_max_u32(reach >= TOP ? g : 1);
  if ((tid & 31) == 0) raise(&run.bound, best);
  __syncthreads();
}
// The bound by the list, of which there are at least 128. All threads; it ends with a barrier.
__device__ __forceinline__ void tighten(Running& run, int n) {
  const int tid = threadIdx.x;
  u64 key = tid < n ? run.list[tid] : 0;
  if (tid + SEGMENT_THREADS < n) key = max(key, run.list[tid + SEGMENT_THREADS]);
  find_bound(run, (u32)(key >> 32));
}
__device__ __forceinline__ void put(Running& run, u64 key) {
  const u32 at = count_up(&run.count, 1);
  if (at < MOST_KEYS) run.list[at] = key;
}
// Rank all keys of the list and keep the 64 highest: run.top, the list's beginning, and the bound if there are as many. All
// threads.
__device__ __noinline__ void cut(Running& run) {
  const int tid = threadIdx.x, n = run.count;
  const int share = n <= 128 ? 4 : n <= 256 ? 2 : 1, part = tid & (share - 1);     // threads of a key
  if (tid < TOP) run.top[tid] = 0;
  __syncthreads();
  for (int from = 0; from < n; from += SEGMENT_THREADS / share) {
    const int e = from + tid / share;
    const u64 key = e < n ? run.list[e] : 0;
    int rank = 0;
#pragma unroll 4
    for (int i = 2 * part; i < n - 1; i += 2 * share) {                        // two in one load
      alignas(16) u64 pair[2];
      *reinterpret_cast<uint4*>(pair) = *reinterpret_cast<const uint4*>(run.list + i);
      rank += (pair[0] > key) + (pair[1] > key);
    }
    if ((n & 1) && part == 0) rank += run.list[n - 1] > key;
#pragma unroll
    for (int d = 1; d < 4; d <<= 1) {
      const int other = __shfl_xor_sync(ALL_LANES, rank, d);
      rank += d < share ? other : 0;
    }
    if (key && part == 0 && rank < TOP) run.top[rank] = key;
  }
  __syncthreads();
  if (tid < TOP) run.list[tid] = run.top[tid];
  if (tid == 0) {
    run.count = min(n, TOP);
    if (n >= TOP) run.bound = max(run.bound, (u32)(run.top[TOP - 1] >> 32));
  }
  __syncthreads();
}

// run.top: the 64 highest of the list. All threads; nobody puts in more.
__device__ __noinline__ void finish(Running& run) {
  const int tid = threadIdx.x, n = run.count;
  if (n > GROUPS) {
    tighten(run, n);
    const u64 key = tid < n ? run.list[tid] : 0, other = tid + SEGMENT_THREADS < n ? run.list[tid + SEGMENT_THREADS] : 0;
    __syncthreads();
    if (tid == 0) run.count = 0;
    __syncthreads();
    if ((u32)(key >> 32) >= run.bound) put(run, key);
    if ((u32)(other >> 32) >= run.bound) put(run, other);
    __syncthreads();
  }
  cut(run);
}
// Where a segment has more keys than the list holds (ties): one key a thread at a time. Rare.
__device__ __noinline__ void put_and_cut(Running& run, u64 key) {
  const u64 last = run.count < TOP ? 0 : run.list[TOP - 1];
  __syncthreads();
  if (key > last) put(run, key);
  __syncthreads();
  cut(run);
}

// Puts the keys of a segment's values v that reach the bound. highest: of v.
__device__ __forceinline__ void put_values(Running& run, const float (&v)[PER], float highest, int s) {
  const float least = least_of(run.bound);
  if (!(highest >= least)) return;
#pragma unroll
  for (int q = 0; q < PER / 4; q++) {
    if (!(fmaxf(fmaxf(v[4 * q], v[4 * q + 1]), fmaxf(v[4 * q + 2], v[4 * q + 3])) >= least)) continue;
#pragma unroll
    for (int e = 0; e < 4; e++) if (v[4 * q + e] >= least) put(run, rank_key(v[4 * q + e], token_of(s, 4 * q + e)));
  }
}
// Keys of a segment's values v that count for the 64 highest. highest: of v. All threads; it ends with a barrier.
__device__ __forceinline__ void take_values(Running& run, const float (&v)[PER], float highest, int s) {
  const u32 known = run.bound, before = run.count;
  __syncthreads();
  if (known <= 1) find_bound(run, (u32)(rank_key(highest, 0) >> 32));
  put_values(run, v, highest, s);
  __syncthreads();
  const u32 n = run.count;
  if (n <= MANY_KEYS) return;
  if (n > MOST_KEYS) {
    __syncthreads();
    if (threadIdx.x == 0) run.count = before;
    __syncthreads();
    cut(run);
#pragma unroll
    for (int j = 0; j < PER; j++) put_and_cut(run, rank_key(v[j], token_of(s, j)));
  } else {
    cut(run);
  }
}
// The same of keys that the threads have, in place of a segment. All threads.
template <int N>
__device__ __forceinline__ void take_keys(Running& run, const u64 (&keys)[N]) {
  u32 mine = 0;
#pragma unroll
  for (int j = 0; j < N; j++) mine = max(mine, (u32)(keys[j] >> 32));
  find_bound(run, mine);
  const u32 bound = run.bound;
  if (mine >= bound) {
#pragma unroll
    for (int j = 0; j < N; j++) if ((u32)(keys[j] >> 32) >= bound) put(run, keys[j]);
  }
  __syncthreads();
  if (run.count > MOST_KEYS) {
    __syncthreads();
    if (threadIdx.x == 0) run.count = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) put_and_cut(run, keys[j]);
  }
}
