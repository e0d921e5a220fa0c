// Partial attention results of one layer: blocks take jobs of plan.cu. The law is in layout.cuh; nothing below is part of it.
//
// Two roles. Four warps form the scores of a tile of 64 keys and its probabilities; the other warps keep O (each 64 of the 512
// columns), weight the tile's values with them, and copy latents ahead. Scores may be a tile ahead of values, so that either
// fills the other's gaps.
//  MT  most tiles of 16 lines of a job (fewer are taken as they are)      HALVES  32-key slots for latents: 2, 4 or 5
//  BLOCKS  of a multiprocessor
//  WALK  1: a block folds units into groups itself: of up to 32 lines in registers, of 64 in global memory (L2)
//
// Barriers, by id (one for even tiles, one for odd ones): 0 everybody; PROBABILITIES: those of a tile are written; TAKEN: they are
// used up; VALUES: all value warps; SCORES: all score warps. Score warps learn of latents that arrived by an mbarrier.
// Shared rows are whole 128-byte pieces; within one, 16 bytes c of row r are at c ^ turned(r), so that no access meets a bank twice:
// of eight rows (ldmatrix of values) nor of half a piece of two (16-byte loads of scores). Scores take their columns in an order in
// which a lane's 16 bytes are its part of two steps: such loads take the place of ldmatrix, for which scores waited. Queries and probabilities are
// kept as the fragments they are used as.
#include "layout.cuh"

#ifndef MT
#define MT 1
#endif
#ifndef HALVES
#define HALVES 4
#endif
#ifndef WALK
#define WALK 0
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif

constexpr int COLS = LATENT % 64 == 0 ? 8 : 2;         // n8 tiles of columns of a value warp
constexpr int SCORE_WARPS = 4, VALUE_WARPS = LATENT / 8 / COLS;
constexpr int SCORE_THREADS = SCORE_WARPS * 32, VALUE_THREADS = VALUE_WARPS * 32, THREADS = SCORE_THREADS + VALUE_THREADS;
constexpr int STEPS = WIDTH / 16, CHUNKS = WIDTH / 8;  // mma steps, and 16-byte chunks, of a latent
constexpr int PAIRS = (STEPS + 1) / 2;                 // of steps: 32 columns
constexpr int PIECES = (CHUNKS + 7) / 8, ROW_BYTES = PIECES * 128, HALF_BYTES = 32 * ROW_BYTES;
constexpr int PROBABILITIES = 1, TAKEN = 3, VALUES = 5, SCORES = 6;
static_assert(LATENT == COLS * 8 * VALUE_WARPS && (HALVES == 2 || HALVES >= 4) && (MT == 1 || MT == 2 || MT == 4), "no such shape");

struct Place {                                          // in shared memory, bytes; sizes.py has the same sum
  static constexpr int keys = 0;
  static constexpr int q = HALVES * HALF_BYTES;
  static constexpr int p_lines = MT == 4 ? 32 : MT * 16;
  static constexpr int p = q + MT * 16 * ROW_BYTES;     // probabilities, of two tiles in turn; so are rescale, unit_m and maxima
  static constexpr int rescale = p + 2 * p_lines * 128;
  static constexpr int unit_m = rescale + 2 * MT * 64;
  static constexpr int maxima = unit_m + 2 * MT * 64;
  static constexpr int maxima_bytes = MT == 4 ? 512 : 256;
  static constexpr int bases = maxima + 2 * maxima_bytes;
  static constexpr int group_m = bases + MT * 64;
  static constexpr int walk_m = group_m + (WALK ? MT * 64 : 0);
  static constexpr int work = walk_m + (WALK ? MT * 64 : 0);
  static constexpr int end = work + 64;
  static constexpr int slots = maxima;                  // of a node's own keys; used before maxima are
};
#ifdef SHARED_BYTES
static_assert(Place::end == SHARED_BYTES, "the launcher computes another size of shared memory");
#endif

