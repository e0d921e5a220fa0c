// The warp-group products of sm_90 (wgmma): four warps times a tile of shared memory that the tensor cores read by themselves.
// Included after common.cuh. Only sm_90a has them; kernels that use them stand beside others of the same chain.
//
// warpgroup_mma: d += A B like common.cuh's mma for each of T column tiles, with the same A fragment and the same
// d[tile][4] in every warp, so warp w of the group multiplies rows of its own. A stays in registers; B is in shared memory:
// column c of 8 T is 128 bytes (K64) at 128 c, its 16-byte chunk i at place i ^ (c & 7), columns from an address that 1024
// divides; `b` is that address + 32 bytes for each k16 before this one.
// Bits: one k16 product of Hopper's mma and wgmma is the same fused sum of 16 products and the accumulator (published models of
// both, MMA-Sim 2025, agree); sweeps and GPU tests compare them before anything relies on it.
//
// Order: warpgroup_begin(); products; warpgroup_commit(); ... warpgroup_wait<N>() until at most N committed groups run. Until
// then A's registers, d and the shared memory that is read must not change. Other threads' writes to B: publish() by each
// writer, then a barrier, then the products.
#pragma once
#include "common.cuh"

#ifndef EMULATION        // the swizzle goes by address: dynamic shared memory starts at a multiple of 1024
#undef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(1024) type name[]
#endif

