// WALK: one block folds the units of its span itself, with the operations that combine.cu uses for units of other blocks.
// Included by attend.cu. The group's values of column tile n are in registers (n < GR), in shared memory (n < GR + GS) or in
// global memory at `spare`. A job that spans several groups folds each finished group into its partial at `part`.
#pragma once

struct Group {
  float o[MT][GR > 0 ? GR : 1][4];
  float2 *ml, *walk;       // each warp's own copy for all lines: of the group, and of the groups before
  float4* box;
  size_t part, spare;
  int begin;

  __device__ __forceinline__ Group(const Job& job) : part(job.part), spare(job.spare), begin(job.begin) {
    ml = shared_at<float2>(SharedKeys::group_ml) + me().warp * MT * 16;
    walk = shared_at<float2>(SharedKeys::walk_ml) + me().warp * MT * 16;
    box = shared_at<float4>(SharedKeys::group_o) + threadIdx.x;
  }
  __device__ __forceinline__ static int line(int t, int h) { return t * 16 + h * 8 + me().g; }
  __device__ __forceinline__ float2* global(const Partials& out, size_t at, int t, int h, int n) const {
    return reinterpret_cast<float2*>(&out.o[(at + line(t, h)) * LATENT + (me().warp * COLS + n) * 8 + me().q2]);
  }

  // The unit that began at `unit` is complete in `a`. first: of its group.
  __device__ __forceinline__ void take(const Acc<MT>& a, int unit, bool first, const int* bases, const Partials& out) {
    bool on[MT][2];
#pragma unroll
    for (int t = 0; t < MT; t++) { on[t][0] = unit < bases[line(t, 0)]; on[t][1] = unit < bases[line(t, 1)]; }
    if (first) copy(a, on, out);
    else add(a, on, out);
    __syncwarp();
  }

  __device__ __forceinline__ void copy(const Acc<MT>& a, const bool (&on)[MT][2], const Partials& out) {
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) if (me().q2 == 0) ml[line(t, h)] = make_float2(a.m[t][h], a.l[t][h]);
#pragma unroll
    for (int n = 0; n < COLS; n++)
#pragma unroll
      for (int t = 0; t < MT; t++) {
        if (n < GR) {
#pragma unroll
          for (int j = 0; j < 4; j++) o[t][n < GR ? n : 0][j] = a.o[t][n][j];
        } else if (n < GR + GS) {
          box[((n - GR) * MT + t) * THREADS] = make_float4(a.o[t][n][0], a.o[t][n][1], a.o[t][n][2], a.o[t][n][3]);
        } else {
#pragma unroll
          for (int h = 0; h < 2; h++)
            if (on[t][h]) *global(out, spare, t, h, n) = make_float2(a.o[t][n][h * 2], a.o[t][n][h * 2 + 1]);
        }
      }
  }

  __device__ __forceinline__ void add(const Acc<MT>& a, const bool (&on)[MT][2], const Partials& out) {
    float fa[MT][2], fb[MT][2];
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float2 sum = fold_sums(ml[line(t, h)], make_float2(a.m[t][h], a.l[t][h]), fa[t][h], fb[t][h]);
        __syncwarp();
        if (me().q2 == 0 && on[t][h]) ml[line(t, h)] = sum;
      }
#pragma unroll
    for (int n = 0; n < GR; n++)
#pragma unroll
      for (int t = 0; t < MT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (on[t][j >> 1]) o[t][n][j] = fold(o[t][n][j], a.o[t][n][j], fa[t][j >> 1], fb[t][j >> 1]);
#pragma unroll
    for (int n = GR; n < GR + GS; n++)
#pragma unroll
      for (int t = 0; t < MT; t++) {
        float4& at = box[((n - GR) * MT + t) * THREADS];
        float4 x = at;
        if (on[t][0]) { x.x = fold(x.x, a.o[t][n][0], fa[t][0], fb[t][0]); x.y = fold(x.y, a.o[t][n][1], fa[t][0], fb[t][0]); }
        if (on[t][1]) { x.z = fold(x.z, a.o[t][n][2], fa[t][1], fb[t][1]); x.w = fold(x.w, a.o[t][n][3], fa[t][1], fb[t][1]); }
        at = x;
      }
#pragma unroll
    for (int n = GR + GS; n < COLS; n++) {
      float2 x[MT][2];
#pragma unroll
      for (int t = 0; t < MT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) if (on[t][h]) x[t][h] = *global(out, spare, t, h, n);
#pragma unroll
      for (int t = 0; t < MT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) if (on[t][h])
          *global(out, spare, t, h, n) = make_float2(fold(x[t][h].x, a.o[t][n][h * 2], fa[t][h], fb[t][h]),
                                                     fold(x[t][h].y, a.o[t][n][h * 2 + 1], fa[t][h], fb[t][h]));
    }
  }

  // The group that began at `start` is complete: it is, or is folded into, the partial.
  __device__ __forceinline__ void finish(int start, const int* bases, const Partials& out) {
    const bool first = start == begin;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int x = line(t, h);
        const bool on = start < bases[x];
        float2 sum = ml[x];
        float fa = 0.f, fb = 1.f;
        if (!first) sum = fold_sums(walk[x], sum, fa, fb);
        __syncwarp();                                         // all four lanes of the line have read
        if (on && me().q2 == 0) { walk[x] = sum; if (me().warp == 0) out.ml[part + x] = sum; }
#pragma unroll
        for (int n = 0; n < COLS; n++) if (on) {
          float2 v;
          if (n < GR) v = make_float2(o[t][n < GR ? n : 0][h * 2], o[t][n < GR ? n : 0][h * 2 + 1]);
          else if (n < GR + GS) v = reinterpret_cast<float2*>(&box[((n - GR) * MT + t) * THREADS])[h];
          else if (part == spare) continue;                   // one group: it was built in place
          else v = *global(out, spare, t, h, n);
          float2* to = global(out, part, t, h, n);
          if (!first) { const float2 u = *to; v = make_float2(fold(u.x, v.x, fa, fb), fold(u.y, v.y, fa, fb)); }
          *to = v;
        }
      }
    __syncwarp();
  }
};
