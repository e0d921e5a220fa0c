// Fold the partials of one (node, head) in the law's order and divide: out [tokens, heads, LATENT] bf16.
// Grid (rows * nodes * heads, ceil(LATENT / 128)), block 32 * warps: 128 columns. Warps prepare whole groups side by side; the
// first folds them from the left.
#include "layout.cuh"

#ifndef EACH
#define EACH 4           // groups that a warp prepares per round, SIDE at a time
#endif
constexpr int MOST_WARPS = 16, SIDE = PER < 8 ? 8 / PER : 1;
static_assert(EACH % SIDE == 0, "whole rounds");

__device__ __forceinline__ float4 fold4(float4 o, float4 v, float fa, float fb) {
  return make_float4(fold(o.x, v.x, fa, fb), fold(o.y, v.y, fa, fb), fold(o.z, v.z, fa, fb), fold(o.w, v.w, fa, fb));
}

// Lane i has (m, l) of the i-th of n later partials. Each lane gets its fold's factors; the running maximum is that of a fold
// one by one, because a maximum is exact. `first`: there is nothing before lane 0. sum becomes the whole (m, l).
__device__ __forceinline__ void chain(float2 ml, int n, bool first, float2& sum, float& fa, float& fb) {
  const int lane = threadIdx.x & 31;
  float top = lane < n ? ml.x : minus_infinity();
  if (!first) top = fmaxf(top, sum.x);
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const float o = __shfl_up_sync(ALL_LANES, top, d); if (lane >= d) top = fmaxf(top, o); }
  float under = __shfl_up_sync(ALL_LANES, top, 1);
  if (lane == 0) under = first ? top : sum.x;
  fold_scales(under, ml.x, top, fa, fb);
  for (int i = 0; i < n; i++) {
    const float l = __shfl_sync(ALL_LANES, ml.y, i), a = __shfl_sync(ALL_LANES, fa, i), b = __shfl_sync(ALL_LANES, fb, i);
    sum.y = first && i == 0 ? l : fold(sum.y, l, a, b);
  }
  sum.x = __shfl_sync(ALL_LANES, top, n - 1);
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
    chain(ml, n, true, sum, fa, fb);
    float4 all = v[0];
#pragma unroll
    for (int i = 1; i < MOST; i++) {
      const float a = __shfl_sync(ALL_LANES, fa, i), b = __shfl_sync(ALL_LANES, fb, i);
      if (i < n) all = fold4(all, v[i], a, b);
    }
    return all;
  }
};

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32) mla_combine(
    const Row* rows, const Head* head, const u64* masks, int words, int nodes, int heads, const float* o, const float2* ml,
    const float* own_o, const float2* own_ml, bf16* out) {
  __shared__ __align__(16) float box[MOST_WARPS * EACH][128];
  __shared__ float2 sums[MOST_WARPS * EACH];
  const int h = blockIdx.x % heads, node = blockIdx.x / heads % nodes, r = blockIdx.x / heads / nodes;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, c = blockIdx.y * 128 + lane * 4;
  pdl_wait();
  pdl_go();
  const Row row = rows[r];
  if (node >= row.count) return;
  const int span = head->span, per = span == UNIT ? PER : 1;    // partials of a group
  const long long token = row.token + node;
  const int p = row.length + depth_of(masks, words, token), base = base_of(p), own = p + 1 - base > TILE ? 2 : 1;
  const int parts = pieces_before(base, span), groups = (parts + per - 1) / per;
  const long long first = row.part + node * heads + h, last = token * 2 * heads + h;

  float2 sum = make_float2(minus_infinity(), 0.f), own_sum = sum;
  float4 all = make_float4(0.f, 0.f, 0.f, 0.f), own_all = all;
  if (warp == 0) {
    Units<2> two;
    two.load(own_o, own_ml, last, heads, own, c);
    own_all = two.fold(own_sum);
  }
  for (int g0 = 0; g0 < groups; g0 += warps * EACH) {
    if (per == 1) {                                               // whole groups: all loads first
      float4 v[EACH];
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int g = g0 + e * warps + warp;
        if (g < groups && c < LATENT) v[e] = __ldcs(reinterpret_cast<const float4*>(&o[(first + (long long)g * row.lines) * LATENT + c]));
        if (g < groups && lane == 0) sums[g - g0] = ml[first + (long long)g * row.lines];
      }
#pragma unroll
      for (int e = 0; e < EACH; e++) if (g0 + e * warps + warp < groups) *reinterpret_cast<float4*>(&box[e * warps + warp][lane * 4]) = v[e];
    } else {
      for (int e = 0; e < EACH; e += SIDE) {
        Units<PER> units[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
          const int g = g0 + (e + i) * warps + warp;
          if (g < groups) units[i].load(o, ml, first + (long long)g * PER * row.lines, row.lines, min(PER, parts - g * PER), c);
        }
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
          const int g = g0 + (e + i) * warps + warp;
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
      const int n = min(warps * EACH, groups - g0);
      for (int g = 0; g < n; g += 32) {
        const int k = min(32, n - g);
        const bool fresh = g0 + g == 0;
        float fa, fb;
        chain(lane < k ? sums[g + lane] : make_float2(0.f, 0.f), k, fresh, sum, fa, fb);
        for (int i = 0; i < k; i++) {
          const float a = __shfl_sync(ALL_LANES, fa, i), b = __shfl_sync(ALL_LANES, fb, i);
          const float4 v = *reinterpret_cast<const float4*>(&box[g + i][lane * 4]);
          all = fresh && i == 0 ? v : fold4(all, v, a, b);
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
  uint2 packed;
  packed.x = pack_bf16(__fmul_rn(all.x, scale), __fmul_rn(all.y, scale));
  packed.y = pack_bf16(__fmul_rn(all.z, scale), __fmul_rn(all.w, scale));
  *reinterpret_cast<uint2*>(&out[((size_t)token * heads + h) * LATENT + c]) = packed;
}