#ifdef EMULATION
namespace emulated {
struct Product { float (*d)[4]; int tiles; float a[2][16]; u32 b; };
static std::deque<std::vector<Product>> products[1024];      // of each thread: groups, the last one still open
static const bool checked = (unfinished = [] {
  for (const auto& group : products[threadIdx.x]) if (!group.empty()) return true;
  return false;
}) != nullptr;
inline float half_of(u32 v, int e) { return __uint_as_float(e ? v & 0xffff0000u : v << 16); }
inline void perform(const Product& p) {
  const int q = threadIdx.x & 3;
  for (int t = 0; t < p.tiles; t++)
    for (int i = 0; i < 4; i++) {
      const int c = t * 8 + 2 * q + (i & 1);
      double sum = 0;
      for (int k = 0; k < 16; k++) {
        const u32 at = (p.b & ~127u) + c * 128, chunk = (p.b % 128 / 16 + k / 8) ^ (c & 7);
        u32 word;
        memcpy(&word, place(at + chunk * 16, 16) + k % 8 / 2 * 4, 4);
        sum += (double)p.a[i / 2][k] * half_of(word, k & 1);
      }
      p.d[t][i] = (float)(p.d[t][i] + sum);
    }
}
}  // namespace emulated
inline void copy4_or_zero(bool on, u32 to, const void* from) { emulated::enqueue({to, from, !on, 4}); }
inline void copy4_if(bool on, u32 to, const void* from) { if (on) copy4_or_zero(true, to, from); }
inline void publish() {}
inline void warpgroup_begin() {}
inline void warpgroup_commit() { emulated::products[threadIdx.x].push_back({}); }
// As copies: at once with EMULATED_EARLY, else as late as allowed (finds registers, d and shared memory changed too early).
template <int N> inline void warpgroup_wait() {
  auto& groups = emulated::products[threadIdx.x];
  if (groups.empty()) groups.push_back({});
  while ((int)groups.size() - 1 > N) {
    for (const auto& p : groups.front()) emulated::perform(p);
    groups.pop_front();
  }
}
template <int T> inline void warpgroup_mma(float (&d)[T][4], const u32 (&a)[4], u32 b) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; i++) emulated::lanes()[lane][i] = a[i];
  emulated::meet_warp();
  emulated::Product p = {d, T, {}, b};
  for (int row = 0; row < 2; row++)
    for (int k = 0; k < 16; k++)
      p.a[row][k] = emulated::half_of((u32)emulated::lanes()[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + row], k & 1);
  emulated::meet_warp();
  auto& groups = emulated::products[threadIdx.x];
  if (groups.empty()) groups.push_back({});
  if (emulated::early) emulated::perform(p);
  else groups.back().push_back(p);
}
#else
// cp.async of 4 bytes a lane; see copy16_if and copy16_or_zero.
__device__ __forceinline__ void copy4_if(bool on, u32 to, const void* from) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p,%2,0; @p cp.async.ca.shared.global [%0],[%1],4; }"
               ::"r"(to), "l"(from), "r"((u32)on) : "memory");
}
__device__ __forceinline__ void copy4_or_zero(bool on, u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(to), "l"(from), "r"(on ? 4u : 0u) : "memory");
}
// This thread's writes to shared memory, for the tensor cores of all.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// 128-byte swizzle, 1024 bytes from one 8-column tile to the next (the leading offset is not used then).
__device__ __forceinline__ u64 columns(u32 b) { return (u64)(b >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

#define WG_S1 "%0,%1,%2,%3"
#define WG_S2 WG_S1 ",%4,%5,%6,%7"
#define WG_S3 WG_S2 ",%8,%9,%10,%11"
#define WG_S4 WG_S3 ",%12,%13,%14,%15"
#define WG_S5 WG_S4 ",%16,%17,%18,%19"
#define WG_S6 WG_S5 ",%20,%21,%22,%23"
#define WG_S7 WG_S6 ",%24,%25,%26,%27"
#define WG_S8 WG_S7 ",%28,%29,%30,%31"
#define WG_S9 WG_S8 ",%32,%33,%34,%35"
#define WG_S10 WG_S9 ",%36,%37,%38,%39"
#define WG_S11 WG_S10 ",%40,%41,%42,%43"
#define WG_S12 WG_S11 ",%44,%45,%46,%47"
#define WG_S13 WG_S12 ",%48,%49,%50,%51"
#define WG_S14 WG_S13 ",%52,%53,%54,%55"
#define WG_S15 WG_S14 ",%56,%57,%58,%59"
#define WG_S16 WG_S15 ",%60,%61,%62,%63"
#define WG_S17 WG_S16 ",%64,%65,%66,%67"
#define WG_S18 WG_S17 ",%68,%69,%70,%71"
#define WG_S19 WG_S18 ",%72,%73,%74,%75"
#define WG_S20 WG_S19 ",%76,%77,%78,%79"
#define WG_S21 WG_S20 ",%80,%81,%82,%83"
#define WG_S22 WG_S21 ",%84,%85,%86,%87"
#define WG_S23 WG_S22 ",%88,%89,%90,%91"
#define WG_S24 WG_S23 ",%92,%93,%94,%95"
#define WG_S25 WG_S24 ",%96,%97,%98,%99"
#define WG_S26 WG_S25 ",%100,%101,%102,%103"
#define WG_S27 WG_S26 ",%104,%105,%106,%107"
#define WG_S28 WG_S27 ",%108,%109,%110,%111"
#define WG_S29 WG_S28 ",%112,%113,%114,%115"
#define WG_S30 WG_S29 ",%116,%117,%118,%119"
#define WG_S31 WG_S30 ",%120,%121,%122,%123"
#define WG_S32 WG_S31 ",%124,%125,%126,%127"
#define WG_D(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define WG_D1 WG_D(0)
#define WG_D2 WG_D1, WG_D(1)
#define WG_D3 WG_D2, WG_D(2)
#define WG_D4 WG_D3, WG_D(3)
#define WG_D5 WG_D4, WG_D(4)
#define WG_D6 WG_D5, WG_D(5)
#define WG_D7 WG_D6, WG_D(6)
#define WG_D8 WG_D7, WG_D(7)
#define WG_D9 WG_D8, WG_D(8)
#define WG_D10 WG_D9, WG_D(9)
#define WG_D11 WG_D10, WG_D(10)
#define WG_D12 WG_D11, WG_D(11)
#define WG_D13 WG_D12, WG_D(12)
#define WG_D14 WG_D13, WG_D(13)
#define WG_D15 WG_D14, WG_D(14)
#define WG_D16 WG_D15, WG_D(15)
#define WG_D17 WG_D16, WG_D(16)
#define WG_D18 WG_D17, WG_D(17)
#define WG_D19 WG_D18, WG_D(18)
#define WG_D20 WG_D19, WG_D(19)
#define WG_D21 WG_D20, WG_D(20)
#define WG_D22 WG_D21, WG_D(21)
#define WG_D23 WG_D22, WG_D(22)
#define WG_D24 WG_D23, WG_D(23)
#define WG_D25 WG_D24, WG_D(24)
#define WG_D26 WG_D25, WG_D(25)
#define WG_D27 WG_D26, WG_D(26)
#define WG_D28 WG_D27, WG_D(27)
#define WG_D29 WG_D28, WG_D(28)
#define WG_D30 WG_D29, WG_D(29)
#define WG_D31 WG_D30, WG_D(30)
#define WG_D32 WG_D31, WG_D(31)

template <int T> __device__ __forceinline__ void warpgroup_mma(float (&d)[T][4], const u32 (&a)[4], u32 b);
#define WARPGROUP_MMA(T, N, A0, A1, A2, A3, B)                                                                      \
  template <> __device__ __forceinline__ void warpgroup_mma<T>(float (&d)[T][4], const u32 (&a)[4], u32 b) {        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WG_S##T "},{%" #A0 ",%" #A1 ",%" #A2  \
                 ",%" #A3 "},%" #B ",1,1,1,0;"                                                                      \
                 : WG_D##T : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns(b)));                          \
  }
WARPGROUP_MMA(1, 8, 4, 5, 6, 7, 8)
WARPGROUP_MMA(2, 16, 8, 9, 10, 11, 12)
WARPGROUP_MMA(3, 24, 12, 13, 14, 15, 16)
WARPGROUP_MMA(4, 32, 16, 17, 18, 19, 20)
WARPGROUP_MMA(5, 40, 20, 21, 22, 23, 24)
WARPGROUP_MMA(6, 48, 24, 25, 26, 27, 28)
WARPGROUP_MMA(7, 56, 28, 29, 30, 31, 32)
WARPGROUP_MMA(8, 64, 32, 33, 34, 35, 36)
WARPGROUP_MMA(9, 72, 36, 37, 38, 39, 40)
WARPGROUP_MMA(10, 80, 40, 41, 42, 43, 44)
WARPGROUP_MMA(11, 88, 44, 45, 46, 47, 48)
WARPGROUP_MMA(12, 96, 48, 49, 50, 51, 52)
WARPGROUP_MMA(13, 104, 52, 53, 54, 55, 56)
WARPGROUP_MMA(14, 112, 56, 57, 58, 59, 60)
WARPGROUP_MMA(15, 120, 60, 61, 62, 63, 64)
WARPGROUP_MMA(16, 128, 64, 65, 66, 67, 68)
WARPGROUP_MMA(18, 144, 72, 73, 74, 75, 76)
WARPGROUP_MMA(20, 160, 80, 81, 82, 83, 84)
WARPGROUP_MMA(22, 176, 88, 89, 90, 91, 92)
WARPGROUP_MMA(24, 192, 96, 97, 98, 99, 100)
WARPGROUP_MMA(32, 256, 128, 129, 130, 131, 132)
#endif  // EMULATION
