// What value warps of heads.cu do: they weight a tile's values, sum its probabilities, fold what is complete and write results.
#pragma once

// A value role has 128 columns of a latent in two pieces: a lane has of piece y lines 16w + g and 16w + g + 8, columns 8j + 2q and
// 8j + 2q + 1: o[y][4j + 2h + c].
using Columns = float[2][32];

__device__ __forceinline__ void clear(Columns& o) {             // what products will not look at: so that nothing is kept until then
#pragma unroll
  for (int y = 0; y < 2; y++)
#pragma unroll
    for (int e = 0; e < 32; e++) o[y][e] = 0.f;
}
__device__ __forceinline__ void copy(Columns& to, const Columns& o) {
#pragma unroll
  for (int y = 0; y < 2; y++)
#pragma unroll
    for (int e = 0; e < 32; e++) to[y][e] = o[y][e];
}

// Factors of this lane's two lines.
struct Both {
  float v[2];
  __device__ __forceinline__ float of(int e) const { return v[e >> 1 & 1]; }
};
__device__ __forceinline__ Both of_lines(const Lane& i, const float* from) { return {from[i.line], from[i.line + 8]}; }

// Of this lane's two lines: m and l of a partial.
struct Sums {
  float m[2], l[2];
  // Fold the later one into this; the factors of both.
  __device__ __forceinline__ void add(const Sums& later, Both& a, Both& b) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 sum = fold_sums(make_float2(m[h], l[h]), make_float2(later.m[h], later.l[h]), a.v[h], b.v[h]);
      m[h] = sum.x, l[h] = sum.y;
    }
  }
};
// Fold the later `o` into `to`.
__device__ __forceinline__ void fold_into(float (&to)[32], const float (&o)[32], const Both& a, const Both& b) {
#pragma unroll
  for (int e = 0; e < 32; e++) to[e] = fold(to[e], o[e], a.of(e), b.of(e));
}

// Of all groups so far, this thread's o is kept in the block's part of `spare`, which nobody else reads.
struct Spare {
  float4* at;
  __device__ __forceinline__ explicit Spare(float* spare)
      : at(reinterpret_cast<float4*>(spare) + (size_t)blockIdx.x * 16 * 2 * ROLE + threadIdx.x - ROLE) {}
  __device__ __forceinline__ void store(const Columns& o) const {
#pragma unroll
    for (int x = 0; x < 16; x++) {
      const float* v = &o[x / 8][x % 8 * 4];
      at[x * 2 * ROLE] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __device__ __forceinline__ void load(Columns& o) const {
#pragma unroll
    for (int x = 0; x < 16; x++) {
      const float4 v = at[x * 2 * ROLE];
      float* to = &o[x / 8][x % 8 * 4];
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
};

// The result of the job's lines, of which the first is at `out`. Four lanes turn their columns so that each writes eight of a line.
__device__ __forceinline__ void write(const Lane& i, Columns& o, const Both& inverse, bf16* out) {
  const bool odd = i.q & 1, second = i.q & 2;
#pragma unroll
  for (int y = 0; y < 2; y++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        u32 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float* at = &o[y][(j + k) * 4 + h * 2];
          v[k] = pack_bf16(__fmul_rn(at[0], inverse.v[h]), __fmul_rn(at[1], inverse.v[h]));
        }
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const u32 other = __shfl_xor_sync(ALL_LANES, odd ? v[k] : v[k + 1], 1);
          if (odd) v[k] = other; else v[k + 1] = other;
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const u32 other = __shfl_xor_sync(ALL_LANES, second ? v[k] : v[k + 2], 2);
          if (second) v[k] = other; else v[k + 2] = other;
        }
        bf16* to = out + (i.line + h * 8) * LATENT + (i.rank * HALF + i.role * 2 + y) * 64 + (j + i.q) * 8;
        *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
      }
}

// A unit of some of a row's keys is complete: partials of the job's lines, from `out` on, in the order of layout.cuh.
__device__ __forceinline__ void store_partial(const Lane& i, const Columns& o, const Sums& sums, const Partials& out) {
  if (i.q == 0 && i.role == 0 && i.rank == 0)
#pragma unroll
    for (int h = 0; h < 2; h++) out.ml[i.line + h * 8] = make_float2(sums.m[h], sums.l[h]);
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int x = 4 * (2 * w) + 2 * h + c;
        float* to = out.o + (i.line + h * 8) * LATENT + 64 * (i.rank * 4 + w) + 32 * i.role + 4 * (2 * i.q + c);
        *reinterpret_cast<float4*>(to) = make_float4(o[0][x], o[0][x + 4], o[1][x], o[1][x + 4]);
      }
}

// Partials of a job: which is the next, as units end.
struct Next {
  const Task& t;
  int heads, units = 0;
  __device__ __forceinline__ Next(const Task& task, int n) : t(task), heads(n) {}
  // Of tile x, in `shared` or `apart`.
  __device__ __forceinline__ Partials at(int x, const Partials& shared, const Partials& apart) const {
    const bool own = x >= t.shared;
    const long long part = own ? t.own + (long long)(x - t.shared) * heads : t.part + (long long)units * t.step;
    return {(own ? apart.o : shared.o) + part * LATENT, (own ? apart.ml : shared.ml) + part};
  }
  __device__ __forceinline__ void pass(int x) { units += ends(t, x); }
};

// A job's tiles as a value warp waits for them. phases: a bit for each kind of the other block's tiles and turn.
struct Tiles {
  const Lane& i;
  const Task& t;
  u32& phases;
  // Tile x of the job, the block's n-th, is here, and its probabilities.
  __device__ __forceinline__ Slots wait(int x, int n) const {
    const Slots slots(n, i.rank);
    if (slots.mine) {
      mbarrier_wait(ready(slots.turn), slots.k >> 1 & 1);
    } else {
      const bool page = x < t.pages;
      const int kind = (page ? TURNS : 0) + slots.turn;
      mbarrier_wait(full_values(page, slots.turn), phases >> kind & 1);
      phases ^= 1u << kind;
      mbarrier_wait(arrived(), (slots.k + slots.rank) & 1);
    }
    if (x >= t.pages) show_to_products();                       // what threads have copied; the copy engine's writes need none
    return slots;
  }
};
__device__ __forceinline__ Both maxima_of(const Lane& i, const Slots& slots, int n) {
  if (!slots.mine) wait_for_maxima(n);
  return of_lines(i, shared_at<float>(maxima_place(n, slots.mine)));
}
__device__ __forceinline__ void give_back(const Lane& i, const Slots& slots) {  // when all lanes are done with it
  __syncwarp();
  if (i.lane != 0) return;
  mbarrier_arrive(slots.mine ? empty_own(slots.turn, i.role) : empty_values(slots.turn, i.role));
  if (!slots.mine) arrive_beyond(i.beyond(room()));
}
// The law's column of ones: this warp's 16 lines of a tile's probabilities.
__device__ __forceinline__ void add_weights(const Lane& i, float (&l)[4], const Slots& slots) {
  constexpr u32 ONES = 0x3f803f80u;
  const u32 from = slots.weights() + i.warp * 2 * UNIT_ROWS + (i.lane & 15) * 128;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 f[4];
    ldmatrix4(f, from + (((k * 2 + (i.lane >> 4)) ^ (i.lane & 7)) << 4));
    mma(l, f, ONES, ONES);
  }
}

