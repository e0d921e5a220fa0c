// What the expert kernels have in common: shapes, the chain of one output, how a tile leaves.
//
// Macros: HIDDEN (multiple of 128), WIDTH (expert width of this rank, multiple of 128), TOPK (experts of a token);
// GATE_UP defined: the gate_up part of a file, else its down part. SCALED: which chain.
//
// THE CHAIN (law 1). Every output is one chain whatever the kernel: acc = 0; for each K group of 32, ascending:
//   c = mma(k16 #1, mma(k16 #0, 0));  acc = fma(scale, c, acc);
// with SCALED instead acc = mma(k16 #1, mma(k16 #0, acc)) of weights code * scale, rounded to bf16 as the checkpoint's own
// library does: fewer instructions from about 16 tokens an expert on, more below. The chain is part of a rank's shape (op.Shape).
// A column of an mma never meets another column, so a token's bits cannot depend on the number of tokens, on its
// neighbours, on its place in the expert's list or on the kernel that ran. K is never split: nothing is reduced.
// Inside a kernel all weights and sums are smaller by a power of two (int4.cuh), which moves no bit.
// The combine is v = 0; for slot 0..TOPK-1 whose weight is not 0: v = fma(weight, y, v); then v += shared.
//
// WEIGHTS (repack.py): W[expert][rows/16][K/64][lane][16 B]: 16 bytes a lane = one 16x64 tile in mma A-fragment order.
// Lane (g = lane/4, q = lane%4), word j = 2h+s, k0 = 32h+8q+4s; nibble p = 0..3 of the low / high half word: p0 (row g,
// k0 / k0+1), p1 (row g+8, same k), p2 (row g, k0+2 / +3), p3 (row g+8, k0+2 / +3). K is permuted inside groups of 32 so
// that the B fragment of a token is one 16-byte load: x[32 b + 8 q .. +7].
// Scales: S[expert][rows/16][K/64][g][4] bf16 = (row g, row g+8) of group 0, then of group 1.
// gate_up tile t holds gate rows 8t..8t+7 as rows 0..7 and up rows 8t..8t+7 as rows 8..15: a lane's accumulators have gate
// and up of the same element, so SwiGLU needs no exchange.
//
// LISTS (device memory, moe_route): jobs[j] = {expert of this rank, first, count, -}; pairs[first .. first+count) =
// token*TOPK+slot. An expert with more tokens than the kernel's tile has several jobs. *njobs is read on the device; grids
// are sized for the largest possible count and surplus blocks leave at once.
// early (an argument of gate_up): the lists and x are older than the kernel before, which waited before it went (rule (c) of
// common.cuh; true when the shared expert runs between router and experts). Lists and weights, and x by cp.async, are then asked
// for before the wait: from L2, since no wait has made L1 forget older lists. For `down` the lists are always that old, h never.
#pragma once
#include "int4.cuh"

template <bool GU> struct Part {               // gate_up (true) or down
  static constexpr int K = GU ? HIDDEN : WIDTH, ROWS = GU ? 2 * WIDTH : HIDDEN;
  static constexpr int TILES = ROWS / 16, STEPS = K / 64;          // 16-row tiles of an expert, K64 steps of a row
};
static_assert(HIDDEN % 128 == 0 && WIDTH % 128 == 0, "shapes in multiples of 128");
constexpr int TILE_BYTES = 512, SCALE_BYTES = 64;                  // of one 16x64 step

#ifdef GATE_UP
constexpr bool PART = true;
typedef bf16 Out;                              // h[pair][WIDTH]
#else
constexpr bool PART = false;
typedef float Out;                             // y[pair][HIDDEN]
#endif

__device__ __forceinline__ float swiglu(float g, float u) { return g / (1.f + __expf(-g)) * u; }

