// Partial attention results of one layer on Hopper: blocks take jobs of plan.cu, as in attend.cu, with warpgroup products. The law is
// in layout.cuh; nothing below is part of it but what it says of COLUMNS.
//
// Lines are columns: a tile's scores are keys x lines, results are 512 values x lines, so 8 lines cost 8 columns and up to 72 lines
// (9 nodes of 8 heads) read a tile once. Four roles of four warps: scores; values of columns 0..255 of a latent; of the others; copies.
//  EIGHTS  most eights of lines of a job (fewer are taken as they are)      SLOTS  tiles of latents
//  WALK  1: a block folds units into groups itself (columns_walk.cuh)
//
// Shared memory: of each slot eight pieces of values, 64 keys x 128 bytes; rotary pieces; queries as nine pieces of lines x 128 bytes;
// the rest. Probabilities, lines x 64 keys, take the place of their tile's rotary piece, and 1,024 bytes beside it beyond 64 lines.
//
// A tile is announced to scores by `full`, its slot's halves (32 keys; the second also has the rotary piece) given back by `empty`.
// Barriers: 0 everybody; PROBABILITIES: those of a tile are written; TAKEN: they are used up; SCORES: all score warps.
#include "layout.cuh"
#include "warpgroup.cuh"

#ifndef EIGHTS
#define EIGHTS 1
#endif
#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef WALK
#define WALK 0
#endif
static_assert(LATENT == 512 && ROPE == 64 && (EIGHTS == 1 || EIGHTS == 4 || (EIGHTS == 9 && !WALK)), "no such shape");

constexpr int ROLE = 128, THREADS = 4 * ROLE;            // threads
constexpr int PIECES = 8, PIECE = TILE * 128, VALUE_BYTES = PIECES * PIECE;
constexpr int MOST = EIGHTS * 8;                         // lines
constexpr int PROBABILITIES = 1, TAKEN = 2, SCORES = 3;
constexpr int SCORE_REGISTERS = WALK ? 72 : 104, VALUE_REGISTERS = WALK ? 192 : 176, COPY_REGISTERS = 56;
static_assert(ROLE * (SCORE_REGISTERS + 2 * VALUE_REGISTERS + COPY_REGISTERS) <= 65536, "more registers than a multiprocessor has");

struct Place {                                          // in shared memory, bytes; sizes.py has the same sum
  static constexpr int beside = EIGHTS > 8 ? 1024 : 0;
  static constexpr int rope = SLOTS * VALUE_BYTES;
  static constexpr int q = rope + SLOTS * PIECE + beside;
  static constexpr int rescale = q + (PIECES + 1) * MOST * 128;
  static constexpr int maxima = rescale + MOST * 4;     // bf16: of each pair of lines, each score warp's
  static constexpr int unit_m = maxima + MOST * 8;      // of two units in turn, if blocks walk
  static constexpr int barriers = unit_m + (WALK ? MOST * 8 : 0);   // full of each slot, empty of each half
  static constexpr int next = barriers + SLOTS * 24;    // the block's next job, in turn
  static constexpr int moved = next + 8;                // whether any maximum moved: seldom, and values need not look at each
  static constexpr int end = moved + 8;
};
static_assert(EIGHTS <= 8 || SLOTS == 2, "two tiles share what is beside their rotary pieces");
#ifdef SHARED_BYTES
static_assert(Place::end == SHARED_BYTES, "the launcher computes another size of shared memory");
#endif

template <class T> __device__ __forceinline__ T* shared_at(int offset) { return reinterpret_cast<T*>(raw + offset); }
__device__ __forceinline__ void everybody() { bar_sync<0, THREADS>(); }
__device__ __forceinline__ u32 values_at(int slot) { return shared_address(raw) + slot * VALUE_BYTES; }
__device__ __forceinline__ u32 rope_at(int slot) { return shared_address(raw) + Place::rope + slot * (PIECE + Place::beside); }
__device__ __forceinline__ u32 p_at(int slot) { return rope_at(slot) - (slot ? Place::beside : 0); }
__device__ __forceinline__ u32 full(int slot) { return shared_address(raw) + Place::barriers + slot * 8; }
__device__ __forceinline__ u32 empty(int slot, int half) { return full(SLOTS + slot * 2 + half); }