// Of a thread: values need more than their share. Together no more than the block was given.
constexpr int SCORE_REGISTERS = MT == 4 ? 136 : 120, VALUE_REGISTERS = (504 - SCORE_REGISTERS) / 2;
constexpr bool SHIFT = VALUE_WARPS == 8 && BLOCKS == 1;
static_assert(SCORE_THREADS * SCORE_REGISTERS + VALUE_THREADS * VALUE_REGISTERS <= 168 * THREADS || !SHIFT, "more registers than a block has");

__device__ __forceinline__ void everybody() { bar_sync<0, THREADS>(); }
__device__ __forceinline__ int turned(int row) { return (row & 1) << 2 | (row >> 1 & 3); }
template <class T> __device__ __forceinline__ T* shared_at(int offset) { return reinterpret_cast<T*>(raw + offset); }

struct Outputs { Partials shared, own; };

// What both roles need to know of the block's job, in shared memory.
struct __align__(16) Work {
  int kind, begin, end, count;          // positions of its keys; how many of a tile's 64 count
  long long part, spare;                // as in Job; of a node's own keys in the other partials
  int step, next;                       // next: the job that this block does after this one
  u64 latents[2];                       // mbarriers
  // Tiles that are announced to score warps: at first those before `end` that have room, later those there are.
  __device__ __forceinline__ int announced(int tiles) const { return max(tiles, min((end - begin) / TILE, HALVES / 2)); }
};
static_assert(sizeof(Work) == 64, "its place");

// The mbarrier of a block's n-th tile, counted over all its jobs.
__device__ __forceinline__ u32 latents_of(int n) { return shared_address(raw + Place::work) + 40 + (n & 1) * 8; }

// Where this lane's fragment of tile t of lines, step k, of the probabilities is, of a tile of keys with turn 0 or 1 whose upper half
// is in slot `high`. Lines from 32 on are in the rotary columns of that half: its scores are done.
__device__ __forceinline__ u32 p_at(int t, int k, int turn, int high) {
  const u32 at = shared_address(raw), lane = threadIdx.x & 31;
  if (MT < 4 || t < 2) return at + Place::p + turn * Place::p_lines * 128 + (t * 4 + k) * 512 + lane * 16;
  return at + high * HALF_BYTES + (((t - 2) * 4 + k) * 4 + (lane >> 3)) * ROW_BYTES + LATENT * 2 + (lane & 7) * 16;
}
static_assert(MT < 4 || (ROPE == 64 && LATENT % 64 == 0), "probabilities fit the rotary columns");


// ------------------------------------------------------------------------------------------------- scores
// Score warps: LINE_GROUPS by lines, KEY_GROUPS by keys. Each forms LINES16 tiles of lines x KEYS8 tiles of keys.
template <int M> struct Split {
  static constexpr int LINE_GROUPS = M == 1 ? 1 : 2, KEY_GROUPS = SCORE_WARPS / LINE_GROUPS;
  static constexpr int LINES16 = M / LINE_GROUPS, KEYS8 = 8 / KEY_GROUPS;
  static constexpr int AHEAD = M == 4 ? 1 : 2;                 // pairs of steps whose fragments are loaded before they are needed
};

// Fragments of two steps: of 32 columns, each lane has 8 of its line and of its key. The first four are one step, the others one.
template <int M> struct Pair {
  using S = Split<M>;
  u32 a[S::LINES16][2][4], b[S::KEYS8][4];                    // of lines: by step
  __device__ __forceinline__ static void load16(u32 (&to)[4], u32 at) {
    const uint4 v = shared_load16(at);
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  }
  __device__ __forceinline__ void load(int i, u32 qa, u32 ka) {
    const u32 turn = (i & 1) << 6, piece = (i >> 1) * 128;
#pragma unroll
    for (int n = 0; n < S::KEYS8; n++) load16(b[n], (ka ^ turn) + piece + n * 8 * ROW_BYTES);
#pragma unroll
    for (int t = 0; t < S::LINES16; t++)
#pragma unroll
      for (int e = 0; e < 2; e++) load16(a[t][e], qa + ((t * PAIRS + i) * 2 + e) * 512);
  }
  __device__ __forceinline__ void multiply(float (&x)[2][S::LINES16][S::KEYS8][4], bool first) const {
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
      for (int t = 0; t < S::LINES16; t++)
#pragma unroll
        for (int n = 0; n < S::KEYS8; n++) {
          if (first) mma_first(x[e][t][n], a[t][e], b[n][e * 2], b[n][e * 2 + 1]);
          else mma(x[e][t][n], a[t][e], b[n][e * 2], b[n][e * 2 + 1]);
        }
  }
};

