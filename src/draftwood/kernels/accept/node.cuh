// One verified node: its row's parameters, and its adjusted logits. ref.py says what they mean.
#pragma once
#include "../tree/segment.cuh"

#ifndef WIDE
#define WIDE 1           // 1: float32 logits, 0: bf16
#endif
constexpr float COLD = 1e-5f;
constexpr int LONGEST = 64;                            // nodes of a path below its root

// The step: parameters of rows [R], trees [R][N], verified nodes [M]. Null: nobody uses it.
struct Step {
  const void* logits;                                  // [M] rows of `stride` elements
  const long long *rows, *nodes;                       // [M]
  const int* live;                                     // how many of M are real, or null
  const float* numbers;                                // [R][8]: temperature, top p, min p, presence, frequency, repetition
  const int* top_k;
  const long long *seeds, *lengths;
  const long long *tokens, *parents, *depths;          // [R][N]
  const unsigned char* forced;
  const int* bias_ptr;                                 // [R + 1]
  const int* bias_ids;                                 // ascending in a row
  const float* bias_values;
  const int* history;                                  // [H][V]: 2 * times generated + (in the prompt)
  const int* history_rows;                             // [R]
  const int *floor_left, *floor_ptr, *floor_ids;       // [R], [R + 1]: ids (ascending) that nodes of depth < left may not choose
  const u32* mask;                                     // [L][words]: bit t of a line is set if token t is allowed
  const int* mask_lines;                               // [M]: a node's line, -1: everything is allowed
  long long stride;
  int words, N, V, segments, logprobs;
};
// The same as a kernel's arguments, and put together again.
#define STEP_ARGUMENTS \
  const void *logits, const long long *rows, const long long *nodes, const int *live, const float *numbers, const int *top_k, \
      const long long *seeds, const long long *lengths, const long long *tokens, const long long *parents, const long long *depths, \
      const unsigned char *forced, const int *bias_ptr, const int *bias_ids, const float *bias_values, const int *history, \
      const int *history_rows, const int *floor_left, const int *floor_ptr, const int *floor_ids, const u32 *mask, \
      const int *mask_lines, long long stride, int words, int N, int V, int segments, int logprobs
#define STEP {logits, rows, nodes, live, numbers, top_k, seeds, lengths, tokens, parents, depths, forced, bias_ptr, bias_ids, \
              bias_values, history, history_rows, floor_left, floor_ptr, floor_ids, mask, mask_lines, stride, words, N, V, segments, \
              logprobs}

struct Node {
  long long logits;                                    // offset of its row
  const int *history, *bias_ids, *floor_ids;
  const float* bias_values;
  const u32* mask;
  float temperature, top_p, min_p, presence, frequency, repetition;
  u64 seed;
  u32 position;                                        // of the token it chooses
  int row, node, top_k, bias_from, bias_to, floor_from, floor_to, path;      // path: tokens in the shared list
  bool hot, filtered, penalised, special, adjusted;    // adjusted: its logits are not the raw ones; special: for more than temperature
};