// A block's job as every role sees it. An eight of lines is of one node: heads are a multiple of 8.
struct Task {
  int begin, tiles, count;              // keys: position, tiles, how many of a tile's 64 count
  int lowest;                           // base of the row's node 0; a deeper node's is the same or TILE more (a tree is 64 deep at most)
  u32 deeper;                           // the eights whose base is TILE more
  int eights, step;                     // of the job; from a unit's partial to the next's
  long long part;
  bool shared, whole;                   // whole: one partial for all of the row's groups
  __device__ __forceinline__ Task(const Job& job, const Inputs& in) : count(TILE), eights(job.live / 8) {
    const int lane = threadIdx.x & 31;
    shared = job.kind == SHARED_KEYS;
    whole = shared && job.spare != job.part;
    lowest = base_of(job.length);
    if (shared) {
      bool more = false;
      const long long token = job.token + (job.first + lane * 8) / in.heads;
      if (lane < eights) more = base_of(job.length + depth_of(in.masks, in.words, token)) > lowest;
      deeper = __ballot_sync(ALL_LANES, more);
      begin = job.begin;
      tiles = (min(job.end, lowest + (deeper ? TILE : 0)) - begin) / TILE;
      step = job.step;
      part = job.part;
    } else {
      const int p = job.length + depth_of(in.masks, in.words, job.token), from = base_of(p) + TILE * job.begin;
      count = min(TILE, p + 1 - from);
      deeper = 0;
      lowest = WHOLE;
      begin = 0;
      tiles = count > 0;
      step = 0;
      part = ((long long)job.token * 2 + job.begin) * in.heads + job.first;
    }
    tiles = max(tiles, 0);
  }
  // Eight j has the keys of the tile, or the unit, from position k.
  __device__ __forceinline__ bool on(int j, int k) const { return j < eights && (k < lowest || (k == lowest && (deeper >> j & 1))); }
  // Tile i is its unit's last.
  __device__ __forceinline__ bool ends(int i) const { return unit_ends(begin + i * TILE, i + 1 == tiles); }
  // Where the unit of tile i begins.
  __device__ __forceinline__ int unit_of(int i) const { return shared ? (begin + i * TILE) & -size_at(begin + i * TILE, UNIT) : 0; }
};

