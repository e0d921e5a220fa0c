// A block of threads as fibers on one CPU thread, and the few CUDA pieces the kernels of this folder use. It checks indices, fold
// order, reuse of shared memory and barriers; sums inside mma are formed in double, so bits are not a GPU's.
// layout.cuh takes it in place of ../common.cuh when EMULATION is defined.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "../../fibers.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
struct dim3 { int x, y, z; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr u32 ALL_LANES = 0xffffffffu;

struct bf16 { uint16_t bits; };
typedef bf16 __nv_bfloat16;
struct __nv_bfloat162 { bf16 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline float from_bits(u32 u) { float f; memcpy(&f, &u, 4); return f; }
inline float __int_as_float(int i) { return from_bits((u32)i); }
inline float widen(uint16_t v) { return from_bits((u32)v << 16); }
inline float __bfloat162float(bf16 b) { return widen(b.bits); }
inline bf16 __float2bfloat16_rn(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  if (f != f) return {0x7fff};
  return {(uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline u32 pack_bf16(float low, float high) { return __float2bfloat16_rn(low).bits | (u32)__float2bfloat16_rn(high).bits << 16; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float x) { return (int)lrintf(x); }
inline float ex2(float x) { return exp2f(x); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline u32 atomicAdd(u32* p, u32 v) { const u32 old = *p; *p += v; return old; }
inline int __clz(int v) { return v ? __builtin_clz((u32)v) : 32; }
inline int __popcll(u64 v) { return __builtin_popcountll(v); }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T load_new(const T* p) { return *p; }
template <class T> inline T load_all_new(const T* p) { return *p; }

constexpr int SHARED_LIMIT = 232448;
// Blocks of a cluster run at once, each with its own: threads of the second come after those of the first.
alignas(1024) static unsigned char memories[2][SHARED_LIMIT];
inline int block_of_crew() { return emulated::current / (blockDim.x * blockDim.y); }
#define raw (memories[block_of_crew()])
inline u32 shared_address(const void* p) {
  const long d = (const unsigned char*)p - raw;
  if (d < 0 || d >= SHARED_LIMIT) { fprintf(stderr, "not an address in shared memory\n"); abort(); }
  return (u32)d;
}

// ---- fibers: every thread runs until it waits; barriers count arrivals
using namespace emulated;
static std::function<void()> body;
struct Barrier { int count; unsigned generation; };
static Barrier block_barriers[2], named_barriers[2][17], warp_barriers[32], crew_barrier;
inline void wait_for(Barrier& b, int n) {
  const unsigned g = b.generation;
  if (++b.count == n) { b.count = 0; b.generation++; return; }
  while (b.generation == g) leave();
}
inline void __syncthreads() { wait_for(block_barriers[block_of_crew()], blockDim.x * blockDim.y); }
template <int ID, int COUNT> void bar_sync() { wait_for(named_barriers[block_of_crew()][ID], COUNT); }
template <int ID, int COUNT> void bar_arrive() {
  Barrier& b = named_barriers[block_of_crew()][ID];
  if (++b.count == COUNT) { b.count = 0; b.generation++; }
}
template <int N> void give_registers() {}
template <int N> void take_registers() {}
inline void __syncwarp() { wait_for(warp_barriers[current >> 5], 32); }
inline void pdl_wait() {}
inline void pdl_go() {}

// ---- what lanes of a warp show each other
static u64 boxes[32][32][6];
inline u64 (*box_of_warp())[6] { return boxes[current >> 5]; }
template <class T> T from_lane(T v, int lane) {
  static_assert(sizeof(T) <= 8, "one word");
  memcpy(&box_of_warp()[current & 31][0], &v, sizeof(T));
  __syncwarp();
  T r;
  memcpy(&r, &box_of_warp()[lane][0], sizeof(T));
  __syncwarp();
  return r;
}
template <class T> T __shfl_sync(u32, T v, int lane) { return from_lane(v, lane); }
template <class T> T __shfl_xor_sync(u32, T v, int d) { return from_lane(v, (current & 31) ^ d); }
template <class T> T __shfl_up_sync(u32, T v, int d) { const int l = current & 31; return from_lane(v, l < d ? l : l - d); }
inline u32 __ballot_sync(u32, bool v) {
  u32 all = 0;
  for (int i = 0; i < 32; i++) all |= (u32)from_lane((int)v, i) << i;
  return all;
}
inline bool __all_sync(u32, bool v) {
  bool all = true;
  for (int i = 0; i < 32; i++) all = from_lane((int)v, i) && all;
  return all;
}

// ---- asynchronous copies arrive either at once or as late as allowed (DEFER in the environment)
struct Copy {
  u32 to;
  const void* from;
  int kind, block;                                     // 0 zeros, 1 copy, 2 a commit, 3 an arrival at mbarrier `to`, 4 a word; whose memory
  u32 word = 0;
};
static const bool defer_copies = getenv("DEFER") != nullptr, from_last = getenv("FROM_LAST") != nullptr;
static std::deque<Copy> waiting[1024];
struct Phases { int threads, missing, phase, late; };          // late: arrivals that are waiting
static std::map<u32, Phases> mbarriers[2];
inline void arrive(const Copy& c) {
  if (c.kind == 0) memset(memories[c.block] + c.to, 0, 16);
  if (c.kind == 1) memcpy(memories[c.block] + c.to, c.from, 16);
  if (c.kind == 4) memcpy(memories[c.block] + c.to, &c.word, 4);
  if (c.kind == 3) {
    Phases& b = mbarriers[c.block].at(c.to);
    if (--b.missing == 0) { b.missing = b.threads; b.phase++; }
  }
}
inline void enqueue(const Copy& c) {
  if (!defer_copies) { arrive(c); return; }
  waiting[current].push_back(c);
  if (c.kind == 3) mbarriers[c.block].at(c.to).late++;
}
inline void arrive_late(const Copy& c) {
  if (c.kind == 3) mbarriers[c.block].at(c.to).late--;
  arrive(c);
}
inline void copy16_or_zero(bool on, u32 to, const void* from) {
  shared_address(raw + to + 15);
  enqueue({to, from, on ? 1 : 0, block_of_crew()});
}
inline void copy16(u32 to, const void* from) { copy16_or_zero(true, to, from); }
inline void copy_commit() { enqueue({0, nullptr, 2, block_of_crew()}); }
template <int N> void copy_wait() {
  static_assert(N == 0, "only waiting for all is emulated");
  for (const Copy& c : waiting[current]) arrive_late(c);
  waiting[current].clear();
}
inline void mbarrier_begin(u32 at, int threads) { mbarriers[block_of_crew()][at] = {threads, threads, 0, 0}; }
inline void copy_arrive(u32 at) { enqueue({at, nullptr, 3, block_of_crew()}); }
inline void mbarrier_wait(u32 at, int parity) {
  const int block = block_of_crew();
  Phases& barrier = mbarriers[block].at(at);
  while ((barrier.phase & 1) == parity) {
    for (auto& w : waiting) {                                 // nothing arrives before it is waited for
      if (barrier.late == 0) break;
      auto mark = std::find_if(w.begin(), w.end(), [&](const Copy& c) { return c.kind == 3 && c.to == at && c.block == block; });
      if (mark == w.end()) continue;
      for (auto c = w.begin(); c != mark + 1; ++c) arrive_late(*c);
      w.erase(w.begin(), mark + 1);
      if ((barrier.phase & 1) != parity) return;
    }
    leave();
  }
}
inline uint4 load16(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline uint4 shared_load16(u32 at) { uint4 v; memcpy(&v, raw + at, 16); return v; }
inline void shared_store16(u32 at, const uint4& v) { memcpy(raw + at, &v, 16); }

// ---- matrix pieces
inline void ldmatrix(u32 (&r)[4], u32 a, bool trans) {
  if (a % 16) { fprintf(stderr, "ldmatrix: address not a multiple of 16\n"); abort(); }
  const int l = current & 31;
  box_of_warp()[l][0] = a;
  __syncwarp();
  for (int m = 0; m < 4; m++) {
    uint16_t v[2];
    for (int e = 0; e < 2; e++) {
      const int row = trans ? l % 4 * 2 + e : l / 4, column = trans ? l / 4 : l % 4 * 2 + e;
      memcpy(&v[e], raw + box_of_warp()[m * 8 + row][0] + column * 2, 2);
    }
    r[m] = v[0] | (u32)v[1] << 16;
  }
  __syncwarp();
}
inline void ldmatrix4(u32 (&r)[4], u32 a) { ldmatrix(r, a, false); }
inline void ldmatrix4_trans(u32 (&r)[4], u32 a) { ldmatrix(r, a, true); }
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int l = current & 31, g = l / 4, q = l % 4;
  auto x = box_of_warp();
  for (int i = 0; i < 4; i++) x[l][i] = a[i];
  x[l][4] = b0;
  x[l][5] = b1;
  __syncwarp();
  auto half = [](u64 v, int e) { return widen((uint16_t)(e ? v >> 16 : v)); };
  for (int i = 0; i < 4; i++) {
    double s = 0;
    for (int k = 0; k < 16; k++) {
      const int lane = (k & 7) / 2, high = k >> 3;
      s += (double)half(x[g * 4 + lane][high * 2 + (i >> 1)], k & 1) * half(x[(q * 2 + (i & 1)) * 4 + lane][4 + high], k & 1);
    }
    d[i] = (float)(d[i] + s);
  }
  __syncwarp();
}

inline void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  d[0] = d[1] = d[2] = d[3] = 0.f;
  mma(d, a, b0, b1);
}

inline void fiber_main() {
  for (;;) {                                                  // a block a turn
    body();
    fibers[current].done = true;
    leave();
  }
}
// Run the blocks of a cluster, from block `first` on; shared memory starts as NaN.
inline void run_blocks(dim3 first, dim3 block, int together, std::function<void()> f) {
  const int n = block.x * block.y * together;
  body = f;
  blockDim = block;
  if ((int)fibers.size() < n) fibers.resize(n);                // between blocks, in which nobody is
  crew_barrier = {};
  for (auto& b : block_barriers) b = {};
  for (auto& of : named_barriers) for (auto& b : of) b = {};
  for (auto& b : warp_barriers) b = {};
  for (auto& w : waiting) w.clear();
  for (auto& of : mbarriers) of.clear();
  memset(memories, 0xff, sizeof memories);
  for (int i = 0; i < n; i++) fibers[i].done = false;
  for (bool any = true; any;) {
    any = false;
    for (int at = 0; at < n; at++) {
      const int i = from_last ? n - 1 - at : at, thread = i % (block.x * block.y);
      if (fibers[i].done) continue;
      any = true;
      current = i;
      threadIdx = {thread % block.x, thread / block.x, 0};
      blockIdx = {first.x + i / (block.x * block.y), first.y, 0};
      enter(fibers[i], fiber_main, 1 << 17);
    }
  }
}
template <class F> void run_grid(dim3 grid, dim3 block, F f, int together = 1) {
  gridDim = grid;
  for (int y = 0; y < grid.y; y++) for (int x = 0; x < grid.x; x += together) run_blocks({x, y, 0}, block, together, f);
}