template <int M>
__device__ __forceinline__ void products(float (&s)[Split<M>::LINES16][Split<M>::KEYS8][4], u32 qa, u32 ka) {
  using S = Split<M>;
  float x[2][S::LINES16][S::KEYS8][4];
  Pair<M> f[S::AHEAD + 1];
#pragma unroll
  for (int k = 0; k < S::AHEAD; k++) f[k].load(k, qa, ka);
#pragma unroll
  for (int k = 0; k < PAIRS; k++) {
    if (k + S::AHEAD < PAIRS) f[(k + S::AHEAD) % (S::AHEAD + 1)].load(k + S::AHEAD, qa, ka);
    f[k % (S::AHEAD + 1)].multiply(x, k == 0);
  }
#pragma unroll
  for (int t = 0; t < S::LINES16; t++)
#pragma unroll
    for (int n = 0; n < S::KEYS8; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) s[t][n][j] = __fadd_rn(x[0][t][n][j], x[1][t][n][j]);
}

// A lane has, of each tile of 16 lines, lines g and g + 8, columns q2 and q2 + 1 of each n8 tile.
template <int M> __device__ __forceinline__ void score_role(int begin, int tiles, int count, float scale, int past) {
  using S = Split<M>;
  const int warp = threadIdx.x >> 5, L = threadIdx.x & 31, g = L >> 2, q2 = (L & 3) * 2, chunk = (L & 3) ^ turned(g);
  const int lines = warp / S::KEY_GROUPS, group = warp % S::KEY_GROUPS;
  const int line0 = lines * S::LINES16 * 16 + g, key0 = group * S::KEYS8 * 8;
  const u32 qa = shared_address(raw + Place::q) + lines * S::LINES16 * PAIRS * 1024 + L * 16;
  const u32 ka = shared_address(raw) + ((key0 & 31) + g) * ROW_BYTES + (chunk << 4);
  int bases[S::LINES16][2];
  float m[S::LINES16][2];
#pragma unroll
  for (int t = 0; t < S::LINES16; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      bases[t][h] = shared_at<int>(Place::bases)[line0 + t * 16 + h * 8];
      m[t][h] = minus_infinity();
    }
  int slot = 0, unit_turn = 0;
  for (int i = 0; i < tiles; i++) {
    const int turn = i & 1, high = slot + 1 >= HALVES ? 0 : slot + 1;
    mbarrier_wait(latents_of(past + i), (past + i) >> 1 & 1);
    float s[S::LINES16][S::KEYS8][4];
    products<M>(s, qa, ka + (key0 >> 5 ? high : slot) * HALF_BYTES);
    slot = high + 1 >= HALVES ? 0 : high + 1;
    float* maxima = shared_at<float>(Place::maxima + turn * Place::maxima_bytes);
    bool all = count == TILE;
#pragma unroll
    for (int t = 0; t < S::LINES16; t++) all = all && begin + i * TILE < bases[t][0] && begin + i * TILE < bases[t][1];
    if (!__all_sync(ALL_LANES, all))
#pragma unroll
      for (int t = 0; t < S::LINES16; t++)
#pragma unroll
        for (int n = 0; n < S::KEYS8; n++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (begin + i * TILE >= bases[t][j >> 1] || key0 + n * 8 + q2 + (j & 1) >= count) s[t][n][j] = minus_infinity();
#pragma unroll
    for (int t = 0; t < S::LINES16; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = minus_infinity();
#pragma unroll
        for (int n = 0; n < S::KEYS8; n++) most = fmaxf(most, fmaxf(s[t][n][h * 2], s[t][n][h * 2 + 1]));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        if (q2 == 0) maxima[group * M * 16 + line0 + t * 16 + h * 8] = most;
      }
    bar_sync<SCORES, SCORE_THREADS>();                        // also: all have their scores, rotary columns are free
    u32 p[S::LINES16][2][S::KEYS8];
    float rescale[S::LINES16][2];
#pragma unroll
    for (int t = 0; t < S::LINES16; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = minus_infinity();
#pragma unroll
        for (int k = 0; k < S::KEY_GROUPS; k++) most = fmaxf(most, maxima[k * M * 16 + line0 + t * 16 + h * 8]);
        const float safe = move_maximum(m[t][h], __fmul_rn(most, scale), rescale[t][h]);
#pragma unroll
        for (int n = 0; n < S::KEYS8; n++)
          p[t][h][n] = pack_bf16(ex2(__fmaf_rn(s[t][n][h * 2], scale, -safe)), ex2(__fmaf_rn(s[t][n][h * 2 + 1], scale, -safe)));
      }
    if (i > 1) { if (turn) bar_sync<TAKEN + 1, THREADS>(); else bar_sync<TAKEN, THREADS>(); }
    const bool ends = unit_ends(begin + i * TILE, i + 1 == tiles);
    float* rescales = shared_at<float>(Place::rescale) + turn * MT * 16;
    float* unit_m = shared_at<float>(Place::unit_m) + unit_turn * MT * 16;
#pragma unroll
    for (int t = 0; t < S::LINES16; t++) {
#pragma unroll
      for (int n = 0; n < S::KEYS8; n += 2)
        shared_store16(p_at(lines * S::LINES16 + t, (key0 / 8 + n) / 2, turn, high),
                       make_uint4(p[t][0][n], p[t][1][n], p[t][0][n + 1], p[t][1][n + 1]));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int line = line0 + t * 16 + h * 8;
        if (group == 0 && q2 == 0) {
          rescales[line] = rescale[t][h];
          if (ends) unit_m[line] = m[t][h];
        }
        if (ends) m[t][h] = minus_infinity();
      }
    }
    if (ends) unit_turn ^= 1;
    if (turn) bar_arrive<PROBABILITIES + 1, THREADS>(); else bar_arrive<PROBABILITIES, THREADS>();
  }
}

