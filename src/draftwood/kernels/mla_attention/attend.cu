// Partial attention results of one layer: blocks take jobs of plan.cu. The law is in layout.cuh; nothing below is part of it.
//
// A block of NW warps has MT tiles of 16 lines and meets the keys 64 at a time: scores (mma, lines x keys, two sums over the
// even and the odd 16-column steps), softmax with a running maximum, values (mma, lines x LATENT / NW columns per warp).
//  MT  tiles of 16 lines; BT the same for a node's own keys (1 or MT)       NW  warps
//  KS  1: warps split scores by keys, in WR groups by lines. 2: half of the warps take the even steps, half the odd ones
//  PIPE  1: fragments of the scores are loaded one step ahead               HALVES  32-key slots for keys: 2, 3 or 4
//  WALK  1: a block folds all units of its span itself. Of a warp's COLS tiles of columns it keeps the group's values of GR in
//        registers, of GS in shared memory and of the rest in global memory (L2).
#include "layout.cuh"

#ifndef MT
#define MT 1
#endif
#ifndef BT
#define BT 1
#endif
#ifndef NW
#define NW 4
#endif
#ifndef WR
#define WR 1
#endif
#ifndef KS
#define KS 1
#endif
#ifndef PIPE
#define PIPE 0
#endif
#ifndef HALVES
#define HALVES 2
#endif
#ifndef WALK
#define WALK 0
#endif
#ifndef GR
#define GR (LATENT / 8 / NW)
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef GS
#define GS 0
#endif

constexpr int THREADS = NW * 32;
constexpr int COLS = LATENT / 8 / NW;                  // n8 tiles of value columns that a warp owns
constexpr int STEPS = WIDTH / 16, CHUNKS = WIDTH / 8;  // mma steps, and 16-byte pieces, of a latent
constexpr int LDK = WIDTH + 8, LDP = TILE + 8;         // shared rows, elements: 16 bytes more, so that ldmatrix meets no bank twice
static_assert(COLS * 8 * NW == LATENT && COLS % 2 == 0, "columns are shared out in pairs of n8 tiles");

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// How the warps share the scores, and where things are in shared memory (bytes; op.py has the same sum).
template <int M_, int HALVES_, int WR_, int KS_, bool WALK_> struct Config {
  static constexpr int M = M_, SPLIT = KS_;
  static constexpr int KEY_GROUPS = KS_ == 2 ? NW / 2 / (M_ / 2) : NW / WR_;
  static constexpr int KEYS8 = 8 / KEY_GROUPS;            // n8 tiles of keys whose scores a warp forms
  static constexpr int LINES16 = KS_ == 2 ? 2 : M_ / WR_; // tiles of lines whose scores a warp forms ...
  static constexpr int OWN = KS_ == 2 ? 1 : LINES16;      // ... and keeps
  static_assert(KEY_GROUPS <= 8 && KEYS8 <= 4 && KEY_GROUPS * KEYS8 == 8, "a warp's keys lie in one half");
  static_assert(STEPS % 2 == 0 || (KS_ == 1 && KEYS8 >= 2), "an odd last step needs fragments of one step");
  static constexpr int keys = 0;
  static constexpr int q = keys + HALVES_ * 32 * LDK * 2;
  static constexpr int p = q + M_ * 16 * LDK * 2;         // probabilities; with KS 2 first the exchanged scores
  static constexpr int maxima = p + larger(M_ * 16 * LDP * 2, KS_ == 2 ? NW * KEYS8 * 512 : 0);
  static constexpr int sums = maxima + M_ * 16 * KEY_GROUPS * 4;
  static constexpr int bases = sums + M_ * 16 * 32;
  static constexpr int slots = bases + M_ * 16 * 4;
  static constexpr int group_ml = slots + TILE * 4;
  static constexpr int walk_ml = group_ml + (WALK_ ? NW * M_ * 16 * 8 : 0);
  static constexpr int group_o = walk_ml + (WALK_ ? NW * M_ * 16 * 8 : 0);
  static constexpr int end = group_o + (WALK_ ? GS * M_ * THREADS * 16 : 0);
};
using SharedKeys = Config<MT, HALVES, WR, KS, WALK == 1>;
using OwnKeys = Config<BT, 2, BT == MT ? WR : 1, BT == MT ? KS : 1, false>;
#ifdef SHARED_BYTES
static_assert(larger(SharedKeys::end, OwnKeys::end) == SHARED_BYTES, "op.py computes another size of shared memory");
#endif

