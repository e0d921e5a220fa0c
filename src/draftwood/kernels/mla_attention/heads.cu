// Attention of one layer on Hopper for many nodes of 64 heads: a job is all heads of one node and all its keys, as in nodes.cu,
// whose plan and fold these are. Lines (heads) are rows: scores are lines x keys, results lines x values: 64 lines fill a product.
//
// A cluster of two blocks has a job; either has half of the 512 columns of values and forms all scores. So neither waits for the
// other but for keys: each fetches every other piece for both. Four roles of four warps: scores; values of 128 columns; of 128
// more; copies. They go from job to job without meeting: a role waits only for what it takes.
//
// Two tiles of keys fit, nine pieces of 64 keys x 128 bytes each: eight of values, one rotary. Whole pages come by the copy engine;
// tiles of a node's own keys are copied by threads. Pieces are announced three at a time (`full`, for either way) and given back in
// twos (`empty`): by value warps, or by score warps where the other block has the values. Probabilities take the place of their
// tile's rotary piece; they are there, and the factors of the fold with them, when a tile is `ready`, and used up when value warps
// give that piece back. Queries are those of one job (`asked`, `answered`). Copies tell the others of the next job (`told`): of
// four, for they are at most three ahead.
#include "layout.cuh"
#include "warpgroup.cuh"

static_assert(LATENT == 512 && ROPE == 64, "no such shape");
#ifndef TOGETHER
#define TOGETHER 2
#endif
constexpr int ROLE = 128, THREADS = 4 * ROLE;
constexpr int LINES_OF_JOB = 64, HALVES = 2;
constexpr int PIECES = 9, PIECE = TILE * 128, SLOTS = 2, PARTS = 3, PER_PART = PIECES / PARTS, PAIRS = (PIECES + 1) / 2;
constexpr int TASKS = 4, FULL = 2 * SLOTS * PARTS, EMPTY = SLOTS * PAIRS;    // of barriers
constexpr int COPIES = 2;                                // a barrier of the block
constexpr int SCORE_REGISTERS = 88, VALUE_REGISTERS = 192, COPY_REGISTERS = 40;
static_assert(ROLE * (SCORE_REGISTERS + 2 * VALUE_REGISTERS + COPY_REGISTERS) <= 65536, "more registers than a multiprocessor has");
#include "engine.cuh"

// What score warps tell value warps of a tile, of each line: by what values so far are multiplied; if a unit ends, the factors of
// its fold into the group, of the group's into all, and 1 / l.
enum Factor { RESCALE, BEFORE, LATER, ALL, GROUPED, INVERSE, FACTORS };

struct Place {                                           // in shared memory, bytes; sizes.py has the same sum
  static constexpr int q = SLOTS * PIECES * PIECE;
  static constexpr int factors = q + PIECES * PIECE;     // of two tiles in turn, as `moved`
  static constexpr int moved = factors + 2 * FACTORS * LINES_OF_JOB * 4;   // whether a maximum of 16 lines moved: seldom
  static constexpr int slots = moved + 2 * 16;           // of a node's own keys
  static constexpr int tasks = slots + 2 * TILE * 4;
  static constexpr int barriers = tasks + TASKS * 64;
  static constexpr int end = barriers + (FULL + EMPTY + 2 + 2 + TASKS) * 8;
};
#ifdef SHARED_BYTES
static_assert(Place::end == SHARED_BYTES, "the launcher computes another size of shared memory");
#endif