// ------------------------------------------------------------------------------------------------- values
struct Lane { int warp, lane, g, q; };
__device__ __forceinline__ Lane value_lane() {
  const int l = threadIdx.x & 31;
  return {((int)threadIdx.x >> 5) - SCORE_WARPS, l, l >> 2, l & 3};
}

// Of the lines of M tiles: this warp's columns. l: of tile `warp`, in warps below M; all its columns are the same.
template <int M> struct Acc {
  float o[M][COLS][4], l[4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < M; t++)
#pragma unroll
      for (int n = 0; n < COLS; n++) o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.f;
    l[0] = l[1] = l[2] = l[3] = 0.f;
  }
  // Columns of lines g + 8h of tile t, pair n of n8 tiles, as partials keep them.
  __device__ __forceinline__ float4 at(int t, int h, int n) const {
    return make_float4(o[t][2 * n][h * 2], o[t][2 * n][h * 2 + 1], o[t][2 * n + 1][h * 2], o[t][2 * n + 1][h * 2 + 1]);
  }
};

__device__ __forceinline__ float4* place_of(const Partials& out, size_t partial, int n) {
  const Lane i = value_lane();
  return reinterpret_cast<float4*>(out.o + partial * LATENT + (i.warp * COLS / 2 + n) * 16 + i.q * 4);
}

#include "walk.cuh"