// ------------------------------------------------------------------------------------------------- scores
// A lane has keys 16w + g and 16w + g + 8 of a tile, lines 8j + 2q and 8j + 2q + 1: s[4j + 2h + c].
template <int E> __device__ __forceinline__ void score_role(const Task& task, float scale, const Partials& out, int past) {
  const int warp = threadIdx.x >> 5, L = threadIdx.x & 31, g = L >> 2, q = L & 3, key = warp * 16 + g;
  const u64 queries = operand(shared_address(raw) + Place::q);
  // stmatrix: lanes 0..7 and 8..15 name the lines of eight j and this warp's first and second 8 keys, lanes 16..31 those of eight j + 1.
  const u32 to = (L >> 4) * UNIT_ROWS + (L & 7) * 128 + (((warp * 2 + (L >> 3 & 1)) ^ (L & 7)) << 4);
  long long part = task.part;
  int unit_turn = 0;
  float m[E][2];
#pragma unroll
  for (int j = 0; j < E; j++) m[j][0] = m[j][1] = minus_infinity();
  for (int i = 0; i < task.tiles; i++) {
    const int n = past + i, slot = n % SLOTS, k = task.begin + i * TILE;
    mbarrier_wait(full(slot), n / SLOTS & 1);
    show_to_products();
    float s[E * 4];
#pragma unroll
    for (int x = 0; x < E * 4; x++) s[x] = 0.f;
    const u64 keys = operand(values_at(slot)), rope = operand(rope_at(slot));
    products_begin();
#pragma unroll
    for (int x = 0; x < (PIECES + 1) * 4; x++) {
      const int piece = x / 4, step = x % 4 * 32;
      const u64 a = piece < PIECES ? further(keys, piece * PIECE + step) : further(rope, step);
      product<E, false>(s, a, further(queries, piece * MOST * 128 + step), x > 0);
    }
    products_commit();
    products_wait<0>();
    settle(s);
    if (task.count < TILE || k >= task.lowest)
#pragma unroll
      for (int x = 0; x < E * 4; x++)
        if (!task.on(x / 4, k) || key + (x & 2) * 4 >= task.count) s[x] = minus_infinity();
#pragma unroll
    for (int j = 0; j < E; j++) {
      u32 most = pack_bf16(fmaxf(s[4 * j], s[4 * j + 2]), fmaxf(s[4 * j + 1], s[4 * j + 3]));
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) most = max_bf16_pair(most, __shfl_xor_sync(ALL_LANES, most, d));
      if (g == j % 8) *shared_at<u32>(Place::maxima + (j * 4 + q) * 16 + warp * 4) = most;
    }
    bar_sync<SCORES, ROLE>();                                  // also: all scores are formed, the rotary piece is free
    float rescale[E][2];
    u32 p[E][2];
#pragma unroll
    for (int j = 0; j < E; j++) {
      const uint4 all = shared_load16(shared_address(raw) + Place::maxima + (j * 4 + q) * 16);
      const u32 most = max_bf16_pair(max_bf16_pair(all.x, all.y), max_bf16_pair(all.z, all.w));
      float safe[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float highest = __int_as_float((int)(c ? most & 0xffff0000u : most << 16));
        safe[c] = move_maximum(m[j][c], __fmul_rn(highest, scale), rescale[j][c]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
        p[j][h] = pack_bf16(ex2(__fmaf_rn(s[4 * j + 2 * h], scale, -safe[0])), ex2(__fmaf_rn(s[4 * j + 2 * h + 1], scale, -safe[1])));
    }
    if (i > 0) bar_sync<TAKEN, 3 * ROLE>(); else bar_sync<SCORES, ROLE>();                 // either way: all have read the maxima
    const u32 at = p_at(slot) + to;
#pragma unroll
    for (int j = 0; j + 1 < E; j += 2) stmatrix4_trans(at + j * UNIT_ROWS, p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]);
    if (E % 2) stmatrix2_trans(at - (L >> 4) * UNIT_ROWS + (E - 1) * UNIT_ROWS, p[E - 1][0], p[E - 1][1]);
    if (warp == 0) {
      bool same = true;
#pragma unroll
      for (int j = 0; j < E; j++) same = same && rescale[j][0] == 1.f && rescale[j][1] == 1.f;
      same = __all_sync(ALL_LANES, same);
      if (g == 0)
#pragma unroll
        for (int j = 0; j < E; j++) *shared_at<float2>(Place::rescale + (j * 8 + q * 2) * 4) = make_float2(rescale[j][0], rescale[j][1]);
      if (threadIdx.x == 0) *shared_at<int>(Place::moved) = !same;
    }
    show_to_products();
    const bool ends = task.ends(i);
    if (WALK && ends && warp == 0 && g == 0)
#pragma unroll
      for (int j = 0; j < E; j++) *shared_at<float2>(Place::unit_m + (unit_turn * MOST + j * 8 + q * 2) * 4) = make_float2(m[j][0], m[j][1]);
    bar_arrive<PROBABILITIES, 3 * ROLE>();
    if (!ends) continue;
    const int unit = task.unit_of(i);
#pragma unroll
    for (int j = 0; j < E; j++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        if (!WALK && warp == 0 && g == 0 && task.on(j, unit)) out.ml[part + j * 8 + q * 2 + c].x = m[j][c];
        m[j][c] = minus_infinity();
      }
    unit_turn ^= 1;
    part += task.step;
  }
}

// ------------------------------------------------------------------------------------------------- values
// Warpgroup v has columns 256v .. of a latent in four tiles of 64: a lane has rows 16w + g and 16w + g + 8 of each tile, of lines 8j + 2q and
// 8j + 2q + 1. Warp 4v + w also sums the probabilities of 16 lines, if there are so many: the law's column of ones.
__device__ __forceinline__ float4* place_of(const Partials& out, long long partial) {   // of this lane, two
  return reinterpret_cast<float4*>(out.o + partial * LATENT + ((threadIdx.x - ROLE) >> 5) * 64 + (threadIdx.x >> 2 & 7) * 4);
}
template <int E> struct Acc {
  float o[4][E * 4], l[4];
  __device__ __forceinline__ static int pair() { return (threadIdx.x - ROLE) >> 5; }   // of eights: whose sums this warp has
  __device__ __forceinline__ void rescale() {
    const int q = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
    if (!*shared_at<int>(Place::moved)) return;                 // a factor of 1 changes no bit
    float2 r[E];
#pragma unroll
    for (int j = 0; j < E; j++) r[j] = *shared_at<float2>(Place::rescale + (j * 8 + q * 2) * 4);
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int x = 0; x < E * 4; x++) o[t][x] = __fmul_rn(o[t][x], x & 1 ? r[x / 4].y : r[x / 4].x);
    if (pair() * 2 < E)
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int line = pair() * 16 + (x >> 1) * 8 + g;
        if (line < E * 8) l[x] = __fmul_rn(l[x], shared_at<float>(Place::rescale)[line]);
      }
  }
  // The unit from position `unit` is complete, a partial. Its maxima are written here if blocks walk, else by score warps.
  __device__ __forceinline__ void store(const Task& task, int unit, const Partials& out, long long part, const float* unit_m) const {
    const int q = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
    for (int j = 0; j < E; j++) {
      if (!task.on(j, unit)) continue;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float4* to = place_of(out, part + j * 8 + q * 2 + c);
        to[0] = make_float4(o[0][4 * j + c], o[0][4 * j + 2 + c], o[1][4 * j + c], o[1][4 * j + 2 + c]);
        to[8] = make_float4(o[2][4 * j + c], o[2][4 * j + 2 + c], o[3][4 * j + c], o[3][4 * j + 2 + c]);
      }
    }
    if (q == 0)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int j = pair() * 2 + h;
        if (j >= E || !task.on(j, unit)) continue;
        if (WALK) out.ml[part + j * 8 + g].x = unit_m[j * 8 + g];
        out.ml[part + j * 8 + g].y = l[h * 2];
      }
  }
};
#if WALK
#include "columns_walk.cuh"
#endif

