// What value warps of heads.cu do: they weight a tile's values, fold what is complete and write results.
#pragma once

// A value role has 128 columns of a latent in two pieces: a lane has of piece y lines 16w + g and 16w + g + 8, columns 8j + 2q and
// 8j + 2q + 1: o[y][4j + 2h + c].
using Columns = float[2][32];
struct Lane { int warp, q, g, role; };                          // warp and role: of four and of two
__device__ __forceinline__ Lane here() {
  const int t = threadIdx.x - ROLE;
  return {t >> 5 & 3, t & 3, t >> 2 & 7, t / ROLE};
}
__device__ __forceinline__ int first_piece() { return half_of_block() * 4 + here().role * 2; }

__device__ __forceinline__ void clear(Columns& o) {             // so that nothing is kept until then
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

// A factor of this lane's two lines.
struct Both {
  float v[2];
  __device__ __forceinline__ Both(int slot, int kind) {
    const float* from = factors_of(slot, kind) + here().warp * 16 + here().g;
    v[0] = from[0], v[1] = from[8];
  }
  __device__ __forceinline__ float of(int e) const { return v[e >> 1 & 1]; }
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
__device__ __forceinline__ void write(Columns& o, const Both& inverse, bf16* out) {
  const Lane i = here();
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
        bf16* to = out + (i.warp * 16 + h * 8 + i.g) * LATENT + (first_piece() + y) * 64 + (j + i.q) * 8;
        *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
      }
}

// A unit of some of a row's keys is complete: o of partials, the job's first line's at `out`, in the order of layout.cuh.
__device__ __forceinline__ void store_partial(const Columns& o, float* out) {
  const Lane i = here();
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int x = 4 * (2 * w) + 2 * h + c;
        float* to = out + (i.warp * 16 + h * 8 + i.g) * LATENT + 64 * (half_of_block() * 4 + w) + 32 * i.role + 4 * (2 * i.q + c);
        *reinterpret_cast<float4*>(to) = make_float4(o[0][x], o[0][x + 4], o[1][x], o[1][x + 4]);
      }
}

// Products with a tile's probabilities, once there are any.
__device__ __forceinline__ u64 weights_of(int slot) { return operand(piece_at(slot, PIECES - 1)); }
__device__ __forceinline__ void give_back(int slot) {           // when all lanes are done with it
  __syncwarp();
  arrive_at_all(empty(slot, first_piece() / 2));
  arrive_at_all(empty(slot, PAIRS - 1));
}

// Weight the values of the n-th tile and give its pieces back.
__device__ __forceinline__ void add_values(Columns& o, int n, bool fresh) {
  const int slot = n % SLOTS;
  const Both rescale(slot, RESCALE);
  if (!fresh && shared_at<int>(Place::moved)[slot * 4 + here().warp])   // a factor of 1 changes no bit
#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
      for (int e = 0; e < 32; e++) o[y][e] = __fmul_rn(o[y][e], rescale.of(e));
  const u64 weights = weights_of(slot), values = operand(piece_at(slot, first_piece()));
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int y = 0; y < 2; y++)
      product_turned<true>(o[y], further(weights, k * 32), further(values, y * PIECE + k * 2 * UNIT_ROWS), k > 0 || !fresh);
  products_commit();
  products_wait<0>();
  settle(o[0]), settle(o[1]);
}

__device__ __forceinline__ void wait_for_tile(int n) {
  mbarrier_wait(ready(n % SLOTS), n / SLOTS & 1);
  show_to_products();                                           // the tile's values too, which score warps know to be here
}

// The unit of the keys before base(p), of tiles of a whole row: into `group`, which is that of all groups in the end.
__device__ __forceinline__ void value_groups(const Task& task, Columns& o, Columns& group, const Spare& spare, int n) {
  int unit = 0;                                                 // tile at which the unit begins
  bool first = true;                                            // there is no group yet
  for (int x = 0; x < task.shared; x++, n++) {
    const int slot = n % SLOTS;
    if (x == unit) clear(o);                                    // products do not look at them
    wait_for_tile(n);
    const Both a(slot, BEFORE), b(slot, LATER), all(slot, ALL), grouped(slot, GROUPED);
    add_values(o, n, x == unit);
    give_back(slot);
    const Stand at(task, x, unit);
    if (!at.complete) continue;
    unit = x + 1;
    if (at.begins_group) {
      copy(group, o);
    } else {
      fold_into(group[0], o[0], a, b);
      fold_into(group[1], o[1], a, b);
    }
    if (!at.ends_group) continue;
    if (!first) {
      spare.load(o);
      fold_into(o[0], group[0], all, grouped);
      fold_into(o[1], group[1], all, grouped);
      copy(group, o);
    }
    first = false;
    if (x + 1 < task.shared) spare.store(group);
  }
}

// A node's own keys, one tile or two, the n-th one and the next: a unit each, and a group. Both are weighted piece by piece, so
// that no third set of columns is needed. before: there are other groups, in `group`.
__device__ __forceinline__ void value_own(int tiles, bool before, Columns& o, Columns& group, int n, bf16* out) {
  const int slot = n % SLOTS, last = (n + tiles - 1) % SLOTS;     // the same if there is one: products do not ask
  wait_for_tile(n);
  if (tiles > 1) wait_for_tile(n + 1);
  const Both a(last, BEFORE), b(last, LATER), all(last, ALL), grouped(last, GROUPED), inverse(last, INVERSE);
#pragma unroll
  for (int y = 0; y < 2; y++) {
    const u64 values = operand(piece_at(slot, first_piece() + y)), more = operand(piece_at(last, first_piece() + y));
    clear(o);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      product_turned<true>(o[0], further(weights_of(slot), k * 32), further(values, k * 2 * UNIT_ROWS), k > 0);
      product_turned<true>(o[1], further(weights_of(last), k * 32), further(more, k * 2 * UNIT_ROWS), k > 0);
    }
    products_commit();
    products_wait<0>();
    settle(o[0]), settle(o[1]);
    if (tiles > 1) fold_into(o[0], o[1], a, b);
    if (before) fold_into(group[y], o[0], all, grouped);
    else
#pragma unroll
      for (int e = 0; e < 32; e++) group[y][e] = o[0][e];
  }
  give_back(slot);
  if (tiles > 1) give_back(last);
  write(group, inverse, out);
}

// Units of some of a row's keys, each a partial.
__device__ __forceinline__ void value_units(const Task& task, Columns& o, int n, int heads, float* shared, float* apart) {
  Next next(task, heads);
  bool fresh = true;
  for (int x = 0; x < task.tiles; x++, n++) {
    if (fresh) clear(o);
    wait_for_tile(n);
    add_values(o, n, fresh);
    give_back(n % SLOTS);
    fresh = ends(task, x);
    if (fresh) store_partial(o, next.at(x, shared, apart, LATENT));
    next.pass(x);
  }
}

__device__ __forceinline__ void value_role(int jobs, int heads, float* spare_of_blocks, float* shared, float* apart, bf16* out) {
  const Spare spare(spare_of_blocks);
  Columns o, group;
  for (int job = 0, n = 0; job < jobs; job++) {
    const Task task = task_of(job);
    if (task.whole) {
      value_groups(task, o, group, spare, n);
      value_own(task.tiles - task.shared, task.shared > 0, o, group, n + task.shared, out + task.line * LATENT);
    } else {
      value_units(task, o, n, heads, shared, apart);
    }
    n += task.tiles;
  }
}
