// W4A16 experts, ring: a block of WARPS warps owns 32*WARPS rows x whole K and at most 8*TOKENS tokens of one expert.
// Shared memory: for each warp a private ring of STAGES steps (2 tiles x 512 B, 2 x 64 B of scales), then SLOTS slots of
// TOKENS*8 tokens x 128 B of x. Only x is shared by the warps, so the block meets once per SPAN steps; between barriers the
// warps drift apart and their dequant, mma and scaling overlap. See moe.cuh for the chain and the layouts.
//
// The 16-byte chunk c of token t lies at chunk c ^ 4*(t&1): a quarter warp (2 tokens x 4 chunks) touches all 32 banks once.
// Group g of cp.async holds weights of step g and x of step g+SPAN-1 (group 0: x of 0..SPAN-1); at step s, groups 0..s are here.
#include "moe.cuh"

#ifndef TOKENS
#define TOKENS 1         // most 8-token tiles of a job
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef BLOCKS
#define BLOCKS 2         // of a multiprocessor
#endif
#ifndef STAGES
#define STAGES 6         // K64 steps of weights in each warp's ring
#endif
#ifndef SPAN
#define SPAN 4           // K64 steps between barriers
#endif
constexpr int STAGE = 2 * (TILE_BYTES + SCALE_BYTES), X_SLOT = TOKENS * 1024, AHEAD = STAGES - 2 + SPAN, SLOTS = AHEAD + SPAN;
static_assert(Part<PART>::TILES % (2 * WARPS) == 0, "a block's rows divide the expert's");

template <int NT>
__device__ __forceinline__ void ring_tile(u32 sm, const uint4* W, const uint2* S, const bf16* x, const int* pairs, int count,
                                          int expert, int tile, Out* out) {
  constexpr int ST = Part<PART>::STEPS, TP = 4 * WARPS, XP = (NT * 8 + TP - 1) / TP;       // x: TP tokens a pass of cp.async
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const long long first = (long long)expert * Part<PART>::TILES + tile + warp * 2;
  const uint4* w = W + first * ST * 32 + lane;
  const char* s = (const char*)(S + (first + (lane >> 2 & 1)) * ST * 8) + (lane & 3) * 16;
  const u32 wb = sm + warp * (STAGES * STAGE), xb = sm + WARPS * STAGES * STAGE;
  const u32 dw = wb + lane * 16;
  const bf16* xp[XP];
#pragma unroll
  for (int p = 0; p < XP; p++) {
    const int t = p * TP + (tid >> 3);
    xp[p] = input_row(x, pairs[t < count ? t : 0]) + (tid & 7) * 8;
  }
  const u32 dx = xb + (tid >> 3) * 128 + (((tid & 7) ^ ((tid >> 3 & 1) << 2)) * 16);       // TP is even: same swizzle each pass
  auto load_w = [&](int st, u32 o) {           // called for st = 0, 1, 2, ...: the pointers run
    if (st < ST) { copy16(dw + o, w); copy16(dw + o + 512, w + ST * 32); if (lane < 8) copy16(dw + o + 1024, s); }
    w += 32; s += 64;
  };
  auto load_x = [&](int st, u32 o) {
    if (st < ST)
#pragma unroll
      for (int p = 0; p < XP; p++)
        if ((NT * 8) % TP == 0 || p + 1 < XP || p * TP + (tid >> 3) < NT * 8) copy16(dx + p * TP * 128 + o, xp[p]);
#pragma unroll
    for (int p = 0; p < XP; p++) xp[p] += 64;
  };
#pragma unroll
  for (int i = 0; i < SPAN - 1; i++) load_x(i, i * X_SLOT);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) { load_w(i, i * STAGE); load_x(i + SPAN - 1, (i + SPAN - 1) * X_SLOT); copy_commit(); }
  float acc[2][NT][4];
  clear(acc);
  u32 wo = 0, wl = (STAGES - 1) * STAGE, xo = 0, xl = AHEAD * X_SLOT;
  const u32 rs = wb + 1024 + g * 8, rx0 = xb + g * 128 + ((q ^ ((g & 1) << 2)) * 16), rx1 = rx0 ^ 64;
#pragma unroll 1
  for (int st = 0; st < ST; st++) {
    copy_wait<STAGES - 2>();
    if (st % SPAN == 0) __syncthreads(); else __syncwarp();
    load_w(st + STAGES - 1, wl); load_x(st + AHEAD, xl); copy_commit();
    wl = wl == (STAGES - 1) * STAGE ? 0 : wl + STAGE; xl = xl == (SLOTS - 1) * X_SLOT ? 0 : xl + X_SLOT;
    const uint4 wv[2] = {shared_load16(dw + wo), shared_load16(dw + wo + 512)};
    const uint2 sv[2] = {shared_load8(rs + wo), shared_load8(rs + wo + 64)};
    step64(acc, wv, sv, rx0 + xo, rx1 + xo);
    wo = wo == (STAGES - 1) * STAGE ? 0 : wo + STAGE; xo = xo == (SLOTS - 1) * X_SLOT ? 0 : xo + X_SLOT;
  }
  store_tiles(acc, pairs, count, tile + warp * 2, out);
}

#ifdef GATE_UP
#define ENTRY gate_up_ring
#else
#define ENTRY down_ring
#endif
#include "tiles.cuh"
