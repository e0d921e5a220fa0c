// What plan.cu, attend.cu and combine.cu share: sizes, the work list, and the arithmetic that joins partial results.
//
// LAW. The bits of a node's output depend on its query, its position p and its keys in position order, on nothing else:
//  - base(p) = 64 * floor((p - 64) / 64), at least 0. Keys before base(p) are read from the row's pages in tiles of 64 by
//    absolute position. A tree is at most 64 deep, so they are all committed and every node of a row reads the same ones.
//  - A unit of keys (two or more tiles) makes one independent partial (m, l, O); within it the tiles are taken in order with a
//    running maximum. PER units are folded from the left into a group. Units start with UNIT keys and double at GROW1, at
//    GROW2 and at GROW3: a short context is cut finely, a long one is folded rarely. The last unit and group may be short. These
//    numbers go by an engine's heads (sizes.py, law_for).
//  - The keys base(p)..p, at most 128 and ancestors among them, are gathered in position order into two tiles; each is a
//    partial, the second folded into the first. This is the node's last group.
//  - Groups are folded from the left.
//  - A score is the sum of two chains of mma steps, each over half of every 32 columns (attend.cu, Pair). A unit's maximum moves when a tile's is larger by
//    more than SLACK. l is one more column of O, of values one.
//  - With COLUMNS (columns.cu, Hopper only) a score is one chain of steps, each of the next 16 columns, and a tile's maximum is rounded to bf16
//    before it is scaled; its products are other instructions too. So an engine has either these forms or the others, never both.
// Not part of the law: which block computes what (MT, HALVES, WALK, job sizes), the number of blocks, pages, rows.
#pragma once
#ifdef EMULATION
#include "emulation/cuda.h"
#else
#include "../common.cuh"
#endif

#ifndef LATENT
#define LATENT 512
#endif
#ifndef ROPE
#define ROPE 64
#endif
#ifndef COLUMNS
#define COLUMNS 0
#endif
#ifndef UNIT
#define UNIT 128
#endif
#ifndef PER
#define PER 4
#endif
#ifndef GROW1
#define GROW1 2048
#endif
#ifndef GROW2
#define GROW2 8192
#endif
#ifndef GROW3
#define GROW3 32768
#endif

constexpr int TILE = 64;                 // keys of a tile, and of a page
constexpr int WIDTH = LATENT + ROPE;     // a stored latent: values first, then the rotary part of the key
constexpr int GROUP = UNIT * PER;        // keys of a group before GROW1
constexpr int WHOLE = 1 << 30;           // a span no context reaches: one block walks all groups of its rows
static_assert(UNIT % TILE == 0 && (GROUP & (GROUP - 1)) == 0, "units are whole tiles, sizes powers of two");
static_assert(GROW1 % (2 * GROUP) == 0 && GROW2 % (4 * GROUP) == 0 && GROW3 % (8 * GROUP) == 0 && GROW1 <= GROW2 && GROW2 <= GROW3,
              "groups do not straddle a change of size");
static_assert(LATENT % 16 == 0, "partial results are kept in pieces of 16 columns");

// Pieces: units (size UNIT), groups (size GROUP) or all keys (WHOLE), numbered by position; sizes as of their place.
__device__ __forceinline__ int size_at(int k, int size) { return size << ((k >= GROW1) + (k >= GROW2) + (k >= GROW3)); }
__device__ __forceinline__ int pieces_before(int end, int size) {        // that hold keys before `end`
  if (size == WHOLE) return end > 0;
  const int log2 = 31 - __clz(size);
  auto part = [&](int from, int to, int s) { return (min(max(end - from, 0), to - from) + (1 << s) - 1) >> s; };
  return part(0, GROW1, log2) + part(GROW1, GROW2, log2 + 1) + part(GROW2, GROW3, log2 + 2) + part(GROW3, WHOLE, log2 + 3);
}
// The tile from position k is the last of its unit, or of the job.
__device__ __forceinline__ bool unit_ends(int k, bool last) { return last || ((k + TILE) & (size_at(k, UNIT) - 1)) == 0; }
__device__ __forceinline__ int round_up(int k, int size) {               // to where a piece begins
  const int s = size_at(k > 0 ? k - 1 : 0, size);
  return (k + s - 1) & -s;
}

// One block's work. "Lines" are the (node, head) pairs of a row, node-major; token is a row's or a node's flat index.
struct __align__(16) Job {
  int kind;          // SHARED_KEYS or OWN_KEYS
  int row;           // of the page table
  int token;         // SHARED_KEYS: of the row's node 0. OWN_KEYS: of the node.
  int first;         // SHARED_KEYS: first line. OWN_KEYS: first head.
  int live;          // lines, or heads, of this block that exist
  int begin, end;    // SHARED_KEYS: positions, a run of whole spans (end is an upper bound). OWN_KEYS: tile 0 or 1, unused.
  int length;        // committed tokens of the row
  long long part;    // SHARED_KEYS: partial of line `first` over the first span
  long long spare;   // where the current group is built if not in registers: `part`, or beyond it if one span holds all groups
  int step;          // from a span's partial to the next span's
  int unused[3];
};
constexpr int SHARED_KEYS = 0, OWN_KEYS = 1;
constexpr int WITH_OWN = 1, WHOLE_ROW = 2;          // of nodes.cu: keys of a run, and the node's own; all of them

