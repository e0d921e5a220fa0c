// Choices that `decide` left open (token -1): filters that reach deeper than the candidate lists. A block per node; the others leave
// alone. At most 16 passes over the node's logits: 4 each find the last value that min-p, top-k and top-p keep, 8 bits at a time, 3 find
// the last id among its ties, and one chooses. Counts and weights are integers: atomic sums of them have no order.
#include "node.cuh"

#ifndef THREADS
#define THREADS 1024
#endif
constexpr int BINS = 256, COPIES = 8, TOP = 64;        // copies: lanes that hit one bin seldom meet

struct Work {
  u32 count[BINS][COPIES], low[BINS][COPIES], high[BINS][COPIES];
  u64 weight[BINS];
  u32 total[BINS];
  u64 room[THREADS / 32];
  u64 before, weight_here;
  u32 bin, passed, here;
};

// Where keeping ends: all above `order`, and of those equal to it the `ties` first by id; count of them; weight of all that is kept.
struct Cut { u32 order, ties, count; u64 weight; };

struct Scan {                                          // one pass over the node
  const Step& step;
  const Node& a;
  const int* path;
  float bound;
  template <class Each> __device__ __forceinline__ void operator()(Each each) const {
    for (int at = threadIdx.x * 8; at < step.V; at += THREADS * 8) {
      float x[8];
      load_raw(x, step, a, at);
      adjust(x, a, at, path);
#pragma unroll
      for (int e = 0; e < 8; e++) if (x[e] > minus_infinity() && x[e] >= bound) each(add_rn(x[e], 0.f), at + e);
    }
  }
};

__device__ __forceinline__ void clear(Work& w) {
  __syncthreads();
  for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) (&w.count[0][0])[i] = (&w.low[0][0])[i] = (&w.high[0][0])[i] = 0;
  __syncthreads();
}
__device__ __forceinline__ void add_copies(Work& w) {
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS) {
    u32 count = 0;
    u64 weight = 0;
    for (int c = 0; c < COPIES; c++) { count += w.count[b][c]; weight += (u64)w.high[b][c] << 32 | w.low[b][c]; }
    w.total[b] = count;
    w.weight[b] = weight;
  }
  __syncthreads();
}

// The first `most` tokens in order, or, with a target, those before which the weight is below it. There is at least one token.
__device__ __forceinline__ Cut find_cut(Work& w, const Scan& scan, float peak, u32 most, double target) {
  u32 prefix = 0, passed = 0, here = 0;
  u64 before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    clear(w);
    const int copy = threadIdx.x & (COPIES - 1);
    scan([&](float z, int) {
      const u32 order = float_order(z);
      if (shift < 24 && order >> (shift + 8) != prefix) return;
      const int bin = order >> shift & (BINS - 1);
      const u64 weight = weight_of(z, peak);
      count_up(&w.count[bin][copy], 1);
      const u32 low = (u32)weight, was = count_up(&w.low[bin][copy], low);
      count_up(&w.high[bin][copy], (u32)(weight >> 32) + (was + low < low));
    });
    add_copies(w);
    if (threadIdx.x == 0) {                            // the bin of the last token kept, highest bins first
      u32 count = passed;
      u64 weight = before;
      for (int b = BINS - 1; b >= 0; b--) {
        if (!w.total[b]) continue;
        if (count != passed && (count >= most || !(to_double(weight) < target))) break;
        w.bin = b; w.passed = count; w.before = weight; w.here = w.total[b]; w.weight_here = w.weight[b];
        count += w.total[b];
        weight += w.weight[b];
      }
    }
    __syncthreads();
    prefix = prefix << 8 | w.bin;
    passed = w.passed;
    before = w.before;
    here = w.here;
  }
  const u64 each = here ? w.weight_here / here : 0;    // equal values have equal weights
  u32 low = 1, high = here;                            // of the ties, as many as have room: at least one
  while (low < high) {
    const u32 middle = low + (high - low + 1) / 2;     // is the middle-th kept?
    if (to_double(before + (middle - 1) * each) < target) low = middle; else high = middle - 1;
  }
  const u32 ties = min(low, most - passed);
  return {prefix, ties, here, before + ties * each};
}