template <class T> __device__ __forceinline__ T* shared_at(int offset) { return reinterpret_cast<T*>(raw + offset); }

// Lane (g, q2) of a warp holds, of each tile of 16 lines, lines g and g + 8, columns q2 and q2 + 1 of each n8 tile.
struct Lane { int warp, lane, g, q2; };
__device__ __forceinline__ Lane me() {
  const int l = threadIdx.x & 31;
  return {(int)threadIdx.x >> 5, l, l >> 2, (l & 3) * 2};
}

template <int M> struct Acc { float o[M][COLS][4], m[M][2], l[M][2]; };   // m, l: of lines g and g + 8

template <int M> __device__ __forceinline__ void clear(Acc<M>& a) {
#pragma unroll
  for (int t = 0; t < M; t++) {
    a.m[t][0] = a.m[t][1] = minus_infinity();
    a.l[t][0] = a.l[t][1] = 0.f;
#pragma unroll
    for (int n = 0; n < COLS; n++) a.o[t][n][0] = a.o[t][n][1] = a.o[t][n][2] = a.o[t][n][3] = 0.f;
  }
}

// Fragments of steps 2i + e of the scores. qa, ka: this lane's addresses at step 0; CAP steps at once (2, or 1 with KS 2).
template <class C, int CAP> struct Fragments {
  u32 a[CAP][C::LINES16][4], b[CAP][C::KEYS8][2];
  __device__ __forceinline__ void load(int i, u32 qa, u32 ka, int steps = CAP) {
    if constexpr (C::KEYS8 == 1) {               // four matrices of one n8 tile: both steps
      u32 r[4];
      ldmatrix4(r, ka + i * 64);
      b[0][0][0] = r[0]; b[0][0][1] = r[1]; b[CAP - 1][0][0] = r[2]; b[CAP - 1][0][1] = r[3];
    } else {
#pragma unroll
      for (int e = 0; e < CAP; e++)
#pragma unroll
        for (int n = 0; n < C::KEYS8; n += 2) if (e < steps) {
          u32 r[4];
          ldmatrix4(r, ka + n * 8 * LDK * 2 + i * 64 + e * 32);
          b[e][n][0] = r[0]; b[e][n][1] = r[1]; b[e][n + 1][0] = r[2]; b[e][n + 1][1] = r[3];
        }
    }
#pragma unroll
    for (int t = 0; t < C::LINES16; t++)
#pragma unroll
      for (int e = 0; e < CAP; e++) if (e < steps) ldmatrix4(a[e][t], qa + t * 16 * LDK * 2 + i * 64 + e * 32);
  }
  __device__ __forceinline__ void multiply(float (&x)[CAP][C::LINES16][C::KEYS8][4], int steps = CAP) {
#pragma unroll
    for (int t = 0; t < C::LINES16; t++)
#pragma unroll
      for (int e = 0; e < CAP; e++)
#pragma unroll
        for (int n = 0; n < C::KEYS8; n++) if (e < steps) mma(x[e][t][n], a[e][t], b[e][n][0], b[e][n][1]);
  }
};

// This warp's share of the scores of a tile: keys key0.. of it, lines of its own tiles.
template <class C> struct Share {
  int half, pos, key0, line_group;
  __device__ __forceinline__ Share(int warp) {
    half = C::SPLIT == 2 ? warp / (NW / 2) : 0;
    pos = C::SPLIT == 2 ? warp % (NW / 2) : warp;
    key0 = pos % C::KEY_GROUPS * C::KEYS8 * 8;
    line_group = pos / C::KEY_GROUPS;
  }
  // Whether tile t of lines is this warp's; its place among the kept ones is t % OWN.
  __device__ __forceinline__ bool owns(int t) const {
    return C::SPLIT == 2 ? t == line_group * 2 + half : t / C::LINES16 == line_group;
  }
};

