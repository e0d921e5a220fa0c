// What value warps of nodes.cu do: they weight a tile's values, fold what is complete and write results.
#pragma once

// Warpgroup v has columns 256v .. of a latent in four tiles of 64: a lane has rows 16w + g and 16w + g + 8 of each tile, of lines
// 8j + 2q and 8j + 2q + 1. Warps 0 and 1 of the eight also sum the probabilities of 16 lines each: the law's column of ones.
using Columns = float[4][EIGHTS * 4];
struct Sums { float l[2], m; };           // l: of lines 16 warp + g and + 8 more, in warps 0 and 1; m: of line `lane`

struct Lane { int warp, lane, q, g; };
__device__ __forceinline__ Lane here() {
  const int t = threadIdx.x;
  return {(int)(threadIdx.x - ROLE) >> 5, t & 31, t & 3, t >> 2 & 7};
}

// Fold the later (o, later) into (to, sums).
__device__ __forceinline__ void fold_into(Columns& to, Sums& sums, const Columns& o, const Sums& later) {
  const Lane i = here();
  float fa, fb;                                                // of line `lane`
  sums.m = fold_sums(make_float2(sums.m, 0.f), make_float2(later.m, 0.f), fa, fb).x;
#pragma unroll
  for (int j = 0; j < EIGHTS; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float a = __shfl_sync(ALL_LANES, fa, j * 8 + i.q * 2 + c), b = __shfl_sync(ALL_LANES, fb, j * 8 + i.q * 2 + c);
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int x = 4 * j + 2 * h + c;
          to[t][x] = fold(to[t][x], o[t][x], a, b);
        }
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int line = ((i.warp & 1) * 2 + h) * 8 + i.g;
    sums.l[h] = fold(sums.l[h], later.l[h], __shfl_sync(ALL_LANES, fa, line), __shfl_sync(ALL_LANES, fb, line));
  }
}

// Of all groups so far, this thread's o is kept in the block's part of `spare`, which nobody else reads.
struct Spare {
  float4* at;
  __device__ __forceinline__ explicit Spare(float* spare)
      : at(reinterpret_cast<float4*>(spare) + (size_t)blockIdx.x * EIGHTS * 4 * 2 * ROLE + threadIdx.x - ROLE) {}
  __device__ __forceinline__ void store(const Columns& o) const {
#pragma unroll
    for (int x = 0; x < EIGHTS * 4; x++) {
      const float* v = &o[x / EIGHTS][x % EIGHTS * 4];
      at[x * 2 * ROLE] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __device__ __forceinline__ void load(Columns& o) const {
#pragma unroll
    for (int x = 0; x < EIGHTS * 4; x++) {
      const float4 v = at[x * 2 * ROLE];
      float* to = &o[x / EIGHTS][x % EIGHTS * 4];
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
};

// The result of the job's lines, of which the first is at `out`. Lanes turn their columns so that each writes eight of a line.
__device__ __forceinline__ void write(const Columns& o, const Sums& sums, int job, bf16* out) {
  const Lane i = here();
  float* inverse = shared_at<float>(Place::inverse) + (job & 1) * LINES_OF_JOB;
  if (i.warp * 16 < LINES_OF_JOB && i.q == 0)
#pragma unroll
    for (int h = 0; h < 2; h++) inverse[i.warp * 16 + h * 8 + i.g] = __frcp_rn(sums.l[h]);
  bar_sync<VALUES, 2 * ROLE>();
  const bool odd = i.g & 1, second = i.g & 2, third = i.g & 4;
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const float2 by = *reinterpret_cast<const float2*>(&inverse[j * 8 + i.q * 2]);
    bf16* to = out + (j * 8 + i.q * 2 + odd) * LATENT + (i.warp >> 2) * 256 + third * 64 + (i.warp & 3) * 16 + (second ? 8 : 0);
#pragma unroll
    for (int y = 0; y < 2; y++) {
      u32 w[2][2];                                             // of tiles 2y and 2y + 1: four columns of line odd, of h second
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const float* v = &o[2 * y + t][4 * j];
        const u32 a = pack_bf16(__fmul_rn(v[0], by.x), __fmul_rn(v[2], by.x));
        const u32 b = pack_bf16(__fmul_rn(v[1], by.y), __fmul_rn(v[3], by.y));
        const u32 other = __shfl_xor_sync(ALL_LANES, odd ? a : b, 4), mine = odd ? b : a;
        const u32 low = odd ? other : mine, high = odd ? mine : other;
        const u32 h0 = (low & 0xffff) | high << 16, h1 = low >> 16 | (high & 0xffff0000u);
        const u32 more = __shfl_xor_sync(ALL_LANES, second ? h0 : h1, 8), kept = second ? h1 : h0;
        w[t][0] = second ? more : kept, w[t][1] = second ? kept : more;
      }
      const u32 a = __shfl_xor_sync(ALL_LANES, third ? w[0][0] : w[1][0], 16);
      const u32 b = __shfl_xor_sync(ALL_LANES, third ? w[0][1] : w[1][1], 16);
      const uint4 all = third ? make_uint4(a, b, w[1][0], w[1][1]) : make_uint4(w[0][0], w[0][1], a, b);
      *reinterpret_cast<uint4*>(to + y * 128) = all;
    }
  }
}

// A unit of some of a row's keys is complete: partials of the job's lines from `part` on.
__device__ __forceinline__ void store_partial(const Columns& o, const Sums& sums, const Partials& out, long long part) {
  const Lane i = here();
#pragma unroll
  for (int j = 0; j < EIGHTS; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float4* to = reinterpret_cast<float4*>(out.o + (part + j * 8 + i.q * 2 + c) * LATENT + i.warp * 64 + i.g * 4);
      to[0] = make_float4(o[0][4 * j + c], o[0][4 * j + 2 + c], o[1][4 * j + c], o[1][4 * j + 2 + c]);
      to[8] = make_float4(o[2][4 * j + c], o[2][4 * j + 2 + c], o[3][4 * j + c], o[3][4 * j + 2 + c]);
    }
  if (i.warp == 0 && i.lane < LINES_OF_JOB) out.ml[part + i.lane].x = sums.m;
  if (i.warp * 16 < LINES_OF_JOB && i.q == 0)
#pragma unroll
    for (int h = 0; h < 2; h++) out.ml[part + i.warp * 16 + h * 8 + i.g].y = sums.l[h];
}

// Weight the values of the n-th tile and give its pieces back.
__device__ __forceinline__ void add_values(Columns& o, float (&l)[4], int n, bool fresh) {
  constexpr u32 ONES = 0x3f803f80u;
  const Lane i = here();
  const int turn = n & 1, L = i.lane, first = (i.warp >> 2) * 4;
  const Slots slots(n);
  const float* rescale = shared_at<float>(Place::rescale) + turn * LINES_OF_JOB;
  mbarrier_wait(ready(turn), n >> 1 & 1);
  show_to_products();                                           // the tile's values too, which score warps know to be here
  if (!fresh && shared_at<int>(Place::moved)[turn]) {           // a factor of 1 changes no bit
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
      const float2 r = *reinterpret_cast<const float2*>(&rescale[j * 8 + i.q * 2]);
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int x = 0; x < 4; x++) o[t][4 * j + x] = __fmul_rn(o[t][4 * j + x], x & 1 ? r.y : r.x);
    }
    if (i.warp * 16 < LINES_OF_JOB)
#pragma unroll
      for (int x = 0; x < 4; x++) l[x] = __fmul_rn(l[x], rescale[i.warp * 16 + (x >> 1) * 8 + i.g]);
  }
  const u64 weights = operand(p_at(turn));
  products_begin();
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const u64 values = operand(slots.at(first + t));
#pragma unroll
    for (int k = 0; k < 4; k++)
      product<EIGHTS, true>(o[t], further(values, k * 2 * UNIT_ROWS), further(weights, k * 32), k > 0 || !fresh);
    products_commit();
  }
  if (i.warp * 16 < LINES_OF_JOB)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 f[4];
      ldmatrix4(f, p_at(turn) + i.warp * 2 * UNIT_ROWS + (L & 15) * 128 + (((k * 2 + (L >> 4)) ^ (L & 7)) << 4));
      mma(l, f, ONES, ONES);
    }
  auto give_back = [&](int c) {                                 // when all lanes are done with it
    __syncwarp();
    arrive_at_all(empty(slots.slot(c)));
  };
  products_wait<3>();
  give_back(first);
  products_wait<2>();
  give_back(first + 1);
  products_wait<1>();
  give_back(first + 2);
  products_wait<0>();
  give_back(first + 3);