// Brings a line into the L2: safe ahead of pdl_wait, for nothing is read.
__device__ __forceinline__ void prefetch(const void* p) {
#ifndef EMULATION
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// 16 rows x one group of 32, expanded for the mma.
struct Group {
  u32 a[2][4];
#ifndef SCALED
  u32 scales;
#endif
};
__device__ __forceinline__ Group expand(u32 w0, u32 w1, u32 scales) {
  Group v;
#ifdef SCALED
  const Factors f = scaled_factors(scales);
#else
  const Factors f = whole_factors();
  v.scales = scales;
#endif
  int4_weights(v.a[0], w0, f); int4_weights(v.a[1], w1, f);
  return v;
}
// acc += the group's weights times one token tile.
__device__ __forceinline__ void add_group(float (&acc)[4], const Group& w, const uint4& x) {
#ifdef SCALED
  mma(acc, w.a[0], x.x, x.y);
  mma(acc, w.a[1], x.z, x.w);
#else
  float c[4];
  mma_first(c, w.a[0], x.x, x.y);
  mma(c, w.a[1], x.z, x.w);
  const float s0 = low_float(w.scales), s1 = high_float(w.scales);
  acc[0] = fmaf(s0, c[0], acc[0]); acc[1] = fmaf(s0, c[1], acc[1]);
  acc[2] = fmaf(s1, c[2], acc[2]); acc[3] = fmaf(s1, c[3], acc[3]);
#endif
}

// One K64 step of two row tiles and NT token tiles, x from shared memory. x0, x1: this lane's address of token tile 0 for the
// two groups of 32; a token tile is 1024 bytes.
template <int NT>
__device__ __forceinline__ void step64(float (&acc)[2][NT][4], const uint4 (&w)[2], const uint2 (&s)[2], u32 x0, u32 x1) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Group a = expand(h ? w[0].z : w[0].x, h ? w[0].w : w[0].y, h ? s[0].y : s[0].x);
    const Group b = expand(h ? w[1].z : w[1].x, h ? w[1].w : w[1].y, h ? s[1].y : s[1].x);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      const uint4 x = shared_load16((h ? x1 : x0) + t * 1024);
      add_group(acc[0][t], a, x);
      add_group(acc[1][t], b, x);
    }
  }
}

template <int NT> __device__ __forceinline__ void clear(float (&acc)[2][NT][4]) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][t][i] = 0.f;
}

// Two row tiles, from `tile` of the expert on, of the job's tokens. GU: `out` is h = SwiGLU as bf16; else y as fp32.
template <bool GU, int NT, class T>
__device__ __forceinline__ void store_tiles(const float (&acc)[2][NT][4], const int* pairs, int count, int tile, T* out) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = t * 8 + 2 * q + e;
      if (i < count) {
        const long long pair = pairs[i];
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const float v0 = finish(acc[m][t][e]), v1 = finish(acc[m][t][2 + e]);
          if constexpr (GU) out[pair * WIDTH + (tile + m) * 8 + g] = __float2bfloat16(swiglu(v0, v1));
          else {
            T* y = out + pair * HIDDEN + (tile + m) * 16 + g;
            y[0] = v0; y[8] = v1;
          }
        }
      }
    }
}

__device__ __forceinline__ void prefetch_lists(const int4* job, const int* njobs, const int* pairs) {
  if (threadIdx.x & 31) return;
  prefetch(job); prefetch(njobs); prefetch(pairs);
}
// A job with the number of jobs as w. Both loads travel together: past the last job, what was read is not used.
__device__ __forceinline__ int4 job_and_count(const int4* job, const int* njobs) {
  const uint4 v = load16_new(job);
  const int count = load_new(njobs);
  return make_int4((int)v.x, (int)v.y, (int)v.z, count);
}

// Then the next kernel may start.
__device__ __forceinline__ void wait_and_go() {
  pdl_wait();
  pdl_go();                                    // go after wait: `down` reads the lists ahead of its own
}

// Where row `pair` of this part's input starts: the token's hidden state, or the pair's h.
__device__ __forceinline__ const bf16* input_row(const bf16* x, int pair) {
  return x + (long long)(PART ? pair / TOPK : pair) * Part<PART>::K;
}