// The id of the last of the first `ties` tokens with this order.
__device__ __forceinline__ int last_tie(Work& w, const Scan& scan, u32 order, u32 ties) {
  u32 prefix = 0;
  for (int shift = 16; shift >= 0; shift -= 8) {
    clear(w);
    scan([&](float z, int id) {
      if (float_order(z) != order || (shift < 16 && (u32)id >> (shift + 8) != prefix)) return;
      count_up(&w.count[(u32)id >> shift & (BINS - 1)][threadIdx.x & (COPIES - 1)], 1);
    });
    add_copies(w);
    if (threadIdx.x == 0) {
      u32 left = ties;
      for (int b = 0; b < BINS; b++) {
        w.bin = b; w.here = left;
        if (w.total[b] >= left) break;
        left -= w.total[b];
      }
    }
    __syncthreads();
    prefix = prefix << 8 | w.bin;
    ties = w.here;
  }
  return (int)prefix;
}

// Choose at node m. All threads of the block call it.
__device__ __forceinline__ void settle_node(Work& w, int* path, const Step& step, int m, const float2* raw, const float2* heat,
                                            const u64* lists, long long* choices, float* scores, const int* where, int* next) {
  __shared__ Node a;
  const int lane = threadIdx.x & 31, segments = step.segments;
  if (!prepare(a, step, m, path)) return;
  u64 key = lane < segments ? lists[(long long)m * segments * TOP + lane] : 0;
  const float peak = key_value(warp_max(key));         // every warp finds it; a node left open has one
  const Scan scan = {step, a, path, least_kept(a.min_p, peak)};
  const bool ranked = a.top_k > 0 && a.top_k < step.V;
  const double endless = 1e300;
  Cut cut = {0, 0xffffffffu, 0, 0};                    // min-p alone: all that `scan` meets
  if (ranked) cut = find_cut(w, scan, peak, a.top_k, endless);
  if (a.top_p < 1.f) {
    u64 sum = cut.weight;
    if (!ranked && a.min_p > 0.f) sum = find_cut(w, scan, peak, 0xffffffffu, endless).weight;     // what min-p leaves
    const double total = ranked || a.min_p > 0.f ? to_double(sum) : whole_weight(heat + (long long)m * segments, segments, peak);
    const Cut nucleus = find_cut(w, scan, peak, 0xffffffffu, times((double)a.top_p, total));
    if (!ranked || nucleus.order > cut.order || (nucleus.order == cut.order && nucleus.ties < cut.ties)) cut = nucleus;
  }
  const int last = cut.ties < cut.count ? last_tie(w, scan, cut.order, cut.ties) : 0x7fffffff;
  key = 0;
  float least = minus_infinity();
  scan([&](float z, int id) {
    const u32 order = float_order(z);
    if (order < cut.order || (order == cut.order && id > last)) return;
    if (add_rn(z, 23.f) < least) return;               // no noise is that high
    const u64 mine = drawn_key(a, z, id);
    if (mine > key) { key = mine; least = key_value(mine); }
  });
  key = warp_max(key);
  __syncthreads();
  if (lane == 0) w.room[threadIdx.x >> 5] = key;
  __syncthreads();
  for (int i = 0; i < THREADS / 32; i++) key = max(key, w.room[i]);
  if (threadIdx.x >= 32) return;
  const int token = key ? (int)choice_id(key) : 0;
  const float norm = step.logprobs ? log_sum_exp(raw + (long long)m * segments, segments) : 0.f;
  if (lane == 0) {
    choices[m] = token;
    if (step.logprobs) scores[m] = sub_rn(raw_logit(step, a, token), norm);
  }
  if (next) {
    const int child = next_of(step, a, where, token);
    if (lane == 0) *next = child;
  }
}

// Grid: any; block b takes nodes b, b + grid, ... of M, or with fronts the nodes of rows b, b + grid, ... of M. Arguments as for `decide`.
extern "C" __global__ void __launch_bounds__(THREADS)
settle(STEP_ARGUMENTS, const float2* raw, const float2* heat, const u64* lists, long long* choices, float* scores, const int* where,
       const int* front, int* next, int M) {
  __shared__ Work w;
  __shared__ int path[LONGEST];
  const Step step = STEP;
  pdl_wait();
  pdl_go();
  for (int i = blockIdx.x; i < M; i += gridDim.x) {
    const int m = front ? load_int(front + i) : i;
    if (m < 0 || !is_live(step, m) || load_long(choices + m) != -1) continue;
    __syncthreads();                                   // everybody has read the choice before one writes it
    settle_node(w, path, step, m, raw, heat, lists, choices, scores, where, front ? next + i : nullptr);
    __syncthreads();
  }
}