// Copies of latents into the slots, 32 rows at a time, eight threads a row.
struct Copier {
  const bf16* cache;
  const int* table;
  u32 to;
  int row, chunk;
  __device__ __forceinline__ Copier(const Inputs& in, int table_row) : cache(in.cache), table(in.table + (size_t)table_row * in.pages) {
    const int v = threadIdx.x - SCORE_THREADS;
    row = v / 8;
    chunk = v % 8;
    to = shared_address(raw) + row * ROW_BYTES + ((chunk ^ turned(row)) << 4);
  }
  // ROWS_AT_ONCE may not divide 32; 8 rows more are as many times 128 bytes further, at the same swizzle.
  // This thread's chunk of piece c of a row; zeros beyond the row's end, which scores read too.
  __device__ __forceinline__ void copy(int c, bool have, u32 to, const bf16* from) const {
    if (CHUNKS % 8 == 0 || c < PIECES - 1) copy16_or_zero(have, to, from);
    else copy16_or_zero(have && c * 8 + chunk < CHUNKS, to, c * 8 + chunk < CHUNKS ? from : cache);
  }
  template <class F> __device__ __forceinline__ void rows(int all, F f) const {
    constexpr int AT_ONCE = VALUE_THREADS / 8;
    static_assert(AT_ONCE % 8 == 0, "the swizzle of a thread's rows is the same");
#pragma unroll
    for (int r = 0; r < (all + AT_ONCE - 1) / AT_ONCE; r++)
      if (all % AT_ONCE == 0 || row + r * AT_ONCE < all) f(row + r * AT_ONCE, to + r * AT_ONCE * ROW_BYTES);
  }
  __device__ __forceinline__ void announce(int n) const { copy_arrive(latents_of(n)); }   // when all copies so far are done
  __device__ __forceinline__ int page(int k) const { return table[k / TILE]; }
  __device__ __forceinline__ void half(int page, int k, int slot) const {              // 32 keys from position k
    const bf16* from = cache + ((size_t)page * TILE + k % TILE) * WIDTH + chunk * 8;
    rows(32, [&](int r, u32 at) {
#pragma unroll
      for (int c = 0; c < PIECES; c++)
        copy(c, true, at + slot * HALF_BYTES + c * 128, from + (size_t)r * WIDTH + c * 64);
    });
  }
  // Queries as fragments: a lane's 8 columns of lines g and g + 8 make one fragment of either step.
  template <int M> __device__ __forceinline__ void queries(const Inputs& in, size_t line, int live) const {
    constexpr int EACH = (M * PAIRS * 32 + VALUE_THREADS - 1) / VALUE_THREADS;
    uint4 v[EACH][2];
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int n = j * VALUE_THREADS + row * 8 + chunk, pair = n / 32 % PAIRS, r = n / 32 / PAIRS * 16 + h * 8 + n % 32 / 4, k = pair * 4 + n % 4;
        v[j][h] = make_uint4(0, 0, 0, 0);
        if (r >= live || (CHUNKS % 4 && k >= CHUNKS)) continue;
        const size_t x = line + r;
        v[j][h] = load16(k < LATENT / 8 ? in.q + x * LATENT + k * 8 : in.q_pe + x * in.pe_stride + (k - LATENT / 8) * 8);
      }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int n = j * VALUE_THREADS + row * 8 + chunk;
      const u32 at = shared_address(raw + Place::q) + n / 32 * 1024 + n % 32 * 16;
      const uint4 a = v[j][0], b = v[j][1];
      if (n >= M * PAIRS * 32) continue;
      shared_store16(at, make_uint4(a.x, b.x, a.y, b.y));
      shared_store16(at + 512, make_uint4(a.z, b.z, a.w, b.w));
    }
  }
  __device__ __forceinline__ void gathered(const int* slots, int count) const {          // one tile; zero from `count` on
#pragma unroll
    for (int half = 0; half < 2; half++)
      rows(32, [&](int r, u32 at) {
        const bool have = half * 32 + r < count;
        const bf16* from = cache + (have ? (size_t)slots[half * 32 + r] * WIDTH : 0) + chunk * 8;
#pragma unroll
        for (int c = 0; c < PIECES; c++)
          copy(c, have, at + half * HALF_BYTES + c * 128, from + (have ? c * 64 : 0));
      });
  }
};