template <int E> __device__ __forceinline__ void value_role(const Task& task, const Partials& out, int past) {
  constexpr u32 ONES = 0x3f803f80u;
  const int pair = Acc<E>::pair(), L = threadIdx.x & 31;
  const u32 mine = (pair >> 2) * 4 * PIECE;
  const u32 line = pair * 2 * UNIT_ROWS + (L & 15) * 128;       // of this lane's address for ldmatrix of probabilities
  long long part = task.part;
  Acc<E> a;
#pragma unroll
  for (int t = 0; t < 4; t++)
#pragma unroll
    for (int x = 0; x < E * 4; x++) a.o[t][x] = 0.f;
  a.l[0] = a.l[1] = a.l[2] = a.l[3] = 0.f;
#if WALK
  Walk<E> walk;
#endif
  int unit_turn = 0;
  bool fresh = true;                                            // the tile is its unit's first
  for (int i = 0; i < task.tiles; i++) {
    const int n = past + i, slot = n % SLOTS;
    const u32 p = p_at(slot);
    const u64 values = operand(values_at(slot) + mine), weights = operand(p);
    bar_sync<PROBABILITIES, 3 * ROLE>();
    show_to_products();                                         // the tile's values too, which score warps know to be here
    if (!fresh) a.rescale();
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int t = 0; t < 4; t++)
        product<E, true>(a.o[t], further(values, t * PIECE + k * 2 * UNIT_ROWS), further(weights, k * 32), k > 0 || !fresh);
      if (k % 2) products_commit();
    }
    if (pair * 2 < E)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        u32 f[4];
        ldmatrix4(f, p + line + (((k * 2 + (L >> 4)) ^ (L & 7)) << 4));
        mma(a.l, f, ONES, ONES);
      }
    products_wait<1>();
    if (L == 0) mbarrier_arrive(empty(slot, 0));
    products_wait<0>();
#pragma unroll
    for (int t = 0; t < 4; t++) settle(a.o[t]);
    __syncwarp();                                               // all lanes have read their probabilities
    if (L == 0) mbarrier_arrive(empty(slot, 1));
    if (i + 1 < task.tiles) bar_arrive<TAKEN, 3 * ROLE>();
    fresh = task.ends(i);
    if (!fresh) continue;
    const float* unit_m = shared_at<float>(Place::unit_m) + unit_turn * MOST;
#if WALK
    if (task.shared) {
      const int end = task.begin + (i + 1) * TILE;
      if (walk.take(a, task, out, part, task.unit_of(i), end, i + 1 == task.tiles, unit_m)) part += task.step;
    } else
#endif
    {
      a.store(task, task.unit_of(i), out, part, unit_m);
      part += task.step;
    }
    unit_turn ^= 1;
    a.l[0] = a.l[1] = a.l[2] = a.l[3] = 0.f;
  }
}

