// What value warps do with a finished unit. Included by attend.cu.
// WALK 0: it is a partial. WALK 1: the block folds it into its group, with the operations that combine.cu uses for units of other
// blocks; a finished group is a partial or, if one span holds all groups, is folded into the job's only one.
#pragma once

template <int M> struct Emitter {
  static constexpr bool IN_REGISTERS = M <= 2;
  const Outputs& outputs;
  int turn = 0;                                                // which of two places of a unit's maxima is current
  int done = 0;                                                // lines' partials written, in steps
  float4 o[WALK && IN_REGISTERS ? M * COLS : 1];               // of the group: tile, h, pair of column tiles
  float l[2], walk_l[2];                                       // of lines g, g + 8 of tile `warp`, in warps below M
  int group = 0;

  __device__ __forceinline__ explicit Emitter(const Outputs& o) : outputs(o) {}

  __device__ __forceinline__ static const Work& work() { return *shared_at<Work>(Place::work); }
  __device__ __forceinline__ size_t part() const { return work().part + done; }
  __device__ __forceinline__ size_t spare() const { return work().spare + done; }

  __device__ __forceinline__ static const int* bases() { return shared_at<int>(Place::bases); }
  __device__ __forceinline__ static float* group_m() { return shared_at<float>(Place::group_m); }
  __device__ __forceinline__ static float* walk_m() { return shared_at<float>(Place::walk_m); }
  __device__ __forceinline__ const float* unit_m() const { return shared_at<float>(Place::unit_m) + turn * MT * 16; }
  __device__ __forceinline__ static int index(int t, int h, int n) { return (t * 2 + h) * (COLS / 2) + n; }

  // The unit from position `unit` to `end` is complete in `a`; the job's last one if `last`.
  __device__ __forceinline__ void take(const Acc<M>& a, int unit, int end, bool last) {
#if WALK
    if (work().kind == SHARED_KEYS) {
      const int size = size_at(unit, GROUP);
      if ((unit & (size - 1)) == 0) { group = unit; copy(a, unit); } else add(a, unit);
      if (last || (end & (size - 1)) == 0) finish();
    } else {
      store(a, unit, outputs.own);
    }
#else
    store(a, unit, work().kind == SHARED_KEYS ? outputs.shared : outputs.own);
    done += work().step;
#endif
    turn ^= 1;
  }

  __device__ __forceinline__ void store(const Acc<M>& a, int unit, const Partials& out) const {
    const Lane i = value_lane();
    const size_t part = this->part();
#pragma unroll
    for (int t = 0; t < M; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = t * 16 + h * 8 + i.g;
        if (unit < bases()[line])
#pragma unroll
          for (int n = 0; n < COLS / 2; n++) *place_of(out, part + line, n) = a.at(t, h, n);
      }
    if (i.warp < M && i.q == 0)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = i.warp * 16 + h * 8 + i.g;
        if (unit < bases()[line]) out.ml[part + line] = make_float2(unit_m()[line], a.l[h * 2]);
      }
  }