// Two steps of 16 keys: keys 0..31 (HIGH 0) or 32..63 of the tile; `values`: this lane's address in their slot; p, p_high: its
// fragments of tiles 0.. and 2.. of lines of the probabilities; p_l: of tile `warp`, in warps that have l.
template <int M, int HIGH> __device__ __forceinline__ void weigh(Acc<M>& a, u32 values, u32 p, u32 p_high, bool has_l, u32 p_l) {
  constexpr u32 ONES = 0x3f803f80u;
  constexpr int APART = 4 * ROW_BYTES;                        // of fragments in rotary columns; the others are 512 bytes apart
#pragma unroll
  for (int k = 0; k < 2; k++) {
    constexpr int K = HIGH * 2;
    u32 f[M][4];
#pragma unroll
    for (int t = 0; t < M; t++) Pair<M>::load16(f[t], t < 2 ? p + (t * 4 + K + k) * 512 : p_high + ((t - 2) * 4 + K + k) * APART);
#pragma unroll
    for (int n = 0; n < COLS; n += 2) {
      u32 r[4];
      ldmatrix4_trans(r, (values ^ (n << 4)) + k * 16 * ROW_BYTES);
#pragma unroll
      for (int t = 0; t < M; t++) { mma(a.o[t][n], f[t], r[0], r[1]); mma(a.o[t][n + 1], f[t], r[2], r[3]); }
    }
    if (has_l) {
      u32 w[4];
      Pair<M>::load16(w, p_l + (K + k) * (value_lane().warp < 2 ? 512 : APART));
      mma(a.l, w, ONES, ONES);
    }
  }
}

template <int M> __device__ __forceinline__ void rescale(Acc<M>& a, int turn) {
  const Lane i = value_lane();
  const float* rescales = shared_at<float>(Place::rescale) + turn * MT * 16;
  float r[M][2];
  bool same = true;
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      r[t][h] = rescales[t * 16 + h * 8 + i.g];
      same = same && r[t][h] == 1.f;
    }
  if (__all_sync(ALL_LANES, same)) return;                    // a factor of 1 changes no bit
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int n = 0; n < COLS; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) a.o[t][n][j] = __fmul_rn(a.o[t][n][j], r[t][j >> 1]);
  if (i.warp < M)
#pragma unroll
    for (int j = 0; j < 4; j++) a.l[j] = __fmul_rn(a.l[j], rescales[i.warp * 16 + (j >> 1) * 8 + i.g]);
}