// span: what one partial covers (UNIT, GROUP or WHOLE). next, left: jobs taken beyond the first of each block; zero between launches.
// live: nodes of all rows; of each of them a Node.
struct __align__(16) Head { int jobs, span; u32 next, left; int live, unused[3]; };
struct __align__(16) Node {
  int length, token, lines, row;      // committed tokens and lines of its row; flat index
  long long part, unused;             // partial of its head 0 over the row's first span
};

// What a launch reads of a step, and partial results. These are kept in the order in which lanes hold them. Of attend.cu: float 4q.. of each
// piece of 16 columns are columns 2q, 2q+1, 2q+8, 2q+9. Of columns.cu: float 64 (4v + w) + 32x + 4g + 2y + h is column 256v + 64 (2x + y)
// + 16w + 8h + g, so that what a warp stores at once is whole lines of memory.
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

#ifndef EMULATION
extern __shared__ __align__(1024) unsigned char raw[];
// A barrier of some of the block's warps: threads that wait in it and threads that only arrive count alike.
template <int ID, int COUNT> __device__ __forceinline__ void bar_sync() { asm volatile("bar.sync %0,%1;" ::"n"(ID), "n"(COUNT) : "memory"); }
template <int ID, int COUNT> __device__ __forceinline__ void bar_arrive() { asm volatile("bar.arrive %0,%1;" ::"n"(ID), "n"(COUNT) : "memory"); }
// An mbarrier: so many threads arrive in each of its phases. copy_arrive: this thread, once its copies so far are done.
__device__ __forceinline__ void mbarrier_begin(u32 at, int threads) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(at), "r"(threads) : "memory"); }
__device__ __forceinline__ void copy_arrive(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void mbarrier_wait(u32 at, int parity) {      // until the phase with this parity is complete
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @!p bra again; }" ::"r"(at), "r"(parity) : "memory");
}
// Warps of this role need only so many registers, or take so many; whole groups of four warps.
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
// All of a work list's entry, from L2: L1 may hold an older one before the kernel has waited.
template <class T> __device__ __forceinline__ T load_all_new(const T* from) {
  static_assert(sizeof(T) % 16 == 0, "whole pieces of 16 bytes");
  union { uint4 words[sizeof(T) / 16]; T all; } v;
#pragma unroll
  for (int i = 0; i < (int)sizeof(T) / 16; i++) v.words[i] = load16_new(reinterpret_cast<const uint4*>(from) + i);
  return v.all;
}
// Base-2 exponential, the one in every softmax here. Of -inf it is +0.
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
#endif
__device__ __forceinline__ float minus_infinity() { return -__int_as_float(0x7f800000); }

// The law's rule for maxima: m, of a unit so far, moves to a tile's `most` when that has outgrown it by a factor of 256: seldom. Returns
// what exponents are taken from; rescale: what values so far are multiplied by. -inf: a line that is off, or has nothing yet.
constexpr float SLACK = 8.f;
__device__ __forceinline__ float move_maximum(float& m, float most, float& rescale) {
  const float old = m;
  float now = fmaxf(old, most);
  if (now <= __fadd_rn(old, SLACK)) now = old;
  const float safe = now == minus_infinity() ? 0.f : now;
  rescale = old == minus_infinity() ? 1.f : ex2(__fsub_rn(old, safe));
  m = now;
  return safe;
}

__device__ __forceinline__ int base_of(int p) { const int b = p - TILE; return b < 0 ? 0 : b & ~(TILE - 1); }

// Depth of a node: its ancestors, itself not counted, are the set bits of its mask. Ancestors have smaller indices.
__device__ __forceinline__ int depth_of(const u64* masks, int words, long long token) {
  int n = -1;
  for (int w = 0; w < words; w++) n += __popcll(masks[token * words + w]);
  return n;
}

// Fold a later partial (m', l', O') into an earlier one: O = O * fa + O' * fb. Every fold here is these operations.
__device__ __forceinline__ void fold_scales(float before, float later, float after, float& fa, float& fb) {
  fa = ex2(__fsub_rn(before, after));
  fb = ex2(__fsub_rn(later, after));
}
__device__ __forceinline__ float fold(float o, float later, float fa, float fb) {
  return __fmaf_rn(later, fb, __fmul_rn(o, fa));
}
__device__ __forceinline__ float2 fold_sums(float2 ml, float2 later, float& fa, float& fb) {
  const float m = fmaxf(ml.x, later.x);
  fold_scales(ml.x, later.x, m, fa, fb);
  return make_float2(m, fold(ml.y, later.y, fa, fb));
}
__device__ __forceinline__ float4 fold4(float4 o, float4 v, float fa, float fb) {
  return make_float4(fold(o.x, v.x, fa, fb), fold(o.y, v.y, fa, fb), fold(o.z, v.z, fa, fb), fold(o.w, v.w, fa, fb));
}