// Scores before scaling: the sum over even steps plus the sum over odd steps. low, high: keys 0..31 and 32..63.
template <class C>
__device__ __forceinline__ void scores(float (&s)[C::OWN][C::KEYS8][4], const Share<C>& w, const bf16* low, const bf16* high) {
  constexpr int CAP = C::SPLIT == 2 ? 1 : 2, PAIRS = STEPS / 2;
  const Lane i = me();
  const int L = i.lane;
  float x[CAP][C::LINES16][C::KEYS8][4];
#pragma unroll
  for (int e = 0; e < CAP; e++)
#pragma unroll
    for (int t = 0; t < C::LINES16; t++)
#pragma unroll
      for (int n = 0; n < C::KEYS8; n++) x[e][t][n][0] = x[e][t][n][1] = x[e][t][n][2] = x[e][t][n][3] = 0.f;
  const bf16* keys = (w.key0 & 32 ? high : low) + (w.key0 & 31) * LDK;
  const bf16* lines = shared_at<bf16>(C::q) + w.line_group * C::LINES16 * 16 * LDK;
  const u32 qa = shared_address(lines + (L & 15) * LDK + (L >> 4) * 8 + w.half * 16);
  const u32 ka = C::KEYS8 == 1 ? shared_address(keys + (L & 7) * LDK + (L >> 3) * 8)
                               : shared_address(keys + ((L & 7) + ((L >> 4) << 3)) * LDK + ((L >> 3) & 1) * 8 + w.half * 16);
  if constexpr (PIPE) {
    static_assert(PAIRS % 2 == 0 || !PIPE, "PIPE takes pairs of steps two by two");
    Fragments<C, CAP> f, g;
    f.load(0, qa, ka);
#pragma unroll 3
    for (int k = 0; k < PAIRS; k += 2) {
      g.load(k + 1, qa, ka);
      f.multiply(x);
      if (k + 2 < PAIRS) f.load(k + 2, qa, ka);
      g.multiply(x);
    }
  } else {
#pragma unroll 3
    for (int k = 0; k < PAIRS; k++) {
      Fragments<C, CAP> f;
      f.load(k, qa, ka);
      f.multiply(x);
    }
  }
  if constexpr (STEPS % 2 == 1) {
    Fragments<C, CAP> f;
    f.load(PAIRS, qa, ka, 1);
    f.multiply(x, 1);
  }
  if constexpr (C::SPLIT == 2) {   // keep one tile of lines, hand the other to the warp with the other steps of the same keys
    float4* box = shared_at<float4>(C::p);
    const int other = (1 - w.half) * (NW / 2) + w.pos;
#pragma unroll
    for (int n = 0; n < C::KEYS8; n++) {
      const float(&y)[4] = x[0][1][n], (&z)[4] = x[0][0][n];
      box[(other * C::KEYS8 + n) * 32 + L] = w.half ? make_float4(z[0], z[1], z[2], z[3]) : make_float4(y[0], y[1], y[2], y[3]);
    }
    pair_barrier(w.pos + 1);
#pragma unroll
    for (int n = 0; n < C::KEYS8; n++) {
      const float4 y = box[(i.warp * C::KEYS8 + n) * 32 + L];
      s[0][n][0] = __fadd_rn(w.half ? x[0][1][n][0] : x[0][0][n][0], y.x);
      s[0][n][1] = __fadd_rn(w.half ? x[0][1][n][1] : x[0][0][n][1], y.y);
      s[0][n][2] = __fadd_rn(w.half ? x[0][1][n][2] : x[0][0][n][2], y.z);
      s[0][n][3] = __fadd_rn(w.half ? x[0][1][n][3] : x[0][0][n][3], y.w);
    }
  } else {
#pragma unroll
    for (int t = 0; t < C::OWN; t++)
#pragma unroll
      for (int n = 0; n < C::KEYS8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[t][n][j] = __fadd_rn(x[0][t][n][j], x[CAP - 1][t][n][j]);
  }
}

// Scale, mask keys >= count and lines that are off, take the tile's maxima: each warp over its keys, then through shared memory.
template <class C>
__device__ __forceinline__ void tile_maxima(float (&s)[C::OWN][C::KEYS8][4], const Share<C>& w, int count, const bool (&on)[C::M][2], float scale) {
  const Lane i = me();
  float* maxima = shared_at<float>(C::maxima);
#pragma unroll
  for (int t = 0; t < C::M; t++) if (w.owns(t))
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = minus_infinity();
#pragma unroll
      for (int n = 0; n < C::KEYS8; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& v = s[t % C::OWN][n][h * 2 + j];
          v = on[t][h] && w.key0 + n * 8 + i.q2 + j < count ? __fmul_rn(v, scale) : minus_infinity();
          most = fmaxf(most, v);
        }
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
      if (i.q2 == 0) maxima[(t * 16 + h * 8 + i.g) * C::KEY_GROUPS + w.pos % C::KEY_GROUPS] = most;
    }
  __syncthreads();
}