// Weight the values of a tile. fresh: it is its unit's first.
__device__ __forceinline__ void add_values(const Lane& i, Columns& o, float (&l)[4], const Slots& slots, bool fresh) {
  const Both rescale = of_lines(i, slots.rescale());
  if (!fresh && !__all_sync(ALL_LANES, rescale.v[0] == 1.f && rescale.v[1] == 1.f)) {   // seldom; a factor of 1 changes no bit
#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
      for (int e = 0; e < 32; e++) o[y][e] = __fmul_rn(o[y][e], rescale.of(e));
#pragma unroll
    for (int e = 0; e < 4; e++) l[e] = __fmul_rn(l[e], rescale.of(e));
  }
  const u64 weights = operand(slots.weights()), values = operand(slots.values(i.role));
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int y = 0; y < 2; y++)
      product_turned<true>(o[y], further(weights, k * 32), further(values, y * PIECE + k * 2 * UNIT_ROWS), k > 0 || !fresh);
  products_commit();
  add_weights(i, l, slots);
  products_wait<0>();
  settle(o[0]), settle(o[1]);
}
__device__ __forceinline__ void begin_unit(Columns& o, float (&l)[4]) {
  clear(o);
  l[0] = l[1] = l[2] = l[3] = 0.f;
}
// Of a unit that is complete with tile n.
__device__ __forceinline__ Sums sums_of(const Lane& i, const float (&l)[4], const Slots& slots, int n) {
  const Both m = maxima_of(i, slots, n);
  return {{m.v[0], m.v[1]}, {l[0], l[2]}};
}

