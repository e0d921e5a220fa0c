// Fold the partials of one (node, head) in the law's order and divide: out [tokens, heads, LATENT] bf16.
// Grid (tokens * heads, ceil(LATENT / 128)), tokens as many as may live, block 32 * WARPS: 128 columns. Warps prepare whole groups side by side; the
// first folds them from the left. Few lines want many warps each, many lines many small blocks.
#include "layout.cuh"

#ifndef EACH
#define EACH 4           // groups that a warp prepares per round, SIDE at a time
#endif
#ifndef WARPS
#define WARPS 16
#endif
constexpr int SIDE = PER < 8 ? 8 / PER : 1;
static_assert(EACH % SIDE == 0, "whole rounds");

// Lane i has (m, l) of the i-th of n later partials. Each lane gets its fold's factors; the running maximum is that of a fold
// one by one, because a maximum is exact. `first`: there is nothing before lane 0. m becomes the maximum of all.
__device__ __forceinline__ void factors(float2 ml, int n, bool first, float& m, float& fa, float& fb) {
  const int lane = threadIdx.x & 31;
  float top = lane < n ? ml.x : minus_infinity();
  if (!first) top = fmaxf(top, m);
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const float o = __shfl_up_sync(ALL_LANES, top, d); if (lane >= d) top = fmaxf(top, o); }
  float under = __shfl_up_sync(ALL_LANES, top, 1);
  if (lane == 0) under = first ? top : m;
  fold_scales(under, ml.x, top, fa, fb);
  m = __shfl_sync(ALL_LANES, top, n - 1);
}