template <class T> __device__ __forceinline__ T* shared_at(int offset) { return reinterpret_cast<T*>(raw + offset); }
__device__ __forceinline__ u32 barrier(int i) { return shared_address(raw) + Place::barriers + i * 8; }
// Of pages, which the copy engine announces, and of other tiles, which copying threads do.
__device__ __forceinline__ u32 full(bool page, int slot, int part) { return barrier(((page ? SLOTS : 0) + slot) * PARTS + part); }
__device__ __forceinline__ u32 empty(int slot, int pair) { return barrier(FULL + slot * PAIRS + pair); }
__device__ __forceinline__ u32 ready(int slot) { return barrier(FULL + EMPTY + slot); }
__device__ __forceinline__ u32 asked() { return barrier(FULL + EMPTY + 2); }
__device__ __forceinline__ u32 answered() { return barrier(FULL + EMPTY + 3); }
__device__ __forceinline__ u32 told(int job) { return barrier(FULL + EMPTY + 4 + job % TASKS); }
// Who arrives at barrier i: threads, or warps.
__device__ __forceinline__ int arrivals(int i) {
  if (i < SLOTS * PARTS || barrier(i) == asked()) return ROLE;
  if (i < FULL) return PAGE_ARRIVALS;
  if (i < FULL + EMPTY) return ((i - FULL) % PAIRS == PAIRS - 1 ? 8 : 4) * TOGETHER;
  return barrier(i) >= told(0) ? 1 : 4;
}

__device__ __forceinline__ int half_of_block() { return (int)blockIdx.x % HALVES; }
__device__ __forceinline__ u32 piece_at(int slot, int c) { return shared_address(raw) + (slot * PIECES + c) * PIECE; }
// The places of the block's n-th tile, as copies.cuh wants them. Pieces are free in pairs.
struct Slots {
  static constexpr int TURNS = SLOTS;
  int n;
  __device__ __forceinline__ explicit Slots(int tile) : n(tile) {}
  __device__ __forceinline__ u32 at(int c) const { return piece_at(n % SLOTS, c); }
  __device__ __forceinline__ void wait(int c) const {
    if (c % 2 == 0 && n >= SLOTS) mbarrier_wait(empty(n % SLOTS, c / 2), (n / SLOTS - 1) & 1);
  }
};
__device__ __forceinline__ float* factors_of(int slot, int kind) {
  return shared_at<float>(Place::factors) + (slot * FACTORS + kind) * LINES_OF_JOB;
}

#include "jobs.cuh"

// Where tile x of a job, whose unit began with tile `unit`, stands in the fold.
struct Stand {
  bool complete, begins_group, ends_group;               // its unit is; and is its group's first, its group's last
  __device__ __forceinline__ Stand(const Task& t, int x, int unit) : complete(ends(t, x)) {
    const bool own = x >= t.shared;
    const int size = own ? TILE : size_at(unit * TILE, GROUP);
    begins_group = own ? x == t.shared : (unit * TILE & (size - 1)) == 0;
    ends_group = complete && (x + 1 == (own ? t.tiles : t.shared) || (!own && ((x + 1) * TILE & (size - 1)) == 0));
  }
};

// ------------------------------------------------------------------------------------------------- scores
// The n-th tile's scores: a lane has lines 16w + g and 16w + g + 8, keys 8j + 2q and 8j + 2q + 1: s[4j + 2h + c].
// phases: a bit for each kind of tile and slot.
__device__ __forceinline__ void form_scores(float (&s)[32], int n, bool page, u32& phases) {
  const int slot = n % SLOTS, kind = (page ? SLOTS : 0) + slot;
  const u64 queries = operand(shared_address(raw) + Place::q), keys = operand(piece_at(slot, 0));
#pragma unroll
  for (int x = 0; x < 32; x++) s[x] = 0.f;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    mbarrier_wait(full(page, slot, part), phases >> kind & 1);
    show_to_products();
    products_begin();
#pragma unroll
    for (int x = 0; x < PER_PART * 4; x++) {
      const int at = (part * PER_PART + x / 4) * PIECE + x % 4 * 32;
      product_turned<false>(s, further(queries, at), further(keys, at), part + x > 0);
    }
    products_commit();
  }
  phases ^= 1u << kind;
  products_wait<0>();
  settle(s);
}

// Of this lane's two lines: m and l of a partial.
struct Sums {
  float m[2], l[2];
  // Fold the later one into this; the factors of both.
  __device__ __forceinline__ void add(const Sums& later, float (&a)[2], float (&b)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 sum = fold_sums(make_float2(m[h], l[h]), make_float2(later.m[h], later.l[h]), a[h], b[h]);
      m[h] = sum.x, l[h] = sum.y;
    }
  }
};

