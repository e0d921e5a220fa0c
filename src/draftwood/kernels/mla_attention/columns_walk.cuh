// What value warps of columns.cu do with a finished unit if blocks fold units themselves (WALK): in registers, into its group, with the
// operations that combine.cu uses for units of other blocks. A finished group is a partial or, if one span holds all groups, is folded
// into the job's only one.
#pragma once

template <int E> struct Walk {
  float o[4][E * 4], l[2];              // of the group, as in Acc; sums of lines g, g + 8 of this warp's 16
  float m[E][2], l_m[2];                // maxima: of this lane's lines; of those whose sums it has
  float all_m[E][2], all_l_m[2], all_l[2];   // the same of all groups so far, if one span holds them
  int group = 0;

  // The group's first unit, with maxima unit_m of the job's lines.
  __device__ __forceinline__ void copy(const Acc<E>& a, const float* unit_m) {
    const int q = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int x = 0; x < E * 4; x++) o[t][x] = a.o[t][x];
#pragma unroll
    for (int j = 0; j < E; j++) m[j][0] = unit_m[j * 8 + q * 2], m[j][1] = unit_m[j * 8 + q * 2 + 1];
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (Acc<E>::pair() * 2 + h < E) l[h] = a.l[h * 2], l_m[h] = unit_m[Acc<E>::pair() * 16 + h * 8 + g];
  }

  // A later unit, from position `unit`.
  __device__ __forceinline__ void add(const Acc<E>& a, const Task& task, int unit, const float* unit_m) {
    const int q = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
    for (int j = 0; j < E; j++) {
      if (!task.on(j, unit)) continue;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float fa, fb;
        m[j][c] = fold_sums(make_float2(m[j][c], 0.f), make_float2(unit_m[j * 8 + q * 2 + c], 0.f), fa, fb).x;
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int h = 0; h < 2; h++) o[t][4 * j + 2 * h + c] = fold(o[t][4 * j + 2 * h + c], a.o[t][4 * j + 2 * h + c], fa, fb);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int j = Acc<E>::pair() * 2 + h;
      if (j >= E || !task.on(j, unit)) continue;
      float fa, fb;
      const float2 sum = fold_sums(make_float2(l_m[h], l[h]), make_float2(unit_m[j * 8 + g], a.l[h * 2]), fa, fb);
      l_m[h] = sum.x, l[h] = sum.y;
    }
  }

  // The group is complete: a partial, or one more of the job's only one.
  __device__ __forceinline__ void finish(const Task& task, const Partials& out, long long part) {
    const int q = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
    const bool first = !task.whole || group == task.begin;
#pragma unroll
    for (int j = 0; j < E; j++) {
      if (!task.on(j, group)) continue;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float fa = 0.f, fb = 1.f;
        all_m[j][c] = first ? m[j][c] : fold_sums(make_float2(all_m[j][c], 0.f), make_float2(m[j][c], 0.f), fa, fb).x;
#pragma unroll
        for (int x = 0; x < 2; x++) {
          float4* to = place_of(out, part + j * 8 + q * 2 + c) + 8 * x;
          float4 v = make_float4(o[2 * x][4 * j + c], o[2 * x][4 * j + 2 + c], o[2 * x + 1][4 * j + c], o[2 * x + 1][4 * j + 2 + c]);
          if (!first) v = fold4(*to, v, fa, fb);
          *to = v;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int j = Acc<E>::pair() * 2 + h;
      if (j >= E || !task.on(j, group)) continue;
      float fa, fb;
      float2 sum = make_float2(l_m[h], l[h]);
      if (!first) sum = fold_sums(make_float2(all_l_m[h], all_l[h]), sum, fa, fb);
      all_l_m[h] = sum.x, all_l[h] = sum.y;
      if (q == 0) out.ml[part + j * 8 + g] = sum;
    }
  }

  // The unit from position `unit` to `end` is complete in `a`; the job's last one if `last`. Returns whether a partial is.
  __device__ __forceinline__ bool take(const Acc<E>& a, const Task& task, const Partials& out, long long part, int unit, int end,
                                       bool last, const float* unit_m) {
    const int size = size_at(unit, GROUP);
    if ((unit & (size - 1)) == 0) { group = unit; copy(a, unit_m); } else add(a, task, unit, unit_m);
    if (!last && (end & (size - 1)) != 0) return false;
    finish(task, out, part);
    return !task.whole;
  }
};