// Probabilities to shared memory as bf16; the running maxima and sums move on, and the values are rescaled.
template <class C>
__device__ __forceinline__ void softmax(Acc<C::M>& a, float (&s)[C::OWN][C::KEYS8][4], const Share<C>& w) {
  const Lane i = me();
  bf16* p = shared_at<bf16>(C::p);
  float *maxima = shared_at<float>(C::maxima), *sums = shared_at<float>(C::sums);
  float rescale[C::M][2];
  bool same = true;
#pragma unroll
  for (int t = 0; t < C::M; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int line = t * 16 + h * 8 + i.g;
      const float old = a.m[t][h];
      float m = old;
#pragma unroll
      for (int k = 0; k < C::KEY_GROUPS; k++) m = fmaxf(m, maxima[line * C::KEY_GROUPS + k]);
      const float safe = m == minus_infinity() ? 0.f : m;     // a line that is off
      rescale[t][h] = old == minus_infinity() ? 1.f : ex2(__fsub_rn(old, safe));   // nothing yet: l and O are zero
      a.m[t][h] = m;
      same = same && rescale[t][h] == 1.f;
      if (!w.owns(t)) continue;
#pragma unroll
      for (int n = 0; n < C::KEYS8; n++) {
        __nv_bfloat162 b;
        b.x = __float2bfloat16_rn(ex2(__fsub_rn(s[t % C::OWN][n][h * 2], safe)));
        b.y = __float2bfloat16_rn(ex2(__fsub_rn(s[t % C::OWN][n][h * 2 + 1], safe)));
        *reinterpret_cast<__nv_bfloat162*>(&p[line * LDP + w.key0 + n * 8 + i.q2]) = b;
        float z = __fadd_rn(__bfloat162float(b.x), __bfloat162float(b.y));   // sum what the values will be weighted with
        z = __fadd_rn(z, __shfl_xor_sync(ALL_LANES, z, 1));
        z = __fadd_rn(z, __shfl_xor_sync(ALL_LANES, z, 2));
        if (i.q2 == 0) sums[line * 8 + w.key0 / 8 + n] = z;
      }
    }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < C::M; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float4* z4 = reinterpret_cast<const float4*>(&sums[(t * 16 + h * 8 + i.g) * 8]);
      const float4 u = z4[0], v = z4[1];
      float z = __fadd_rn(__fadd_rn(__fadd_rn(u.x, u.y), u.z), u.w);
      z = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(z, v.x), v.y), v.z), v.w);
      a.l[t][h] = __fadd_rn(__fmul_rn(a.l[t][h], rescale[t][h]), z);
    }
  if (__all_sync(ALL_LANES, same)) return;                    // a factor of 1 changes no bit
#pragma unroll
  for (int t = 0; t < C::M; t++)
#pragma unroll
    for (int n = 0; n < COLS; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) a.o[t][n][j] = __fmul_rn(a.o[t][n][j], rescale[t][j >> 1]);
}

// One tile of 64 keys. on[t][h]: the line takes part. refill(): called when `low` is no longer needed, if REFILL.
template <class C, bool REFILL, class F>
__device__ __forceinline__ void tile(Acc<C::M>& a, const bf16* low, const bf16* high, int count, const bool (&on)[C::M][2], float scale, F refill) {
  const Lane i = me();
  const Share<C> w(i.warp);
  {
    float s[C::OWN][C::KEYS8][4];
    scores<C>(s, w, low, high);
    tile_maxima<C>(s, w, count, on, scale);
    softmax<C>(a, s, w);
  }
  const bf16* p = shared_at<bf16>(C::p);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if (REFILL && k == 2) { __syncthreads(); refill(); }
    u32 f[C::M][4];
#pragma unroll
    for (int t = 0; t < C::M; t++) ldmatrix4(f[t], shared_address(&p[(t * 16 + (i.lane & 15)) * LDP + k * 16 + (i.lane >> 4) * 8]));
    const bf16* values = k < 2 ? low : high;
#pragma unroll
    for (int n = 0; n < COLS; n += 2) {
      u32 r[4];
      ldmatrix4_trans(r, shared_address(&values[((k & 1) * 16 + (i.lane & 15)) * LDK + (i.warp * COLS + n) * 8 + (i.lane >> 4) * 8]));
#pragma unroll
      for (int t = 0; t < C::M; t++) { mma(a.o[t][n], f[t], r[0], r[1]); mma(a.o[t][n + 1], f[t], r[2], r[3]); }
    }
  }
  __syncthreads();
}