// All that score warps keep of a job: a unit's maxima and sums, the group's, those of all groups.
struct Softmax {
  float m[2], l[4];                                      // l: of a product, of which columns are alike
  Sums grouped, all;
  int unit;                                              // tile with which the unit begins
  bool first;                                            // there is no group yet

  __device__ __forceinline__ void begin_unit(int tile) {
    m[0] = m[1] = minus_infinity();
    l[0] = l[1] = l[2] = l[3] = 0.f;
    unit = tile;
  }
  __device__ __forceinline__ static void tell(int slot, int kind, const float (&v)[2]) {
    const int warp = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7;
    if ((threadIdx.x & 3) != 0) return;
    float* to = factors_of(slot, kind) + warp * 16 + g;
    to[0] = v[0], to[8] = v[1];
  }

  // New maxima, and probabilities of the tile in place of its rotary piece.
  __device__ __forceinline__ void weigh(const float (&s)[32], float scale, int slot) {
    constexpr u32 ONES = 0x3f803f80u;
    const int warp = threadIdx.x >> 5, L = threadIdx.x & 31;
    float most[2] = {minus_infinity(), minus_infinity()}, safe[2], rescale[2];
#pragma unroll
    for (int x = 0; x < 32; x++) most[x >> 1 & 1] = fmaxf(most[x >> 1 & 1], s[x]);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], d));
    const u32 rounded = pack_bf16(most[0], most[1]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = __int_as_float((int)(h ? rounded & 0xffff0000u : rounded << 16));
      safe[h] = move_maximum(m[h], __fmul_rn(highest, scale), rescale[h]);
    }
#pragma unroll
    for (int x = 0; x < 4; x++) l[x] = __fmul_rn(l[x], rescale[x >> 1]);
    // stmatrix: lanes 0..7 and 8..15 name this warp's first and second 8 lines of a step's first 8 keys, 16..31 of the others.
    const u32 to = piece_at(slot, PIECES - 1) + warp * 2 * UNIT_ROWS + (L & 15) * 128;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 p[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {                        // h = i & 1, 8 keys = i >> 1
        const float* v = &s[(2 * k + (i >> 1)) * 4 + (i & 1) * 2];
        p[i] = pack_bf16(ex2(__fmaf_rn(v[0], scale, -safe[i & 1])), ex2(__fmaf_rn(v[1], scale, -safe[i & 1])));
      }
      mma(l, p, ONES, ONES);                               // the law's column of ones
      stmatrix4(to + (((k * 2 + (L >> 4)) ^ (L & 7)) << 4), p[0], p[1], p[2], p[3]);
    }
    tell(slot, RESCALE, rescale);
    const bool same = __all_sync(ALL_LANES, rescale[0] == 1.f && rescale[1] == 1.f);
    if (L == 0) shared_at<int>(Place::moved)[slot * 4 + warp] = !same;
  }

  // After tile x of a whole row: if its unit ends, the factors of the fold.
  __device__ __forceinline__ void fold_tile(const Task& t, int x, int slot) {
    const Stand at(t, x, unit);
    if (!at.complete) return;
    const Sums one{{m[0], m[1]}, {l[0], l[2]}};
    float a[2], b[2];
    begin_unit(x + 1);
    if (at.begins_group) {
      grouped = one;
    } else {
      grouped.add(one, a, b);
      tell(slot, BEFORE, a), tell(slot, LATER, b);
    }
    if (!at.ends_group) return;
    if (first) {
      all = grouped;
    } else {
      all.add(grouped, a, b);
      tell(slot, ALL, a), tell(slot, GROUPED, b);
    }
    first = false;
    if (x + 1 < t.tiles) return;
    const float inverse[2] = {__frcp_rn(all.l[0]), __frcp_rn(all.l[1])};
    tell(slot, INVERSE, inverse);
  }

  // After tile x of some of a row's keys: if its unit ends, m and l of partial `to`, which one of the blocks writes.
  __device__ __forceinline__ void store_tile(const Task& t, int x, float2* to) {
    if (!ends(t, x)) return;
    const int warp = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7;
    if ((threadIdx.x & 3) == 0 && half_of_block() == 0)
#pragma unroll
      for (int h = 0; h < 2; h++) to[warp * 16 + h * 8 + g] = make_float2(m[h], l[2 * h]);
    begin_unit(x + 1);
  }
};