// Up to MOST partials, stride apart: columns c..c+3 of each in every lane, (m, l) of the i-th in lane i. Load, then fold.
template <int MOST> struct Units {
  float4 v[MOST];
  float2 ml;
  int n;
  __device__ __forceinline__ void load(const float* o, const float2* all_ml, long long part, long long stride, int count, int c) {
    const int lane = threadIdx.x & 31;
    n = count;
    ml = lane < n ? all_ml[part + lane * stride] : make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < MOST; i++)
      if (i < n && c < LATENT) v[i] = __ldcs(reinterpret_cast<const float4*>(&o[(part + i * stride) * LATENT + c]));
  }
  __device__ __forceinline__ float4 fold(float2& sum) const {
    float fa, fb;
    factors(ml, n, true, sum.x, fa, fb);
    float4 all = v[0];
    sum.y = __shfl_sync(ALL_LANES, ml.y, 0);
#pragma unroll
    for (int i = 1; i < MOST; i++) {
      const float a = __shfl_sync(ALL_LANES, fa, i), b = __shfl_sync(ALL_LANES, fb, i), l = __shfl_sync(ALL_LANES, ml.y, i);
      if (i >= n) continue;
      all = fold4(all, v[i], a, b);
      sum.y = ::fold(sum.y, l, a, b);
    }
    return all;
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS) mla_combine(
    const Row* rows, const Head* head, const Node* live, const u64* masks, int words, int heads, const float* o, const float2* ml,
    const float* own_o, const float2* own_ml, bf16* out) {
  __shared__ __align__(16) float box[WARPS * EACH][128];
  __shared__ float2 sums[WARPS * EACH];
  __shared__ __align__(16) float4 steps[32];                      // of 32 folds: both factors, l
  const int h = blockIdx.x % heads, n = blockIdx.x / heads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = blockIdx.y * 128 + lane * 4;
  pdl_wait();
  pdl_go();
  const Node at = live[n];                                        // there is room for it, whether or not it is one
  if (n >= head->live) return;
  const Row row = rows[at.row];
  const int span = head->span, per = span == UNIT ? PER : 1;    // partials of a group
  const long long token = row.token + at.node;
  const int p = row.length + depth_of(masks, words, token), base = base_of(p), own = p + 1 - base > TILE ? 2 : 1;
  const int parts = pieces_before(base, span), groups = (parts + per - 1) / per;
  const long long first = row.part + at.node * heads + h, last = token * 2 * heads + h;

  float2 sum = make_float2(minus_infinity(), 0.f), own_sum = sum;
  float4 all = make_float4(0.f, 0.f, 0.f, 0.f), own_all = all;
  if (warp == 0) {
    Units<2> two;
    two.load(own_o, own_ml, last, heads, own, c);
    own_all = two.fold(own_sum);
  }
  for (int g0 = 0; g0 < groups; g0 += WARPS * EACH) {
    if (per == 1) {                                               // whole groups: all loads first
      float4 v[EACH];
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int g = g0 + e * WARPS + warp;
        if (g < groups && c < LATENT) v[e] = __ldcs(reinterpret_cast<const float4*>(&o[(first + (long long)g * row.lines) * LATENT + c]));
        if (g < groups && lane == 0) sums[g - g0] = ml[first + (long long)g * row.lines];
      }
#pragma unroll
      for (int e = 0; e < EACH; e++) if (g0 + e * WARPS + warp < groups) *reinterpret_cast<float4*>(&box[e * WARPS + warp][lane * 4]) = v[e];
    } else {
      for (int e = 0; e < EACH; e += SIDE) {
        Units<PER> units[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
          const int g = g0 + (e + i) * WARPS + warp;
          if (g < groups) units[i].load(o, ml, first + (long long)g * PER * row.lines, row.lines, min(PER, parts - g * PER), c);
        }
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
          const int g = g0 + (e + i) * WARPS + warp;
          if (g >= groups) continue;
          float2 s;
          const float4 v = units[i].fold(s);
          *reinterpret_cast<float4*>(&box[g - g0][lane * 4]) = v;
          if (lane == 0) sums[g - g0] = s;
        }
      }
    }
    __syncthreads();
    if (warp == 0) {
      const int n = min(WARPS * EACH, groups - g0);
      for (int g = 0; g < n; g += 32) {
        const int k = min(32, n - g);
        const bool fresh = g0 + g == 0;
        const float2 mine = lane < k ? sums[g + lane] : make_float2(0.f, 0.f);
        float fa, fb;
        factors(mine, k, fresh, sum.x, fa, fb);
        __syncwarp();                                             // all have read the last ones
        steps[lane] = make_float4(fa, fb, mine.y, 0.f);
        __syncwarp();
        int i = 0;
        if (fresh) {
          all = *reinterpret_cast<const float4*>(&box[g][lane * 4]);
          sum.y = steps[0].z;
          i = 1;
        }
#pragma unroll 4
        for (; i < k; i++) {
          const float4 f = steps[i];
          all = fold4(all, *reinterpret_cast<const float4*>(&box[g + i][lane * 4]), f.x, f.y);
          sum.y = fold(sum.y, f.z, f.x, f.y);
        }
      }
    }
    __syncthreads();
  }
  if (warp > 0 || c >= LATENT) return;
  if (groups > 0) {
    float fa, fb;
    sum = fold_sums(sum, own_sum, fa, fb);
    all = fold4(all, own_all, fa, fb);
  } else {
    sum = own_sum;
    all = own_all;
  }
  const float scale = __frcp_rn(sum.y);
  const float v[4] = {__fmul_rn(all.x, scale), __fmul_rn(all.y, scale), __fmul_rn(all.z, scale), __fmul_rn(all.w, scale)};
  bf16* to = &out[((size_t)token * heads + h) * LATENT];          // partials keep columns in another order (layout.cuh)
  if (COLUMNS) {
    to += (c >> 8) * 256 + (c >> 1 & 3) * 64 + (c >> 6 & 3) * 16 + (c >> 3 & 7);
#pragma unroll
    for (int i = 0; i < 4; i++) to[(i >> 1) * 64 + (i & 1) * 8] = __float2bfloat16_rn(v[i]);
  } else {
    to += (c & ~15) + (lane & 3) * 2;
    reinterpret_cast<u32*>(to)[0] = pack_bf16(v[0], v[1]);
    reinterpret_cast<u32*>(to)[4] = pack_bf16(v[2], v[3]);
  }
}