__device__ __forceinline__ bool is_live(const Step& step, int m) { return !step.live || m < load_int(step.live); }
// Fills a and path (LONGEST), which the block shares, unless node m is padding: then false. All threads call it; behind the
// barrier inside everybody sees them.
__device__ __forceinline__ bool prepare(Node& a, const Step& step, int m, int* path) {
  if (!is_live(step, m)) return false;
  if (threadIdx.x == 0) {
    const int r = a.row = (int)step.rows[m], n = a.node = (int)step.nodes[m];
    const long long at = (long long)r * step.N;
    const float4 p = *reinterpret_cast<const float4*>(step.numbers + r * 8);
    const float2 q = *reinterpret_cast<const float2*>(step.numbers + r * 8 + 4);
    const int top_k = step.top_k[r], depth = (int)step.depths[at + n], line = step.mask ? step.mask_lines[m] : -1;
    const int bias_from = step.bias_ptr ? step.bias_ptr[r] : 0, bias_to = step.bias_ptr ? step.bias_ptr[r + 1] : 0;
    const int history_row = step.history ? step.history_rows[r] : -1;
    const bool chain = step.forced && step.forced[r];  // of known tokens: they are in the history, and one choice follows them all
    const bool early = step.floor_left && (chain ? 0 : depth) < step.floor_left[r];
    a.seed = (u64)step.seeds[r];
    a.position = (u32)(step.lengths[r] + depth + 1);
    a.logits = m * step.stride;
    a.temperature = p.x; a.top_p = p.y; a.min_p = p.z; a.presence = p.w; a.frequency = q.x; a.repetition = q.y;
    a.top_k = top_k;
    a.hot = p.x > COLD;
    a.filtered = a.hot && (p.z > 0.f || (top_k > 0 && top_k < step.V) || p.y < 1.f);
    a.penalised = p.w != 0.f || q.x != 0.f || q.y != 1.f;
    a.bias_from = bias_from; a.bias_to = bias_to;
    a.bias_ids = step.bias_ids; a.bias_values = step.bias_values; a.floor_ids = step.floor_ids;
    a.floor_from = early ? step.floor_ptr[r] : 0;
    a.floor_to = early ? step.floor_ptr[r + 1] : 0;
    a.mask = line >= 0 ? step.mask + (long long)line * step.words : nullptr;
    a.history = a.penalised && history_row >= 0 ? step.history + (long long)history_row * step.V : nullptr;
    a.special = bias_from < bias_to || a.penalised || line >= 0 || a.floor_from < a.floor_to;
    a.adjusted = a.special || (a.hot && p.x != 1.f);
    int count = 0;
    if (a.penalised && !chain)
#pragma unroll 1
      for (long long i = n; i > 0 && count < LONGEST; i = step.parents[at + i]) path[count++] = (int)step.tokens[at + i];
    a.path = count;
  }
  __syncthreads();
  return true;
}

// 8 logits from token `at` on, as they came.
__device__ __forceinline__ void load_raw(float (&x)[8], const Step& step, const Node& a, int at) {
  load_logits<WIDE != 0>(x, step.logits, a.logits + at);
}
// First of ids[from..to), ascending, that is not below `token`.
__device__ __forceinline__ int place_of(const int* ids, int from, int to, int token) {
  while (from < to) { const int middle = (from + to) >> 1; if (ids[middle] < token) from = middle + 1; else to = middle; }
  return from;
}
__device__ __forceinline__ float raw_logit(const Step& step, const Node& a, int token) {
  float x[8];
  load_raw(x, step, a, token & ~7);
  float chosen = x[0];
#pragma unroll
  for (int e = 1; e < 8; e++) if (e == (token & 7)) chosen = x[e];
  return chosen;
}
// With bias, penalties, what may not be chosen, and temperature. Rare: a call.
__device__ __noinline__ void adjust(float (&x)[8], const Node& a, int at, const int* path) {
  if (a.bias_from < a.bias_to) {
    for (int i = place_of(a.bias_ids, a.bias_from, a.bias_to, at); i < a.bias_to && a.bias_ids[i] < at + 8; i++) {
      const int which = a.bias_ids[i] - at;
      const float value = a.bias_values[i];
#pragma unroll
      for (int e = 0; e < 8; e++) if (e == which) x[e] = add_rn(x[e], value);
    }
  }
  if (a.penalised) {
    int times[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < a.path; i++) {
      const int which = path[i] - at;
#pragma unroll
      for (int e = 0; e < 8; e++) times[e] += e == which;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int word = a.history ? a.history[at + e] : 0, n = (word >> 1) + times[e];
      if (!(word | times[e])) continue;
      const float y = x[e] > 0.f ? divide_any(x[e], a.repetition) : mul_rn(x[e], a.repetition);
      x[e] = sub_rn(sub_rn(y, mul_rn(a.frequency, (float)n)), mul_rn(a.presence, n > 0 ? 1.f : 0.f));
    }
  }
  if (a.mask) {
    const u32 allowed = a.mask[at >> 5] >> (at & 31);
#pragma unroll
    for (int e = 0; e < 8; e++) if (!(allowed >> e & 1)) x[e] = minus_infinity();
  }
  if (a.floor_from < a.floor_to) {
    for (int i = place_of(a.floor_ids, a.floor_from, a.floor_to, at); i < a.floor_to && a.floor_ids[i] < at + 8; i++)
#pragma unroll
      for (int e = 0; e < 8; e++) if (e == a.floor_ids[i] - at) x[e] = minus_infinity();
  }
  if (a.hot && a.temperature != 1.f) {
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = divide_any(x[e], a.temperature);
  }
  no_nan(x);
}