// ------------------------------------------------------------------------------------------------- copies
// Sixteen rows at once, eight threads a row.
struct Copier {
  const Inputs& in;
  const int* table;
  int row, chunk;
  u32 turned;                                                   // this thread's place in its row of any piece, and its row
  __device__ __forceinline__ Copier(const Inputs& i, int table_row) : in(i), table(i.table + (size_t)table_row * i.pages) {
    const int v = threadIdx.x - 3 * ROLE;
    row = v / 8;
    chunk = v % 8;
    turned = row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ int page(int k) const { return table[k / TILE]; }
  // Keys r0 .. r0 + 31 of a tile, and with the second 32 all rotary pieces. from(r): key r's latent. Every key is a real one: a copy of
  // zeros from a pointer chosen by its predicate lost the pointer's upper half in ptxas, and faulted within some hundred launches.
  template <class F> __device__ __forceinline__ void half(int slot, int h, F from) const {
#pragma unroll
    for (int r = h * 32; r < h * 32 + 32; r += 16) {
      const bf16* key = from(r + row);
#pragma unroll
      for (int c = 0; c < PIECES; c++)
        copy16(values_at(slot) + c * PIECE + r * 128 + turned, key + c * 64 + chunk * 8);
    }
    if (h)
#pragma unroll
      for (int r = 0; r < TILE; r += 16) {
        copy16(rope_at(slot) + r * 128 + turned, from(r + row) + LATENT + chunk * 8);
      }
  }
  // The block's n-th tile, counted over all its jobs, once its slot is free. Not announced yet.
  template <class F> __device__ __forceinline__ void tile(int n, F from) const {
    const int slot = n % SLOTS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (n >= SLOTS) mbarrier_wait(empty(slot, h), (n / SLOTS - 1) & 1);
      half(slot, h, from);
    }
  }
  __device__ __forceinline__ void announce(int n) const { copy_arrive(full(n % SLOTS)); }   // when all copies so far are done
  __device__ __forceinline__ void queries(size_t line, int live, int lines) const {
    const u32 at = shared_address(raw) + Place::q;
    for (int r = row; r < lines; r += 16)
#pragma unroll
      for (int c = 0; c < PIECES + 1; c++) {
        const size_t x = r < live ? line + r : line;
        const bf16* from = c < PIECES ? in.q + x * LATENT + c * 64 : in.q_pe + x * in.pe_stride;
        copy16(at + c * MOST * 128 + (r - row) * 128 + turned, from + chunk * 8);
      }
  }
};

// Slots of the keys base(p)..p of a node: tile `from` of them, `count` keys. The row's first key, which every node has, stands in for those
// that the tile lacks: their probabilities are 0.
__device__ __forceinline__ void own_slots(const Job& job, const Inputs& in, const Copier& copier, int from, int count, int* slots) {
  const int v = threadIdx.x - 3 * ROLE;
  auto slot_of = [&](int position) { return copier.page(position) * TILE + position % TILE; };
  for (int x = v; x < TILE; x += ROLE)
    if (x >= count || from + x < job.length) slots[x] = slot_of(x >= count ? 0 : from + x);
  for (int n = v; n < in.words * 64; n += ROLE) {            // ancestor n: at depth = set bits below it, stored at length + n
    const u64* mask = in.masks + (size_t)job.token * in.words;
    if (!(mask[n >> 6] >> (n & 63) & 1)) continue;
    int depth = __popcll(mask[n >> 6] & ((1ull << (n & 63)) - 1));
    for (int w = 0; w < n >> 6; w++) depth += __popcll(mask[w]);
    const int x = job.length + depth - from;
    if (x >= 0 && x < TILE) slots[x] = slot_of(job.length + n);
  }
}

// first_page: that of the first key of all nodes. Returns the tiles that the block has had so far.
__device__ __forceinline__ int copy_job(const Job& job, const Inputs& in, int lines, int past, int first_page) {
  const Copier copier(in, job.row);
  auto queries = [&]() { copier.queries((size_t)job.token * in.heads + job.first, job.live, lines); };
  if (job.kind == OWN_KEYS) {
    const Task task(job, in);
    int* slots = shared_at<int>((past + 1) % SLOTS * VALUE_BYTES);      // of the next tile, which this job does not have
    const int from = base_of(job.length + depth_of(in.masks, in.words, job.token)) + TILE * job.begin;
    own_slots(job, in, copier, from, task.count, slots);
    bar_sync<SCORES + 1, ROLE>();
    if (task.tiles == 0) return past;
    copier.tile(past, [&](int r) { return in.cache + (size_t)slots[r] * WIDTH; });
    queries();
    copier.announce(past);
    return past + 1;
  }
  int n = past, k = job.begin, page = first_page;
  auto next = [&]() {                                           // latents come from further away than queries
    const bf16* keys = in.cache + (size_t)page * TILE * WIDTH;
    k += TILE;
    page = copier.page(min(k, job.end - 1));                    // of the next tile, if there is one
    copier.tile(n, [&](int r) { return keys + (size_t)r * WIDTH; });
    if (n == past) queries();
    copier.announce(n++);
  };
  while (k < min(job.end, base_of(job.length))) next();         // keys of all nodes: no need to know how deep they are
  const Task task(job, in);
  while (n < past + task.tiles) next();
  return n;
}

