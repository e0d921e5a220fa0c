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
  long long stride;
  int N, V, segments, logprobs;
};

struct Node {
  long long logits;                                    // offset of its row
  const int* history;
  float temperature, top_p, min_p, presence, frequency, repetition;
  u64 seed;
  u32 position;                                        // of the token it chooses
  int row, node, top_k, bias_from, bias_to, path;      // path: tokens in the shared list
  bool hot, filtered, penalised;
};

// False for padding. Threads of the block see `path` (shared, LONGEST) after the barrier inside.
__device__ __forceinline__ bool prepare(Node& a, const Step& step, int m, int* path) {
  __shared__ int found;
  if (step.live && m >= load_int(step.live)) return false;
  const int r = a.row = (int)step.rows[m], n = a.node = (int)step.nodes[m];
  const float* p = step.numbers + r * 8;
  a.temperature = p[0]; a.top_p = p[1]; a.min_p = p[2]; a.presence = p[3]; a.frequency = p[4]; a.repetition = p[5];
  a.top_k = step.top_k[r];
  a.hot = a.temperature > COLD;
  a.filtered = a.hot && (a.min_p > 0.f || (a.top_k > 0 && a.top_k < step.V) || a.top_p < 1.f);
  a.penalised = a.presence != 0.f || a.frequency != 0.f || a.repetition != 1.f;
  a.seed = (u64)step.seeds[r];
  const long long at = (long long)r * step.N;
  a.position = (u32)(step.lengths[r] + step.depths[at + n] + 1);
  a.logits = m * step.stride;
  a.bias_from = step.bias_ptr ? step.bias_ptr[r] : 0;
  a.bias_to = step.bias_ptr ? step.bias_ptr[r + 1] : 0;
  a.history = step.history && a.penalised && step.history_rows[r] >= 0 ? step.history + (long long)step.history_rows[r] * step.V : nullptr;
  a.path = 0;
  if (a.penalised) {                                   // chains of known tokens are in the history already
    if (threadIdx.x == 0) {
      int count = 0;
      if (!step.forced || !step.forced[r])
        for (long long i = n; i > 0 && count < LONGEST; i = step.parents[at + i]) path[count++] = (int)step.tokens[at + i];
      found = count;
    }
    __syncthreads();
    a.path = found;
  }
  return true;
}

// 8 logits from token `at` on, as they came.
__device__ __forceinline__ void load_raw(float (&x)[8], const Step& step, const Node& a, int at) {
  load_logits<WIDE != 0>(x, step.logits, a.logits + at);
}
__device__ __forceinline__ float raw_logit(const Step& step, const Node& a, int token) {
  float x[8];
  load_raw(x, step, a, token & ~7);
  float chosen = x[0];
#pragma unroll
  for (int e = 1; e < 8; e++) if (e == (token & 7)) chosen = x[e];
  return chosen;
}
// With bias, penalties and temperature.
__device__ __forceinline__ void adjust(float (&x)[8], const Node& a, int at, const int* bias_ids, const float* bias_values, const int* path) {
  if (a.bias_from < a.bias_to) {
    int low = a.bias_from, high = a.bias_to;
    while (low < high) { const int middle = (low + high) >> 1; if (bias_ids[middle] < at) low = middle + 1; else high = middle; }
    for (; low < a.bias_to && bias_ids[low] < at + 8; low++) {
      const int which = bias_ids[low] - at;
      const float value = bias_values[low];
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
  if (a.hot && a.temperature != 1.f) {
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = divide_any(x[e], a.temperature);
  }
#pragma unroll
  for (int e = 0; e < 8; e++) x[e] = x[e] == x[e] ? x[e] : minus_infinity();
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
