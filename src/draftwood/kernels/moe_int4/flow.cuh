// One warp, 16 rows and at most 8 tokens: weights through a private ring in shared memory that is never drained. While the
// last steps of a unit are computed, those of a later unit are on their way. x is read through L1, XAHEAD steps ahead.
// A round is LEN steps in the ring's slots FIRST .. FIRST + LEN - 1; the ring has UNITS rounds. See moe.cuh for the chain.
#include "moe.cuh"

#ifndef WARPS
#define WARPS 4          // of a block
#endif
#ifndef BLOCKS
#define BLOCKS 4         // of a multiprocessor (16 warps of 128 registers; more warps are slower)
#endif
#ifndef DEPTH
#define DEPTH 8          // K64 steps in a warp's ring: even
#endif
#ifndef XAHEAD
#define XAHEAD 1
#endif
typedef Part<PART> P;
constexpr int STEP_BYTES = TILE_BYTES + SCALE_BYTES, RING_BYTES = DEPTH * STEP_BYTES;
constexpr int LEN = DEPTH < P::STEPS ? DEPTH : P::STEPS, UNITS = DEPTH / LEN, ROUNDS = P::STEPS / LEN;
static_assert(DEPTH % 2 == 0 && P::STEPS % LEN == 0 && DEPTH % LEN == 0 && LEN % XAHEAD == 0, "whole rounds");

// The next bytes that a lane copies; W and S already point at the lane's own 16 bytes of a tile.
struct Place {
  const uint4* w;
  const uint2* s;
  __device__ __forceinline__ void advance(int steps) { w += steps * 32; s += steps * 8; }
};
__device__ __forceinline__ Place place(const uint4* W, const uint2* S, int tile) {
  return {W + (long long)tile * (P::STEPS * 32), S + (long long)tile * (P::STEPS * 8)};
}

struct Ring {            // shared addresses: this lane's weights, its scales, where it copies scales to
  u32 w, s, d;
  __device__ __forceinline__ explicit Ring(const unsigned char* smem) {
    const u32 base = shared_address(smem) + (threadIdx.x >> 5) * RING_BYTES;
    const int lane = threadIdx.x & 31;
    w = base + lane * 16;
    s = base + DEPTH * TILE_BYTES + (lane >> 2) * 8;
    d = base + DEPTH * TILE_BYTES + lane * 16;
  }
  // the 64 bytes of scales are copied by 4 lanes
  __device__ __forceinline__ void load(int slot, const Place& from, int step, bool on) const {
    copy16_if(on, w + slot * TILE_BYTES, from.w + step * 32);
    copy16_if(on && (threadIdx.x & 31) < 4, d + slot * SCALE_BYTES, from.s + step * 8);
  }
  __device__ __forceinline__ void fill(int first, const Place& from, bool on) const {
#pragma unroll
    for (int i = 0; i < LEN; i++) { load(first + i, from, i, on); if (i & 1) copy_commit(); }
  }
};

struct Ahead { uint4 v[XAHEAD][2]; };            // x of the next steps
__device__ __forceinline__ void look(Ahead& a, int i, const bf16* x) { a.v[i][0] = load16(x); a.v[i][1] = load16(x + 32); }
__device__ __forceinline__ void look_all(Ahead& a, const bf16* x) {
#pragma unroll
  for (int i = 0; i < XAHEAD; i++) look(a, i, x + i * 64);
}

// acc += LEN steps. Each slot is filled again from `from` when `on`. x: this lane's 8 values of its token's first group;
// then: the same of the round after this one.
template <int FIRST>
__device__ __forceinline__ void round(float (&acc)[4], const Ring& ring, const Place& from, bool on, Ahead& ahead, const bf16* x,
                                      const bf16* then) {
#pragma unroll
  for (int i = 0; i < LEN; i += 2) {
    uint4 w[2]; uint2 s[2];
    copy_wait<DEPTH / 2 - 1>(); __syncwarp();                      // the 4 copying lanes' scales are for all
#pragma unroll
    for (int k = 0; k < 2; k++) {
      w[k] = shared_load16(ring.w + (FIRST + i + k) * TILE_BYTES);
      s[k] = shared_load8(ring.s + (FIRST + i + k) * SCALE_BYTES);
    }
    __syncwarp();                              // all have read before the places are written again
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int st = i + k, slot = st % XAHEAD;
      const uint4 x0 = ahead.v[slot][0], x1 = ahead.v[slot][1];
      look(ahead, slot, st + XAHEAD < LEN ? x + (st + XAHEAD) * 64 : then + (st + XAHEAD - LEN) * 64);
      add_group(acc, expand(w[k].x, w[k].y, s[k].x), x0);
      add_group(acc, expand(w[k].z, w[k].w, s[k].y), x1);
      ring.load(FIRST + st, from, st, on);
    }
    copy_commit();
  }
}
__device__ __forceinline__ void clear4(float (&v)[4]) { v[0] = v[1] = v[2] = v[3] = 0.f; }
// h of one unit: 8 columns of the job's tokens.
__device__ __forceinline__ void store_h(const float (&acc)[4], int count, int pair, int column, bf16* h) {
  const int q = threadIdx.x & 3;
  const long long p0 = __shfl_sync(ALL_LANES, pair, 8 * q), p1 = __shfl_sync(ALL_LANES, pair, 8 * q + 4);
  if (2 * q < count) h[p0 * WIDTH + column] = __float2bfloat16(swiglu(finish(acc[0]), finish(acc[2])));
  if (2 * q + 1 < count) h[p1 * WIDTH + column] = __float2bfloat16(swiglu(finish(acc[1]), finish(acc[3])));
}
