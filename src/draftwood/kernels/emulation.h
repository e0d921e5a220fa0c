// common.cuh for a CPU: a block of threads as fibers of one CPU thread, and every piece of common.cuh with its meaning.
// Checks indices, barriers, cp.async waits, reuse of shared memory and launchers; sums inside an mma are formed in double and
// rounded once, so bits are not a GPU's, but equal chains give equal bits here too. Chosen by EMULATION (tests only).
//
// copy16 & co: with EMULATED_EARLY set in the environment a copy happens at once (finds writes to a place still read), else
// as late as allowed, in copy_wait (finds waits that are too short). Shared memory starts as 0xff bytes: bf16 and fp32 NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "fibers.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulated::shared)

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
struct dim3 { int x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr u32 ALL_LANES = 0xffffffffu;

namespace emulated {
constexpr int SHARED = 232448;
alignas(128) static unsigned char shared[SHARED];
struct Copy { u32 to; const void* from; bool zero; int bytes; };
static std::vector<std::deque<std::vector<Copy>>> copies;   // of each thread: groups, the last one still open
static int alive;
static std::function<void()> body;
static bool (*unfinished)();                                // of another header: whether this thread must not end yet
static bool early;
static char failure[200];                                   // empty, or why the grid was given up
inline void fail(const char* what) {                        // does not return: the scheduler drops all fibers
  snprintf(failure, sizeof failure, "%s, block %d %d %d thread %d", what, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
  leave();
}
struct Barrier { int arrived = 0; unsigned turn = 0; };
static Barrier block_barrier, warp_barrier[32];
inline void meet(Barrier& b, int all) {
  const unsigned turn = b.turn;
  if (++b.arrived == all) { b.arrived = 0; b.turn++; }
  else while (b.turn == turn) leave();
}
inline void meet_warp() { meet(warp_barrier[threadIdx.x >> 5], 32); }
static u64 exchange[32][32][8];                             // warp, lane, values
inline u64 (*lanes())[8] { return exchange[threadIdx.x >> 5]; }
template <class T> inline T from_lane(T v, int lane) {      // every lane gives v, each takes the one of `lane`
  memcpy(&lanes()[threadIdx.x & 31][0], &v, sizeof(T));
  meet_warp();
  T r;
  memcpy(&r, &lanes()[lane & 31][0], sizeof(T));
  meet_warp();
  return r;
}
inline unsigned char* place(u32 a, int bytes) {
  if (a % bytes || a + bytes > (u32)SHARED) fail("shared address");
  return shared + a;
}
inline void perform(const Copy& c) {
  if (c.zero) memset(place(c.to, c.bytes), 0, c.bytes);
  else memcpy(place(c.to, c.bytes), c.from, c.bytes);
}
inline void enqueue(const Copy& c) {
  if (early) perform(c);
  else copies[threadIdx.x].back().push_back(c);
}
inline void thread_main() {
  for (;;) {                                                // a block a turn
    body();
    for (auto& group : copies[threadIdx.x]) if (!group.empty()) fail("ends with copies on their way");
    if (unfinished && unfinished()) fail("ends with products on their way");
    fibers[current].done = true;
    alive--;
    leave();
  }
}
inline void run_block(int threads) {
  if ((int)fibers.size() < threads) { fibers.resize(threads); copies.resize(threads); }
  for (int i = 0; i < threads; i++) { fibers[i].done = false; copies[i].clear(); copies[i].push_back({}); }
  block_barrier = Barrier();
  for (auto& b : warp_barrier) b = Barrier();
  memset(shared, 0xff, SHARED);
  for (alive = threads; alive > 0 && !failure[0];)
    for (int i = 0; i < threads && !failure[0]; i++)
      if (!fibers[i].done) {
        current = i;
        threadIdx = {i, 0, 0};
        enter(fibers[i], thread_main, 1 << 16);
      }
  if (failure[0]) for (auto& f : fibers) f.begun = false;   // where they stand nobody goes on
}
// Returns nullptr, or why it gave up.
inline const char* run_grid(dim3 grid, int threads, std::function<void()> kernel) {
  failure[0] = 0;
  body = std::move(kernel);
  early = getenv("EMULATED_EARLY") != nullptr;
  gridDim = grid;
  blockDim = {threads, 1, 1};
  for (int z = 0; z < grid.z; z++)
    for (int y = 0; y < grid.y; y++)
      for (int x = 0; x < grid.x && !failure[0]; x++) { blockIdx = {x, y, z}; run_block(threads); }
  return failure[0] ? failure : nullptr;
}
// Calls a kernel with arguments given as 64-bit words.
template <class T> inline T argument(u64 word) { T v; memcpy(&v, &word, sizeof(T)); return v; }
template <class... A, size_t... I> inline void call(void (*f)(A...), const u64* words, std::index_sequence<I...>) {
  f(argument<A>(words[I])...);
}
template <class... A> inline void call(void (*f)(A...), const u64* words) { call(f, words, std::index_sequence_for<A...>()); }
}  // namespace emulated

// ---------------------------------------------------------------- CUDA's own functions
inline void __syncthreads() { emulated::meet(emulated::block_barrier, blockDim.x); }
inline void __syncwarp() { emulated::meet_warp(); }
template <class T> inline T __shfl_sync(u32, T v, int lane) { return emulated::from_lane(v, lane); }
template <class T> inline T __shfl_xor_sync(u32, T v, int mask) { return emulated::from_lane(v, (threadIdx.x & 31) ^ mask); }
template <class T> inline T __shfl_up_sync(u32, T v, int by) {
  const int lane = threadIdx.x & 31;
  return emulated::from_lane(v, lane >= by ? lane - by : lane);
}
template <class T> inline T __shfl_down_sync(u32, T v, int by) {
  const int lane = threadIdx.x & 31;
  return emulated::from_lane(v, lane + by < 32 ? lane + by : lane);
}
inline u32 __ballot_sync(u32, bool v) {
  u32 all = 0;
  for (int d = 0; d < 32; d++) all |= (u32)emulated::from_lane<u32>(v, d) << d;
  return all;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __popcll(u64 v) { return __builtin_popcountll(v); }
inline u32 atomicOr(u32* p, u32 v) { const u32 old = *p; *p |= v; return old; }
inline float __expf(float v) { return expf(v); }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
struct bf16 { uint16_t bits; };
typedef bf16 __nv_bfloat16;
inline float __bfloat162float(bf16 v) { return __uint_as_float((u32)v.bits << 16); }
inline bf16 __float2bfloat16(float f) {
  const u32 u = __float_as_uint(f);
  if (f != f) return {0x7fff};
  return {(uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline bf16 __float2bfloat16_rn(float f) { return __float2bfloat16(f); }

// ---------------------------------------------------------------- common.cuh's pieces that are inline assembly there
inline void pdl_wait() {}
inline void pdl_go() {}
inline void pdl_go_early() {}
inline u32 shared_address(const void* p) {
  const long long at = (const unsigned char*)p - emulated::shared;
  if (at < 0 || at >= emulated::SHARED) emulated::fail("address outside dynamic shared memory");
  return (u32)at;
}
inline uint4 load16(const void* p) {
  if ((uintptr_t)p % 16) emulated::fail("16-byte load not aligned");
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline uint4 load16_once(const void* p) { return load16(p); }
inline uint4 load16_new(const void* p) { return load16(p); }
template <class T> inline T load_new(const T* p) { return *p; }
inline void store16(void* p, const uint4& v) {
  if ((uintptr_t)p % 16) emulated::fail("16-byte store not aligned");
  memcpy(p, &v, 16);
}
inline uint4 shared_load16(u32 a) { uint4 v; memcpy(&v, emulated::place(a, 16), 16); return v; }
inline uint2 shared_load8(u32 a) { uint2 v; memcpy(&v, emulated::place(a, 8), 8); return v; }
inline void shared_store16(u32 a, const uint4& v) { memcpy(emulated::place(a, 16), &v, 16); }
inline void copy16_or_zero(bool on, u32 to, const void* from) {
  if ((uintptr_t)from % 16) emulated::fail("copied address not aligned");
  emulated::enqueue({to, from, !on, 16});
}
inline void copy16(u32 to, const void* from) { copy16_or_zero(true, to, from); }
inline void copy16_if(bool on, u32 to, const void* from) { if (on) copy16(to, from); }
inline void copy_commit() { emulated::copies[threadIdx.x].push_back({}); }
template <int N> inline void copy_wait() {
  auto& groups = emulated::copies[threadIdx.x];
  while ((int)groups.size() - 1 > N) {
    for (const auto& c : groups.front()) emulated::perform(c);
    groups.pop_front();
  }
}
template <int COUNT> inline void emulated_ldmatrix(u32* r, u32 a, bool trans) {
  const int lane = threadIdx.x & 31;
  emulated::lanes()[lane][0] = a;
  emulated::meet_warp();
  for (int m = 0; m < COUNT; m++) {
    uint16_t pair[2];
    for (int e = 0; e < 2; e++) {
      const int row = trans ? lane % 4 * 2 + e : lane / 4, column = trans ? lane / 4 : lane % 4 * 2 + e;
      memcpy(&pair[e], emulated::place((u32)emulated::lanes()[m * 8 + row][0], 16) + column * 2, 2);
    }
    r[m] = pair[0] | (u32)pair[1] << 16;
  }
  emulated::meet_warp();
}
inline void ldmatrix4(u32 (&r)[4], u32 a) { emulated_ldmatrix<4>(r, a, false); }
inline void ldmatrix4_trans(u32 (&r)[4], u32 a) { emulated_ldmatrix<4>(r, a, true); }
inline void ldmatrix2(u32 (&r)[2], u32 a) { emulated_ldmatrix<2>(r, a, false); }
inline void ldmatrix2_trans(u32 (&r)[2], u32 a) { emulated_ldmatrix<2>(r, a, true); }
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int lane = threadIdx.x & 31, g = lane / 4, q = lane % 4;
  auto x = emulated::lanes();
  for (int i = 0; i < 4; i++) x[lane][i] = a[i];
  x[lane][4] = b0; x[lane][5] = b1;
  emulated::meet_warp();
  auto half = [](u64 v, int e) { return __uint_as_float(e ? (u32)v & 0xffff0000u : (u32)v << 16); };
  for (int i = 0; i < 4; i++) {
    const int column = q * 2 + (i & 1);
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2, e = k & 1, upper = k / 8;
      sum += (double)half(x[g * 4 + from][upper * 2 + i / 2], e) * half(x[column * 4 + from][4 + upper], e);
    }
    d[i] = (float)(d[i] + sum);
  }
  emulated::meet_warp();
}
inline void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  d[0] = d[1] = d[2] = d[3] = 0.f;
  mma(d, a, b0, b1);
}
inline u32 pack_bf16(float low, float high) { return __float2bfloat16(low).bits | (u32)__float2bfloat16(high).bits << 16; }