// The units of the keys before base(p), of tiles of a whole row: into `group` and `all`, which are those of all groups in the end.
__device__ __forceinline__ void value_groups(const Task& task, const Tiles& tiles, Columns& o, Columns& group, Sums& all,
                                             const Spare& spare, int n) {
  int unit = 0;                                                 // tile at which the unit begins
  bool first = true;                                            // there is no group yet
  float l[4];
  Sums grouped{};
  begin_unit(o, l);
  for (int x = 0; x < task.shared; x++, n++) {
    const Slots slots = tiles.wait(x, n);
    add_values(tiles.i, o, l, slots, x == unit);
    const Stand at(task, x, unit);
    if (!at.complete) {
      give_back(tiles.i, slots);
      continue;
    }
    const Sums one = sums_of(tiles.i, l, slots, n);
    give_back(tiles.i, slots);
    unit = x + 1;
    Both a, b;
    if (at.begins_group) {
      copy(group, o);
      grouped = one;
    } else {
      grouped.add(one, a, b);
      fold_into(group[0], o[0], a, b);
      fold_into(group[1], o[1], a, b);
    }
    begin_unit(o, l);
    if (!at.ends_group) continue;
    if (first) {
      all = grouped;
    } else {
      all.add(grouped, a, b);
      spare.load(o);
      fold_into(o[0], group[0], a, b);
      fold_into(o[1], group[1], a, b);
      copy(group, o);
    }
    clear(o);
    first = false;
    if (x + 1 < task.shared) spare.store(group);
  }
}

// A node's own keys, one tile or two, the n-th one and the next: a unit each, and a group. Both are weighted piece by piece, so
// that no third set of columns is needed. There are other groups, in `group` and `all`, if there are keys before these.
__device__ __forceinline__ void value_own(const Task& task, const Tiles& tiles, Columns& o, Columns& group, Sums& all, int n,
                                          bf16* out) {
  const bool two = task.tiles - task.shared > 1;
  const Slots slots = tiles.wait(task.shared, n), last = two ? tiles.wait(task.shared + 1, n + 1) : slots;
  float l[4] = {0.f, 0.f, 0.f, 0.f};
  Both a{}, b{}, before{}, grouped{};
  add_weights(tiles.i, l, slots);
  Sums own = sums_of(tiles.i, l, slots, n);
  if (two) {
    l[0] = l[1] = l[2] = l[3] = 0.f;
    add_weights(tiles.i, l, last);
    own.add(sums_of(tiles.i, l, last, n + 1), a, b);
  }
  if (task.shared > 0) all.add(own, before, grouped); else all = own;
#pragma unroll
  for (int y = 0; y < 2; y++) {                                 // the second products are not looked at if there is one tile
    const u64 values = operand(slots.values(tiles.i.role) + y * PIECE), more = operand(last.values(tiles.i.role) + y * PIECE);
    clear(o);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      product_turned<true>(o[0], further(operand(slots.weights()), k * 32), further(values, k * 2 * UNIT_ROWS), k > 0);
      product_turned<true>(o[1], further(operand(last.weights()), k * 32), further(more, k * 2 * UNIT_ROWS), k > 0);
    }
    products_commit();
    products_wait<0>();
    settle(o[0]), settle(o[1]);
    if (two) fold_into(o[0], o[1], a, b);
    if (task.shared > 0) fold_into(group[y], o[0], before, grouped);
    else
#pragma unroll
      for (int e = 0; e < 32; e++) group[y][e] = o[0][e];
  }
  give_back(tiles.i, slots);
  if (two) give_back(tiles.i, last);
  write(tiles.i, group, {__frcp_rn(all.l[0]), __frcp_rn(all.l[1])}, out);
}

// Units of some of a row's keys, each a partial.
__device__ __forceinline__ void value_units(const Task& task, const Tiles& tiles, Columns& o, int n, int heads,
                                            const Partials& shared, const Partials& apart) {
  Next next(task, heads);
  bool fresh = true;
  float l[4];
  begin_unit(o, l);
  for (int x = 0; x < task.tiles; x++, n++) {
    const Slots slots = tiles.wait(x, n);
    add_values(tiles.i, o, l, slots, fresh);
    fresh = ends(task, x);
    if (!fresh) {
      give_back(tiles.i, slots);
      continue;
    }
    const Sums sums = sums_of(tiles.i, l, slots, n);
    give_back(tiles.i, slots);
    store_partial(tiles.i, o, sums, next.at(x, shared, apart));
    begin_unit(o, l);
    next.pass(x);
  }
}

__device__ __forceinline__ void value_role(int jobs, int heads, float* spare_of_blocks, const Partials& shared,
                                           const Partials& apart, bf16* out) {
  const Lane i = here();
  const Spare spare(spare_of_blocks);
  Columns o, group;
  u32 phases = 0;
  for (int job = 0, n = 0; job < jobs; job++) {
    const Task task = task_of(job);
    const Tiles tiles{i, task, phases};
    Sums all{};
    if (task.whole) {
      value_groups(task, tiles, o, group, all, spare, n);
      value_own(task, tiles, o, group, all, n + task.shared, out + task.line * LATENT);
    } else {
      value_units(task, tiles, o, n, heads, shared, apart);
    }
    n += task.tiles;
  }
}
