// W4A16 experts of scaled weights for many tokens each, by the warp-group products of sm_90: a warp owns 16 rows x whole K, four
// warps multiply 64 rows by x from shared memory, where the tensor cores read it themselves. For staged.cu's mma
// every warp loads all of x again, and half of the tensor cores' rate is out of reach. See moe.cuh for the chain and the
// layouts, ../warpgroup.cuh for x's place in shared memory and for the bits.
//
// Shared memory: SLOTS slots of TOKENS*8 tokens x 128 B of x (a step's), then for each warp a ring of STAGES steps (512 B of
// weights and 64 B of scales). The weights of a step are expanded while the products of the step before run. A token's 16-byte
// chunk 4b + w holds, for q = 0..3, word w of x[32b + 8q .. +7]: what the four lanes of a B fragment read, in the weights' order of k.
// Group g of cp.async holds the weights and x of step g; at step s, groups 0..s are here.
#include "moe.cuh"
#include "../warpgroup.cuh"

#ifndef SCALED
#error "the scale of an exact sum is applied between the products of two groups"
#endif
#ifndef TOKENS
#define TOKENS 12        // most 8-token tiles of a job
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef BLOCKS
#define BLOCKS 2         // of a multiprocessor
#endif
#ifndef STAGES
#define STAGES 6         // K64 steps on their way or in use
#endif
#define WARP_TILES 1
constexpr int STAGE = TILE_BYTES + SCALE_BYTES, X_SLOT = TOKENS * 1024;
static_assert(WARPS % 4 == 0, "whole warp groups");
static_assert(Part<PART>::TILES % WARPS == 0, "a block's rows divide the expert's");

struct Weights { u32 a[4][4]; };               // A fragments of a step
__device__ __forceinline__ void expand_step(Weights& v, const uint4& w, const uint2& s) {
  const Group first = expand(w.x, w.y, s.x), second = expand(w.z, w.w, s.y);
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int p = 0; p < 4; p++) { v.a[k][p] = first.a[k][p]; v.a[2 + k][p] = second.a[k][p]; }
}

template <int NT>
__device__ __forceinline__ void ring_tile(u32 sm, const uint4* W, const uint2* S, const bf16* x, const int* pairs, int count,
                                          int expert, int tile, Out* out) {
  constexpr int ST = Part<PART>::STEPS, XP = (NT * 8 + WARPS - 1) / WARPS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const long long first = (long long)expert * Part<PART>::TILES + tile + warp;
  const uint4* w = W + first * ST * 32 + lane;
  const char* s = (const char*)(S + first * ST * 8) + lane * 16;
  const u32 ring = sm + STAGES * X_SLOT + warp * (STAGES * STAGE);
  // x: warp w takes tokens w, w + WARPS, ... of the job, a lane two values of each. Rows in units of 16 bytes.
  u32 row[XP];
#pragma unroll
  for (int p = 0; p < XP; p++) {
    const int t = warp + p * WARPS;
    row[p] = (u32)((input_row(x, load_new(pairs + (t < count ? t : 0))) - x) / 8);
  }
  const bf16* from = x + lane * 2;
  const int live = count - warp, chunk = lane >> 4 << 2 | (lane & 3);
  const u32 xput = sm + warp * 128 + (lane >> 2 & 3) * 4;
  auto load_w = [&](int st, u32 slot) {        // called for st = 0, 1, 2, ...: the pointers run
    copy16_if(st < ST, ring + slot * STAGE + lane * 16, w);
    copy16_if(st < ST && lane < 4, ring + slot * STAGE + TILE_BYTES + lane * 16, s);
    w += 32; s += 64;
  };
  auto load_x = [&](int st, u32 slot) {
#pragma unroll
    for (int p = 0; p < XP; p++)
      copy4_if(st < ST && p * WARPS < live, xput + slot * X_SLOT + p * (WARPS * 128) + ((chunk ^ (warp + p * WARPS & 7)) << 4),
               from + (long long)row[p] * 8);
    from += 64;
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load_w(i, i);
  if (!PART) wait_and_go();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load_x(i, i);
  if (PART) wait_and_go();
  float acc[1][NT][4];
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[0][t][i] = 0.f;
  u32 now = 0, next = STAGES - 1;
  auto turn = [&](Weights& v, int st) {        // v is not what the products under way read
    copy_wait<STAGES - 2>();
    __syncwarp();                              // the 4 copying lanes' scales are for all
    expand_step(v, shared_load16(ring + now * STAGE + lane * 16), shared_load8(ring + now * STAGE + TILE_BYTES + (lane >> 2) * 8));
    warpgroup_wait<0>();
    publish();
    __syncthreads();                           // x of step st is here for all; all products before it are done
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) warpgroup_mma<NT>(acc[0], v.a[k], sm + now * X_SLOT + k * 32);
    warpgroup_commit();
    load_w(st + STAGES - 1, next);
    load_x(st + STAGES - 1, next);
    now = now == STAGES - 1 ? 0 : now + 1; next = next == STAGES - 1 ? 0 : next + 1;
  };
  Weights even, odd;
#pragma unroll 1
  for (int st = 0; st < ST; st += 2) { turn(even, st); turn(odd, st + 1); }
  warpgroup_wait<0>();
  store_tiles(acc, pairs, count, tile + warp, out);
}

#ifdef GATE_UP
#define ENTRY gate_up_group
#else
#define ENTRY down_group
#endif
#include "tiles.cuh"