// Partials of a job: which is the next, as units end.
struct Next {
  const Task& t;
  int heads, units = 0;
  __device__ __forceinline__ Next(const Task& task, int n) : t(task), heads(n) {}
  // Of tile x, in `shared` or `apart`.
  template <class T> __device__ __forceinline__ T* at(int x, T* shared, T* apart, int size) const {
    if (x < t.shared) return shared + (t.part + (long long)units * t.step) * size;
    return apart + (t.own + (long long)(x - t.shared) * heads) * size;
  }
  __device__ __forceinline__ void pass(int x) { units += ends(t, x); }
};

__device__ __forceinline__ void score_role(int jobs, float scale, int heads, float2* shared, float2* apart) {
  const int L = threadIdx.x & 31, q = L & 3, others = (1 - half_of_block()) * 2;
  float s[32];
  Softmax softmax;
  u32 phases = 0;
  for (int job = 0, n = 0; job < jobs; job++) {
    const Task task = task_of(job);
    Next next(task, heads);
    softmax.first = true;
    softmax.begin_unit(0);
    mbarrier_wait(asked(), job & 1);
    for (int x = 0; x < task.tiles; x++, n++) {
      const int slot = n % SLOTS;
      form_scores(s, n, x < task.pages, phases);
      __syncwarp();
      arrive_at_all(empty(slot, others));
      arrive_at_all(empty(slot, others + 1));
      if (L == 0 && x + 1 == task.tiles) mbarrier_arrive(answered());
      if (x + 1 == task.tiles && task.count < TILE)
#pragma unroll
        for (int e = 0; e < 32; e++)
          if (e / 4 * 8 + q * 2 + (e & 1) >= task.count) s[e] = minus_infinity();
      softmax.weigh(s, scale, slot);
      if (task.whole) {
        softmax.fold_tile(task, x, slot);
      } else {
        softmax.store_tile(task, x, next.at(x, shared, apart, 1));
        next.pass(x);
      }
      show_to_products();
      __syncwarp();
      if (L == 0) mbarrier_arrive(ready(slot));
    }
  }
}

#include "heads_values.cuh"
#include "copies.cuh"

// Jobs of a cluster: one of each round, in the order of nodes_plan.cu. spare: floats [blocks, 64, 256].
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) mla_attend(
    BOXES_OF(const bf16*) map, const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages,
    const u64* masks, int words, int heads, float scale, const Job* jobs, const Head* head, float* spare, float* o, float2* ml,
    float* own_o, float2* own_ml, bf16* out) {
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  const int role = threadIdx.x / ROLE, team = blockIdx.x / HALVES, teams = gridDim.x / HALVES;
  if (threadIdx.x < (Place::end - Place::barriers) / 8) mbarrier_begin(barrier(threadIdx.x), arrivals(threadIdx.x));
  cluster_begun<THREADS>();
  // The plan, masks and pages are older than what may still run (rule (b) of common.cuh; the plan lets nobody start early).
  const int mine = max(0, (load_new(&head->jobs) - team + teams - 1) / teams);
  if (role == 3) {
    give_registers<COPY_REGISTERS>();
    copy_role(jobs, team, teams, mine, in, &map);
    cluster_ended();
    return;
  }
  pdl_wait();
  pdl_go();
  if (role == 0) {
    give_registers<SCORE_REGISTERS>();
    score_role(mine, scale, heads, ml, own_ml);
  } else {
    take_registers<VALUE_REGISTERS>();
    value_role(mine, heads, spare, o, own_o, out);
  }
  cluster_ended();
}