// Weights in fixed point, so that sums have no order: 2^45 is the weight of the highest value; 2^18 of them fit 64 bits.
constexpr float ONE = 35184372088832.f;
__device__ __forceinline__ u64 weight_of(float z, float peak) {
  const float w = mul_rn(exp_of(sub_rn(z, peak)), ONE);
#ifdef EMULATION
  return (u64)rintf(w);
#else
  return __float2ull_rn(w);
#endif
}
__device__ __forceinline__ double to_double(u64 v) {
#ifdef EMULATION
  return (double)v;
#else
  return __ull2double_rn(v);
#endif
}
__device__ __forceinline__ double times(double a, double b) {
#ifdef EMULATION
  return a * b;
#else
  return __dmul_rn(a, b);
#endif
}
__device__ __forceinline__ double plus(double a, double b) {
#ifdef EMULATION
  return a + b;
#else
  return __dadd_rn(a, b);
#endif
}
// Weight of the whole row from its segments' sums, in their order.
__device__ __forceinline__ double whole_weight(const float2* parts, int segments, float peak) {
  double total = 0.0;
  for (int s = 0; s < segments; s++) total = plus(total, times((double)parts[s].y, (double)exp_of(sub_rn(parts[s].x, peak))));
  return times(total, (double)ONE);
}
__device__ __forceinline__ float least_kept(float min_p, float peak) {   // min-p keeps z >= this
  return min_p > 0.f ? add_rn(peak, -minus_log(min_p)) : minus_infinity();
}
__device__ __forceinline__ u64 drawn_key(const Node& a, float z, u32 token) {
  const Bits bits = philox(token >> 2, a.position, a.seed);
  const u32 word = token & 2 ? (token & 1 ? bits.word[3] : bits.word[2]) : (token & 1 ? bits.word[1] : bits.word[0]);
  return rank_key(add_rn(z, gumbel(word)), token);
}

// The verified node that holds `token` as a child of this one (the first, as `walk` takes it), or -1. where [R][N]: m of each verified
// node; of others it may hold anything. All lanes of a warp.
struct Links { const long long *parents, *tokens, *rows, *nodes; const int *where, *live; int N, row, node; };
__device__ __noinline__ int next_of(const Links& of, int token) {
  const int lane = threadIdx.x & 31;
  const long long at = (long long)of.row * of.N;
#pragma unroll 1
  for (int first = of.node + 1; first < of.N; first += 64) {                   // children stand behind their parent
    int m[2];
    bool match[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int i = first + lane + 32 * k;
      const bool there = i < of.N;
      match[k] = there && of.parents[at + i] == of.node && of.tokens[at + i] == token;
      m[k] = there ? of.where[at + i] : -1;
      match[k] = match[k] && m[k] >= 0 && (!of.live || m[k] < load_int(of.live)) && of.rows[m[k]] == of.row && of.nodes[m[k]] == i;
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const u32 all = __ballot_sync(ALL_LANES, match[k]);
      if (all) return __shfl_sync(ALL_LANES, m[k], 31 - leading_zeros(all & (0u - all)));
    }
  }
  return -1;
}
__device__ __forceinline__ int next_of(const Step& step, const Node& a, const int* where, int token) {
  return next_of({step.parents, step.tokens, step.rows, step.nodes, where, step.live, step.N, a.row, a.node}, token);
}