#pragma unroll
  for (int t = 0; t < 4; t++) settle(o[t]);
}

__device__ __forceinline__ void value_role(int jobs, int heads, float* spare_of_blocks, const Partials& shared,
                                           const Partials& apart, bf16* out) {
  const Lane i = here();
  const Spare spare(spare_of_blocks);
  Columns o, group;
  float l[4];
  Sums grouped{}, all{};
  for (int job = 0, n = 0; job < jobs; job++) {
    const Task task = task_of(job);
    int unit = 0;                                                // tile at which the unit begins
    bool fresh = true, first = true;                             // the tile is its unit's first; there is no group yet
    long long part = task.part;
    for (int x = 0; x < task.tiles; x++, n++) {
      if (fresh) {                                               // products do not look at them: so that nothing is kept until then
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int e = 0; e < EIGHTS * 4; e++) o[t][e] = 0.f;
        l[0] = l[1] = l[2] = l[3] = 0.f;
      }
      add_values(o, l, n, fresh);
      fresh = ends(task, x);
      const Sums one{{l[0], l[2]}, fresh ? shared_at<float>(Place::unit_m)[(n & 1) * LINES_OF_JOB + i.lane] : 0.f};
      __syncwarp();                                              // all lanes have read what there is of the tile
      if (i.lane == 0) mbarrier_arrive(taken(n & 1));
      if (!fresh) continue;
      if (!task.whole) {
        if (x < task.shared) store_partial(o, one, shared, part);
        else store_partial(o, one, apart, task.own + (x - task.shared) * heads);
        part += task.step;
        continue;
      }
      const bool own = x >= task.shared, last = x + 1 == (own ? task.tiles : task.shared);
      const int size = own ? TILE : size_at(unit * TILE, GROUP);
      if (own ? x == task.shared : (unit * TILE & (size - 1)) == 0) {   // the group's first unit
        grouped = one;
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int e = 0; e < EIGHTS * 4; e++) group[t][e] = o[t][e];
      } else {
        fold_into(group, grouped, o, one);
      }
      unit = x + 1;
      if (!last && (own || ((x + 1) * TILE & (size - 1)) != 0)) continue;
      if (first) {
        all = grouped;
      } else {
        Columns sum;
        spare.load(sum);
        fold_into(sum, all, group, grouped);
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int e = 0; e < EIGHTS * 4; e++) group[t][e] = sum[t][e];
      }
      first = false;
      if (own) write(group, all, job, out + task.line * LATENT); else spare.store(group);
    }
  }
}