#if WALK
  // The group's first unit.
  __device__ __forceinline__ void copy(const Acc<M>& a, int unit) {
    const Lane i = value_lane();
    const size_t spare = this->spare();
#pragma unroll
    for (int t = 0; t < M; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = t * 16 + h * 8 + i.g;
        const bool on = unit < bases()[line];
#pragma unroll
        for (int n = 0; n < COLS / 2; n++) {
          if (IN_REGISTERS) o[IN_REGISTERS ? index(t, h, n) : 0] = a.at(t, h, n);
          else if (on) *place_of(outputs.shared, spare + line, n) = a.at(t, h, n);
        }
      }
    bar_sync<VALUES, VALUE_THREADS>();                         // all have read the last ones, in add or join
    if (i.warp < M)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = i.warp * 16 + h * 8 + i.g;
        l[h] = a.l[h * 2];
        if (i.q == 0) group_m()[line] = unit_m()[line];        // read by others after the next tile's barriers
      }
  }

  // A later unit.
  __device__ __forceinline__ void add(const Acc<M>& a, int unit) {
    const Lane i = value_lane();
    const size_t spare = this->spare();
    const float* before = group_m();
    float4 v[2][COLS / 2];                                     // of two lines, one ahead
    auto load = [&](int x) {
      const int line = x / 2 * 16 + x % 2 * 8 + i.g;
      if (unit < bases()[line])
#pragma unroll
        for (int n = 0; n < COLS / 2; n++) v[x % 2][n] = *place_of(outputs.shared, spare + line, n);
    };
    if (!IN_REGISTERS) load(0);
#pragma unroll
    for (int x = 0; x < 2 * M; x++) {
      const int t = x / 2, h = x % 2, line = t * 16 + h * 8 + i.g;
      if (!IN_REGISTERS && x + 1 < 2 * M) load(x + 1);
      if (unit >= bases()[line]) continue;
      float fa, fb;
      fold_sums(make_float2(before[line], 0.f), make_float2(unit_m()[line], 0.f), fa, fb);
#pragma unroll
      for (int n = 0; n < COLS / 2; n++) {
        if (IN_REGISTERS) {
          float4& at = o[IN_REGISTERS ? index(t, h, n) : 0];
          at = fold4(at, a.at(t, h, n), fa, fb);
        } else {
          *place_of(outputs.shared, spare + line, n) = fold4(v[x % 2][n], a.at(t, h, n), fa, fb);
        }
      }
    }
    bar_sync<VALUES, VALUE_THREADS>();                         // all have read `before`
    if (i.warp < M)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = i.warp * 16 + h * 8 + i.g;
        float2 sum = make_float2(before[line], l[h]);
        float fa, fb;
        if (unit < bases()[line]) sum = fold_sums(sum, make_float2(unit_m()[line], a.l[h * 2]), fa, fb);
        l[h] = sum.y;
        __syncwarp();                                          // the four lanes of a line have read it
        if (i.q == 0) group_m()[line] = sum.x;
      }
  }

  // The group is complete.
  __device__ __forceinline__ void finish() {
    const Lane i = value_lane();
    if (work().spare != work().part) { join(); return; }
    const size_t part = this->part();
    if (IN_REGISTERS)
#pragma unroll
      for (int t = 0; t < M; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int line = t * 16 + h * 8 + i.g;
          if (group < bases()[line])
#pragma unroll
            for (int n = 0; n < COLS / 2; n++) *place_of(outputs.shared, part + line, n) = o[IN_REGISTERS ? index(t, h, n) : 0];
        }
    if (i.warp < M && i.q == 0)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = i.warp * 16 + h * 8 + i.g;
        if (group < bases()[line]) outputs.shared.ml[part + line] = make_float2(group_m()[line], l[h]);
      }
    done += work().step;
  }

  // One span holds all groups: fold this one into it.
  __device__ __forceinline__ void join() {
    const Lane i = value_lane();
    const bool first = group == work().begin;
    const size_t part = this->part(), spare = this->spare();
    bar_sync<VALUES, VALUE_THREADS>();                           // the group's maxima were written just now
    const float *before = walk_m(), *now = group_m();
#pragma unroll
    for (int t = 0; t < M; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = t * 16 + h * 8 + i.g;
        if (group >= bases()[line]) continue;
        float fa = 0.f, fb = 1.f;
        if (!first) fold_sums(make_float2(before[line], 0.f), make_float2(now[line], 0.f), fa, fb);
#pragma unroll
        for (int n = 0; n < COLS / 2; n++) {
          float4 v = IN_REGISTERS ? o[IN_REGISTERS ? index(t, h, n) : 0] : *place_of(outputs.shared, spare + line, n);
          float4* to = place_of(outputs.shared, part + line, n);
          if (!first) v = fold4(*to, v, fa, fb);
          *to = v;
        }
      }
    bar_sync<VALUES, VALUE_THREADS>();
    if (i.warp < M)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = i.warp * 16 + h * 8 + i.g;
        float2 sum = make_float2(now[line], l[h]);
        float fa, fb;
        const bool on = group < bases()[line];
        if (!first) sum = on ? fold_sums(make_float2(before[line], walk_l[h]), sum, fa, fb) : make_float2(before[line], walk_l[h]);
        walk_l[h] = sum.y;
        __syncwarp();
        if (i.q == 0) {
          walk_m()[line] = sum.x;
          if (on) outputs.shared.ml[part + line] = sum;
        }
      }
  }
#endif
};