template <int M>
__device__ __forceinline__ void value_role(int begin, int tiles, const Copier& copier, const Outputs& out, int past) {
  const Lane i = value_lane();
  const int x = turned(i.lane & 7), hi = i.lane >> 4, end = begin + tiles * TILE;
  const u32 values = shared_address(raw) + (i.lane & 15) * ROW_BYTES + (((i.warp * COLS + hi) ^ x) << 4);
  const bool has_l = i.warp < M;
  Acc<M> a;
  Emitter<M> emitter(out);
  int slot = 0, n = 0;
  for (int unit = begin, next; unit < end; unit = next) {
    next = min(end, unit + size_at(unit, UNIT));
    a.clear();
    for (int tile = unit; tile < next; tile += TILE, n++) {
      const int k = tile + HALVES * 32, turn = n & 1, other = slot + 1 >= HALVES ? 0 : slot + 1;   // k: the next half to copy
      int low_page = 0, high_page = 0;
      if (k < end) low_page = copier.page(k);
      if (k + 32 < end) high_page = copier.page(k + 32);
      if (turn) bar_sync<PROBABILITIES + 1, THREADS>(); else bar_sync<PROBABILITIES, THREADS>();
      const u32 p = p_at(0, 0, turn, other), p_high = M == 4 ? p_at(2, 0, turn, other) : 0, p_l = p_at(has_l ? i.warp : 0, 0, turn, other);
      rescale<M>(a, turn);
      weigh<M, 0>(a, values + slot * HALF_BYTES, p, p_high, has_l, p_l);
      if (k < end) {
        bar_sync<VALUES, VALUE_THREADS>();
        copier.half(low_page, k, slot);
        if (HALVES % 2 == 1) copier.announce(past + n + HALVES / 2);
      }
      weigh<M, 1>(a, values + other * HALF_BYTES, p, p_high, has_l, p_l);
      if (tile + 2 * TILE < end) { if (turn) bar_arrive<TAKEN + 1, THREADS>(); else bar_arrive<TAKEN, THREADS>(); }
      if (k + 32 < end) {
        bar_sync<VALUES, VALUE_THREADS>();
        copier.half(high_page, k + 32, other);
        if (HALVES % 2 == 0) copier.announce(past + n + HALVES / 2);
      }
      slot = other + 1 >= HALVES ? 0 : other + 1;
    }
    emitter.take(a, unit, next, next == end);
  }
}

// ------------------------------------------------------------------------------------------------- jobs
// Slots of the keys base(p)..p of a node: tile `from` of them.
__device__ __forceinline__ void own_slots(const Job& job, const Inputs& in, const Copier& copier, int from, int* slots) {
  const int v = threadIdx.x - SCORE_THREADS;
  auto slot_of = [&](int position) { return copier.page(position) * TILE + position % TILE; };
  for (int x = v; x < TILE; x += VALUE_THREADS) if (from + x < job.length) slots[x] = slot_of(from + x);
  for (int n = v; n < in.words * 64; n += VALUE_THREADS) {   // ancestor n: at depth = set bits below it, stored at length + n
    const u64* mask = in.masks + (size_t)job.token * in.words;
    if (!(mask[n >> 6] >> (n & 63) & 1)) continue;
    int depth = __popcll(mask[n >> 6] & ((1ull << (n & 63)) - 1));
    for (int w = 0; w < n >> 6; w++) depth += __popcll(mask[w]);
    const int x = job.length + depth - from;
    if (x >= 0 && x < TILE) slots[x] = slot_of(job.length + n);
  }
}

// Tiles of a job whose lines' bases are known: keys from the last base on are no shared keys.
template <int M> __device__ __forceinline__ int tiles_of(const Work& work) {
  if (work.kind == OWN_KEYS) return work.count > 0;
  const int4* bases = shared_at<int4>(Place::bases);
  int end = work.begin;
#pragma unroll
  for (int r = 0; r < M * 4; r++) {
    const int4 b = bases[r];
    end = max(max(end, max(b.x, b.y)), max(b.z, b.w));
  }
  return (min(end, work.end) - work.begin) / TILE;
}

// past: tiles announced in earlier jobs; the return value with this one's.
template <int M> __device__ __forceinline__ int score_job(const Job& job, const Inputs& in, int next, int past) {
  int* bases = shared_at<int>(Place::bases);
  for (int r = threadIdx.x; r < M * 16; r += SCORE_THREADS)
    bases[r] = r >= job.live ? 0 : job.kind == OWN_KEYS ? WHOLE
                             : base_of(job.length + depth_of(in.masks, in.words, job.token + (job.first + r) / in.heads));
  everybody();
  Work& work = *shared_at<Work>(Place::work);
  if (threadIdx.x == 0) work.next = next;                     // all have read the last one
  const int tiles = tiles_of<M>(work);
  score_role<M>(work.begin, tiles, work.count, in.scale, past);
  return past + work.announced(tiles);
}