// ------------------------------------------------------------------------------------------------- jobs
// A job has as many eights of lines as it needs.
template <class F> __device__ __forceinline__ void by_lines(int eights, F f) {
  if (EIGHTS == 1 || eights == 1) f.template operator()<1>();
  else if (eights <= 5) f.template operator()<EIGHTS < 5 ? EIGHTS : 5>();
  else f.template operator()<EIGHTS>();
}
__device__ __forceinline__ int lines_of(const Job& job) { return job.live <= 8 ? 8 : job.live <= 40 ? min(MOST, 40) : MOST; }

struct Score {
  const Task& task; const Inputs& in; Partials out; int past;
  template <int E> __device__ __forceinline__ void operator()() const { score_role<E>(task, in.scale, out, past); }
};
struct Value {
  const Task& task; Partials out; int past;
  template <int E> __device__ __forceinline__ void operator()() const { value_role<E>(task, out, past); }
};

// A role's jobs, read where they are: kept in registers they cost copies 108 bytes of spills. The next one is known when everybody is
// done with this one.
template <class F> __device__ __forceinline__ void work(const Job* jobs, int total, int turn, int past, int j, F one) {
  const int* next = shared_at<int>(Place::next);
  for (; j < total; turn ^= 1) {
    past = one(jobs[j], turn, past);
    everybody();                                               // the next job writes the same shared memory
    j = next[turn];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_attend(
    const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages, const u64* masks, int words, int heads,
    float scale, const Job* jobs, Head* head, float* o, float2* ml, float* own_o, float2* own_ml) {
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  const int role = threadIdx.x / ROLE;
  // Ahead of the wait: the plan and pages are older than what may still run (rule (b) of common.cuh; the plan lets nobody start early).
  const int total = load_new(&head->jobs), blocks = gridDim.x;
  Job first = load_all_new(&jobs[blockIdx.x]);                 // there is room for it, whether or not it is one
  if (threadIdx.x < SLOTS * 3) mbarrier_begin(full(threadIdx.x), threadIdx.x < SLOTS ? ROLE : 2 * ROLE / 32);
  everybody();
  const int page = role == 3 && (int)blockIdx.x < total ? load_new(&table[(size_t)first.row * pages + first.begin / TILE]) : 0;
  pdl_wait();
  pdl_go();
  if (role == 0) {
    give_registers<SCORE_REGISTERS>();
    work(jobs, total, 0, 0, blockIdx.x, [&](const Job& at, int, int past) {
      const Task task(at, in);
      by_lines(task.eights, Score{task, in, {task.shared ? o : own_o, task.shared ? ml : own_ml}, past});
      return past + task.tiles;
    });
  } else if (role == 3) {
    give_registers<COPY_REGISTERS>();
    auto fetch = [&](const Job& at, int turn, int past, int first_page) {
      if (threadIdx.x == 3 * ROLE) shared_at<int>(Place::next)[turn] = total > blocks ? blocks + (int)atomicAdd(&head->next, 1u) : total;
      return copy_job(at, in, lines_of(at), past, first_page);
    };
    int past = 0;
    if ((int)blockIdx.x < total) {
      past = fetch(first, 0, 0, page);
      everybody();
      work(jobs, total, 1, past, shared_at<int>(Place::next)[0], [&](const Job& at, int turn, int past) {
        return fetch(at, turn, past, table[(size_t)at.row * pages + at.begin / TILE]);
      });
    }
    copy_commit();
    copy_wait<0>();
    const bool last = total > blocks && threadIdx.x == 3 * ROLE && atomicAdd(&head->left, 1u) + 1 == (u32)blocks;
    if (last) head->next = head->left = 0;
  } else {
    take_registers<VALUE_REGISTERS>();
    work(jobs, total, 0, 0, blockIdx.x, [&](const Job& at, int, int past) {
      const Task task(at, in);
      by_lines(task.eights, Value{task, {task.shared ? o : own_o, task.shared ? ml : own_ml}, past});
      return past + task.tiles;
    });
  }
}