struct Inputs {
  const bf16 *q, *q_pe, *cache;         // [lines, LATENT], [lines, ROPE] with rows pe_stride apart, [slots, WIDTH]
  int pe_stride;
  const int* table;                     // [rows, pages]
  int pages;
  const u64* masks;                     // [tokens, words]
  int words, heads;
  float scale;                          // of the scores, times log2(e)
};
struct Partials { float* o; float2* ml; };   // [.., LATENT], [..]

template <int M> __device__ __forceinline__ void load_queries(bf16* to, const Inputs& in, size_t line, int live) {
  for (int i = threadIdx.x; i < M * 16 * CHUNKS; i += THREADS) {
    const int r = i / CHUNKS, c = i % CHUNKS;
    const bool on = r < live;
    const size_t x = line + (on ? r : 0);
    const bf16* from = c < LATENT / 8 ? in.q + x * LATENT + c * 8 : in.q_pe + x * in.pe_stride + (c - LATENT / 8) * 8;
    copy16_or_zero(on, shared_address(&to[r * LDK + c * 8]), from);
  }
}

template <int M> __device__ __forceinline__ void store(const Acc<M>& a, const Partials& out, size_t part, const bool (&on)[M][2]) {
  const Lane i = me();
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) if (on[t][h]) {
      const size_t x = part + t * 16 + h * 8 + i.g;
      if (i.warp == 0 && i.q2 == 0) out.ml[x] = make_float2(a.m[t][h], a.l[t][h]);
#pragma unroll
      for (int n = 0; n < COLS; n++)
        *reinterpret_cast<float2*>(&out.o[x * LATENT + (i.warp * COLS + n) * 8 + i.q2]) = make_float2(a.o[t][n][h * 2], a.o[t][n][h * 2 + 1]);
    }
}

#if WALK
#include "walk.cuh"
#endif

// Keys before base(p) for up to MT * 16 lines of a row.
__device__ __forceinline__ void shared_keys(const Job& job, const Inputs& in, const Partials& out) {
  using C = SharedKeys;
  const Lane i = me();
  bf16* keys = shared_at<bf16>(C::keys);
  int* bases = shared_at<int>(C::bases);
  const int* table = in.table + (size_t)job.row * in.pages;
  auto half = [&](int k, int slot) {                          // 32 keys from position k
    const bf16* from = in.cache + ((size_t)table[k / TILE] * TILE + k % TILE) * WIDTH;
    bf16* to = keys + slot * 32 * LDK;
    for (int x = threadIdx.x; x < 32 * CHUNKS; x += THREADS) copy16(shared_address(to + x / CHUNKS * LDK + x % CHUNKS * 8), from + x * 8);
    copy_commit();
  };
  half(job.begin, 0);
  half(job.begin + 32, 1);
  load_queries<MT>(shared_at<bf16>(C::q), in, (size_t)job.token * in.heads + job.first, job.live);
  copy_commit();
  for (int r = threadIdx.x; r < MT * 16; r += THREADS)
    bases[r] = r < job.live ? base_of(job.length + depth_of(in.masks, in.words, job.token + (job.first + r) / in.heads)) : 0;
  Acc<MT> a;
  clear(a);
#if WALK
  Group group(job);
#endif
  int slot = 0, end = job.begin;
  auto wrap = [](int x) { return x >= HALVES ? x - HALVES : x; };
  copy_wait<0>();
  __syncthreads();
  for (int r = 0; r < MT * 16; r++) end = max(end, bases[r]);
  end = min(end, job.end);
  for (int k = job.begin; k < end; k += TILE) {
    const bool more = k + TILE < end;
    if (k > job.begin) { copy_wait<0>(); __syncthreads(); }
    const int s1 = wrap(slot + 1), s2 = wrap(s1 + 1), s3 = wrap(s2 + 1);
    if (HALVES >= 3 && more) half(k + TILE, s2);
    if (HALVES == 4 && more) half(k + TILE + 32, s3);
    bool on[MT][2];
#pragma unroll
    for (int t = 0; t < MT; t++) { on[t][0] = k < bases[t * 16 + i.g]; on[t][1] = k < bases[t * 16 + 8 + i.g]; }
    tile<C, HALVES != 4>(a, keys + slot * 32 * LDK, keys + s1 * 32 * LDK, TILE, on, in.scale, [&]() {
      if (more) { if (HALVES == 2) half(k + TILE, 0); else half(k + TILE + 32, s3); }
    });
    if (HALVES == 2 && more) half(k + TILE + 32, 1);
    slot = s2;
#if WALK
    const int next = k + TILE;
    const int unit = size_at(k, UNIT), all = size_at(k, GROUP);
    if (!more || next % unit == 0) { group.take(a, k & -unit, (k & -unit) % all == 0, bases, out); clear(a); }
    if (!more || next % all == 0) group.finish(k & -all, bases, out);
#endif
  }
#if !WALK
  bool on[MT][2];
#pragma unroll
  for (int t = 0; t < MT; t++) { on[t][0] = job.begin < bases[t * 16 + i.g]; on[t][1] = job.begin < bases[t * 16 + 8 + i.g]; }
  store<MT>(a, out, job.part, on);
#endif
}