template <int M> __device__ __forceinline__ int value_job(const Job& job, const Inputs& in, const Outputs& out, int past) {
  const bool first = threadIdx.x == SCORE_THREADS;
  Work& work = *shared_at<Work>(Place::work);
  const Copier copier(in, job.row);
  if (job.kind == OWN_KEYS) {
    const int p = job.length + depth_of(in.masks, in.words, job.token), from = base_of(p) + TILE * job.begin, count = min(TILE, p + 1 - from);
    if (first) {
      work.kind = OWN_KEYS; work.begin = 0; work.end = TILE; work.count = count; work.step = 0;
      work.part = work.spare = ((long long)job.token * 2 + job.begin) * in.heads + job.first;
    }
    int* slots = shared_at<int>(Place::slots);
    own_slots(job, in, copier, from, slots);
    bar_sync<VALUES, VALUE_THREADS>();
    copier.gathered(slots, count);
    copier.announce(past);
  } else {
    if (first) {
      work.kind = SHARED_KEYS; work.begin = job.begin; work.end = job.end; work.count = TILE; work.step = job.step;
      work.part = job.part; work.spare = job.spare;
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const int k = job.begin + h * 32;
      if (k >= job.end) break;
      copier.half(copier.page(k), k, h);
      if (h % 2) copier.announce(past + h / 2);
    }
  }
  copier.queries<M>(in, (size_t)job.token * in.heads + job.first, job.live);
  everybody();
  const int tiles = tiles_of<M>(work);
  if (tiles > 0) value_role<M>(work.begin, tiles, copier, out, past);
  copy_commit();
  copy_wait<0>();
  return past + work.announced(tiles);
}

// Blocks take jobs in order, as they become free. A job has as many tiles of lines as it needs.
template <class F4, class F2, class F1> __device__ __forceinline__ int by_lines(int live, F4 four, F2 two, F1 one) {
  const int tiles = (live + 15) / 16;
  return MT == 4 && tiles > 2 ? four() : MT >= 2 && tiles == 2 ? two() : one();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mla_attend(
    const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages, const u64* masks, int words, int heads,
    float scale, const Job* jobs, Head* head, float* o, float2* ml, float* own_o, float2* own_ml) {
  constexpr int M4 = MT == 4 ? 4 : 1, M2 = MT >= 2 ? 2 : 1;
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  pdl_wait();
  pdl_go();
  Job job = jobs[blockIdx.x];                                  // there is room for it, whether or not it is one
  const int total = head->jobs, blocks = gridDim.x;
  const Work& work = *shared_at<Work>(Place::work);
  if (threadIdx.x == 0) { mbarrier_begin(latents_of(0), VALUE_THREADS); mbarrier_begin(latents_of(1), VALUE_THREADS); }
  everybody();
  int past = 0;
  if (threadIdx.x < SCORE_THREADS) {
    if (SHIFT) give_registers<SCORE_REGISTERS>();
    for (int j = blockIdx.x; j < total;) {
      int next = total;
      if (total > blocks && threadIdx.x == 0) next = blocks + (int)atomicAdd(&head->next, 1u);
      past = by_lines(job.live, [&]() { return score_job<M4>(job, in, next, past); }, [&]() { return score_job<M2>(job, in, next, past); },
                      [&]() { return score_job<1>(job, in, next, past); });
      everybody();                                             // the next job writes the same shared memory
      j = work.next;
      if (j < total) job = jobs[j];
    }
    if (total > blocks && threadIdx.x == 0 && atomicAdd(&head->left, 1u) + 1 == (u32)blocks) head->next = head->left = 0;   // the last one
  } else {
    if (SHIFT) take_registers<VALUE_REGISTERS>();
    const Outputs out{{o, ml}, {own_o, own_ml}};
    for (int j = blockIdx.x; j < total;) {
      past = by_lines(job.live, [&]() { return value_job<M4>(job, in, out, past); }, [&]() { return value_job<M2>(job, in, out, past); },
                      [&]() { return value_job<1>(job, in, out, past); });
      everybody();
      j = work.next;
      if (j < total) job = jobs[j];
    }
  }
}