// One of the two tiles of keys base(p)..p for up to BT * 16 heads of a node.
__device__ __forceinline__ void own_keys(const Job& job, const Inputs& in, const Partials& out) {
  using C = OwnKeys;
  const Lane i = me();
  const int p = job.length + depth_of(in.masks, in.words, job.token);
  const int from = base_of(p) + TILE * job.begin, count = min(TILE, p + 1 - from);
  if (count <= 0) return;
  int* slots = shared_at<int>(C::slots);
  bf16* keys = shared_at<bf16>(C::keys);
  const int* table = in.table + (size_t)job.row * in.pages;
  auto slot_of = [&](int position) { return table[position / TILE] * TILE + position % TILE; };
  load_queries<BT>(shared_at<bf16>(C::q), in, (size_t)job.token * in.heads + job.first, job.live);
  for (int x = threadIdx.x; x < TILE; x += THREADS) if (from + x < job.length) slots[x] = slot_of(from + x);
  for (int n = threadIdx.x; n < in.words * 64; n += THREADS) {  // ancestor n: at depth = set bits below it, stored at length + n
    const u64* mask = in.masks + (size_t)job.token * in.words;
    if (!(mask[n >> 6] >> (n & 63) & 1)) continue;
    int depth = __popcll(mask[n >> 6] & ((1ull << (n & 63)) - 1));
    for (int w = 0; w < n >> 6; w++) depth += __popcll(mask[w]);
    const int x = job.length + depth - from;
    if (x >= 0 && x < TILE) slots[x] = slot_of(job.length + n);
  }
  Acc<BT> a;
  clear(a);
  bool on[BT][2];
#pragma unroll
  for (int t = 0; t < BT; t++) { on[t][0] = t * 16 + i.g < job.live; on[t][1] = t * 16 + 8 + i.g < job.live; }
  __syncthreads();
  for (int x = threadIdx.x; x < TILE * CHUNKS; x += THREADS) {
    const int r = x / CHUNKS, c = x % CHUNKS;
    const bool have = r < count;
    copy16_or_zero(have, shared_address(&keys[r * LDK + c * 8]), in.cache + (have ? (size_t)slots[r] * WIDTH + c * 8 : 0));
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  tile<C, false>(a, keys, keys + 32 * LDK, count, on, in.scale, []() {});
  store<BT>(a, out, ((size_t)job.token * 2 + job.begin) * in.heads + job.first, on);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mla_attend(
    const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages, const u64* masks, int words, int heads,
    float scale, const Job* jobs, const Head* head, float* o, float2* ml, float* own_o, float2* own_ml) {
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  pdl_wait();
  pdl_go();
  int j = blockIdx.x;
  Job job = jobs[j];                                           // there is room for it, whether or not it is one
  const int total = head->jobs;
  while (j < total) {
    if (job.kind == SHARED_KEYS) shared_keys(job, in, Partials{o, ml});
    else own_keys(job, in, Partials{own_o, own_ml});
    j += gridDim.x;
    if (j < total) job = jobs[j];
    __syncthreads();                                           // the next job writes the same shared memory
  }
}
