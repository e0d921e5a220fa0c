// W4A16 experts, both parts in one launch of blocks that stay, for up to some 19 tokens each. A block of WARPS warps that multiply
// and one that fetches x takes unit after unit (32 * WARPS rows x whole K of a job), first all of gate_up, then those of `down`. A
// warp owns 2 row tiles and the ring of their weights, which runs on over the end of a unit and of a part: memory is never waited
// for but at the start. It meets the others of its block only at the gates of x (`full`, `empty`). Chains: see moe.cuh.
//
// h: a unit of `down` waits until all warps have told that their part of its job's h is whole. Units are taken in order from a
// counter, so whoever waits knows that blocks which run have what it waits for, however many are resident. With units dealt
// beforehand blocks ended unequally (at work 89 % of the time).
// Counters lie in the fourth words of the jobs, which the router leaves 0 and the last block leaves 0 again (so a launch with the
// same lists is no "kernel before" of an early one). Bits 0..7 of job j: warps whose part of its h is whole. Of job 0 also bits
// 8..22: units taken; bits 23..31: blocks that left.
//
// Shared memory: SLOTS stages of x (SPAN slices of TOKENS*8 tokens x 128 B; 16-byte chunk c of token t at chunk c ^ 4*(t&1): a
// quarter warp, 2 tokens x 4 chunks, touches all 32 banks once), DEPTH stages of weights and scales for each warp that multiplies,
// the next units of this block, the gates.
#define GATE_UP
#include "moe.cuh"
#undef GATE_UP
#include "meet.cuh"

#ifndef TOKENS
#define TOKENS 3         // most 8-token tiles of a job
#endif
#ifndef WARPS
#define WARPS 8          // that multiply
#endif
#ifndef BLOCKS
#define BLOCKS 2         // of a multiprocessor
#endif
#ifndef SPAN
#define SPAN 4           // K64 steps of a stage
#endif
#ifndef DEPTH
#define DEPTH 2          // stages of weights
#endif
#ifndef SLOTS
#define SLOTS 2          // stages of x
#endif
constexpr int THREADS = 32 * (WARPS + 1), UP_BLOCKS = Part<true>::TILES / (2 * WARPS),
              DOWN_BLOCKS = Part<false>::TILES / (2 * WARPS);
template <bool GU> constexpr int STAGES_OF = Part<GU>::STEPS / SPAN;
constexpr int NEXT = 4;                        // units that a block knows at once
constexpr int LEAD = 5;                        // stages before the end of a unit's x at which the next one is taken
constexpr u32 TAKEN = 1u << 8, LEFT = 1u << 23;
constexpr u32 W_STAGE = SPAN * 2 * (TILE_BYTES + SCALE_BYTES), X_SLICE = TOKENS * 1024, X_STAGE = SPAN * X_SLICE;
constexpr u32 RINGS = SLOTS * X_STAGE, UNITS = RINGS + WARPS * DEPTH * W_STAGE, FULL = UNITS + NEXT * 16,
              EMPTY = FULL + SLOTS * 8, KNOWN = EMPTY + SLOTS * 8;
static_assert(Part<true>::TILES % (2 * WARPS) == 0 && Part<false>::TILES % (2 * WARPS) == 0, "a block's rows divide the expert's");
static_assert(Part<true>::STEPS % SPAN == 0 && Part<false>::STEPS % SPAN == 0, "whole stages");
static_assert(UP_BLOCKS * WARPS < 256 && DOWN_BLOCKS < 128, "warps of a job's h are counted in a byte, its row blocks in 7 bits");
static_assert(TOKENS <= 4 && SPAN <= 4, "a token of a job and 16 bytes of a stage's scales have a lane each");

// Units are taken in order, first all of gate_up: whoever waits for h of a job knows that running blocks have its units.
struct Unit {
  int expert, first, count, code;              // no tokens: there is no unit any more
  __device__ __forceinline__ int part() const { return code & 127; }
  __device__ __forceinline__ bool down() const { return code & 128; }
  __device__ __forceinline__ int job() const { return code >> 8; }
};
__device__ __forceinline__ Unit read_unit(u32 sm, int i) {
  const uint4 v = shared_load16(sm + UNITS + i % NEXT * 16);
  return {(int)v.x, (int)v.y, (int)v.z, (int)v.w};
}
// This block's unit number i as soon as it is known.
__device__ __forceinline__ Unit unit_at(u32 sm, int i) {
  mbarrier_wait(sm + KNOWN + i % NEXT * 8, i / NEXT & 1);
  return read_unit(sm, i);
}
__device__ __forceinline__ Unit unit_of(int unit, const int4* jobs, int n) {
  const int ups = n * UP_BLOCKS, down = unit >= ups, of = down ? DOWN_BLOCKS : UP_BLOCKS, at = down ? unit - ups : unit;
  if (unit >= ups + n * DOWN_BLOCKS) return {0, 0, 0, 0};
  const uint4 job = load16_new(jobs + at / of);
  return {(int)job.x, (int)job.y, (int)job.z, at % of | down << 7 | at / of << 8};
}
__device__ __forceinline__ void put_unit(u32 sm, int i, const Unit& u) {
  if ((threadIdx.x & 31) == 0)
    shared_store16(sm + UNITS + i % NEXT * 16, uint4{(u32)u.expert, (u32)u.first, (u32)u.count, (u32)u.code});
  warp_arrives(sm + KNOWN + i % NEXT * 8);
}

// ---------------------------------------------------------------- counters of all blocks
#ifdef EMULATION
inline u32 count_up(u32* at, u32 by) { const u32 old = *at; *at += by; return old; }
inline void tell(u32* done) { __syncwarp(); if ((threadIdx.x & 31) == 0) ++*done; }
inline void await(const u32* done, u32 count) { while ((*(volatile const u32*)done & 255) < count) emulated::leave(); }
#else
__device__ __forceinline__ u32 count_up(u32* at, u32 by) {
  u32 v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0,[%1],%2;" : "=r"(v) : "l"(at), "r"(by) : "memory");
  return v;
}
// By a whole warp: what its lanes wrote is seen by whoever has waited for it.
__device__ __forceinline__ void tell(u32* done) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(done) : "memory");
}
__device__ __forceinline__ void await(const u32* done, u32 count) {
  u32 v;
  do asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(done) : "memory");
  while ((v & 255) < count);
  __syncwarp();
}
#endif
__device__ __forceinline__ u32* counter_of(int4* jobs, int job) { return (u32*)&jobs[job].w; }

// ---------------------------------------------------------------- fetching x
struct Slot { u32 at, parity; };
// x or h of a unit, four tokens at a time: lanes 8 t .. 8 t + 7 copy the 128 B of a step of token t. Shortly before its end the
// next unit is taken, in three turns (0, -1, -2) that wait for memory.
template <bool GU, class Turn>
__device__ __forceinline__ void fetch_unit(u32 sm, Slot& slot, const bf16* x, u32 row, int count, Turn turn) {
  constexpr int STAGES = STAGES_OF<GU>, FIRST = LEAD < STAGES ? LEAD : STAGES;
  const int lane = threadIdx.x & 31, mine = lane >> 3;
  const u32 put = sm + mine * 128 + (((lane & 7) ^ ((mine & 1) << 2)) << 4);
  const bf16* from[2 * TOKENS];
#pragma unroll
  for (int p = 0; p < 2 * TOKENS; p++) from[p] = x + (u64)(__shfl_sync(ALL_LANES, row, p * 4 + mine) + (lane & 7)) * 8;
#pragma unroll 1
  for (int left = STAGES; left > 0; left--) {
    mbarrier_wait(sm + EMPTY + slot.at * 8, slot.parity);
#pragma unroll
    for (int p = 0; p < 2 * TOKENS; p++) {
#pragma unroll
      for (int u = 0; u < SPAN; u++)
        copy16_if(p * 4 + mine < count, put + slot.at * X_STAGE + p * 512 + u * X_SLICE, from[p] + u * 64);
      from[p] += SPAN * 64;
    }
    mbarrier_arrive_copied(sm + FULL + slot.at * 8);
    if (++slot.at == SLOTS) { slot.at = 0; slot.parity ^= 1; }
    turn(left - FIRST);
  }
#pragma unroll
  for (int left = -FIRST; left >= -2; left--) turn(left);
}
__device__ __forceinline__ void fetch(u32 sm, const bf16* x, const bf16* h, int4* jobs, int n, const int* pairs) {
  const int lane = threadIdx.x & 31;
  auto row_of = [&](const Unit& u) {           // of the token that this lane knows, in units of 16 bytes
    const int pair = load_new(pairs + u.first + min(lane, u.count - 1));
    return u.down() ? (u32)pair * (WIDTH / 8) : (u32)(pair / TOPK) * (HIDDEN / 8);
  };
  auto count_for_all = [&](u32 by) { return __shfl_sync(ALL_LANES, lane == 0 ? count_up(counter_of(jobs, 0), by) : 0, 0); };
  auto take = [&] { return (int)(count_for_all(TAKEN) % LEFT / TAKEN); };
  Unit u = unit_of(n ? take() : 0, jobs, n);
  put_unit(sm, 0, u);
  u32 row = u.count ? row_of(u) : 0;
  Slot slot = {0, 1};
  for (int i = 0; u.count; i++) {
    int taken = 0;
    Unit next;
    u32 next_row = 0;
    auto turn = [&](int at) {
      if (at == 0) taken = take();
      if (at == -1) next = unit_of(taken, jobs, n);
      if (at == -2) {
        put_unit(sm, i + 1, next);
        if (next.count) next_row = row_of(next);
      }
    };
    if (!u.down()) fetch_unit<true>(sm, slot, x, row, u.count, turn);
    else {
      await(counter_of(jobs, u.job()), UP_BLOCKS * WARPS);
      fetch_unit<false>(sm, slot, h, row, u.count, turn);
    }
    u = next; row = next_row;
  }
  if (n && count_for_all(LEFT) / LEFT == gridDim.x - 1)        // the last block: nobody waits any more
    for (int i = lane; i < n; i += 32) *counter_of(jobs, i) = 0;
}

// ---------------------------------------------------------------- multiplying
// A value that this warp computed once and keeps: ptxas forms addresses of lanes anew in every stage otherwise.
__device__ __forceinline__ u32 keep(u32 v) { return __shfl_sync(ALL_LANES, v, threadIdx.x & 31); }

// The ring of a warp's weights: stages of all its units one after the other.
struct Ring {
  const uint4* w;                              // the next stage to ask for: this lane's 16 bytes of the first tile
  const char* s;
  u32 second;                                  // from the first tile to the second, in 16 bytes
  int left, unit;                              // stages of this unit still to be asked for; its number
  u32 first, to;                               // this lane's 16 bytes of the ring's first stage, and of the one that comes next
  __device__ __forceinline__ u32 after(u32 stage) const { return stage == first + (DEPTH - 1) * W_STAGE ? first : stage + W_STAGE; }
};
struct Packed { const uint4* w[2]; const uint2* s[2]; };        // of gate_up and of down
__device__ __forceinline__ void aim(Ring& r, u32 sm, const Packed& in) {
  const int lane = threadIdx.x & 31;
  const Unit u = unit_at(sm, r.unit);
  r.left = -1;
  if (!u.count) return;                        // for good
  r.unit++;
  const bool down = u.down();
  const int steps = down ? Part<false>::STEPS : Part<true>::STEPS, tiles = down ? Part<false>::TILES : Part<true>::TILES;
  const long long first = (long long)u.expert * tiles + (u.part() * WARPS + (threadIdx.x >> 5)) * 2;
  r.w = (down ? in.w[1] : in.w[0]) + first * steps * 32 + lane;
  r.s = (const char*)((down ? in.s[1] : in.s[0]) + (first + lane / (4 * SPAN) % 2) * steps * 8) + lane % (4 * SPAN) * 16;
  r.left = steps / SPAN; r.second = steps * 32;
}
// Asks for the next stage, as a group of copies.
__device__ __forceinline__ void ask(Ring& r, bool scales, u32 sm, const Packed& in) {
  if (r.left == 0) aim(r, sm, in);
  if (r.left > 0) {
    const uint4* second = r.w + r.second;
#pragma unroll
    for (int u = 0; u < SPAN; u++) { copy16(r.to + u * 512, r.w + u * 32); copy16(r.to + (SPAN + u) * 512, second + u * 32); }
    if (scales) copy16(r.to + SPAN * 1024, r.s);
    r.w += SPAN * 32; r.s += SPAN * 64;
    r.to = r.after(r.to);
    r.left--;
  }
  copy_commit();
}

struct Place { u32 weights, x, gate, parity; };        // of the stage that is used now, as this lane reads it

template <bool GU, int NT>
__device__ __forceinline__ void multiply(u32 sm, Ring& r, Place& at, u32 scales, const Packed& in, const int* pairs, const Unit& u,
                                         bf16* h, float* y) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float acc[2][NT][4];
  clear(acc);
#pragma unroll 1
  for (int st = 0; st < STAGES_OF<GU>; st++) {
    copy_wait<DEPTH - 2>();
    __syncwarp();                              // the stage is here for all lanes; the one before is free
    ask(r, lane < 8 * SPAN, sm, in);
    mbarrier_wait(at.gate, at.parity);
#pragma unroll
    for (int k = 0; k < SPAN; k++) {
      const u32 w = at.weights + k * 512, s = at.weights + scales + k * 64, x = at.x + k * X_SLICE;
      const uint4 wv[2] = {shared_load16(w), shared_load16(w + SPAN * 512)};
      const uint2 sv[2] = {shared_load8(s), shared_load8(s + SPAN * 64)};
      step64(acc, wv, sv, x, x ^ 64);
    }
    warp_arrives(at.gate + (EMPTY - FULL));
    at.weights = r.after(at.weights);
    at.x += X_STAGE; at.gate += 8;
    if (at.gate == sm + FULL + SLOTS * 8) { at.x -= SLOTS * X_STAGE; at.gate -= SLOTS * 8; at.parity ^= 1; }
  }
  const int tile = (u.part() * WARPS + warp) * 2;
  if constexpr (GU) store_tiles<true>(acc, pairs + u.first, u.count, tile, h);
  else store_tiles<false>(acc, pairs + u.first, u.count, tile, y);
}

// Grid: any number of blocks; best as many as are resident. early: see moe.cuh.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
experts_joined(const uint4* __restrict__ Wg, const uint2* __restrict__ Sg, const uint4* __restrict__ Wd,
               const uint2* __restrict__ Sd, const bf16* __restrict__ x, int4* jobs, const int* __restrict__ njobs,
               const int* __restrict__ pairs, bf16* h, float* __restrict__ y, int early) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 sm = shared_address(smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  if (!early) pdl_wait();
  const int n = load_new(njobs);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) { mbarrier_begin(sm + FULL + i * 8, 32); mbarrier_begin(sm + EMPTY + i * 8, WARPS); }
    for (int i = 0; i < NEXT; i++) mbarrier_begin(sm + KNOWN + i * 8, 1);
    mbarriers_begun();
  }
  __syncthreads();
  if (warp == WARPS) {
    fetch(sm, x, h, jobs, n, pairs);
    return;
  }
  const Packed in = {{Wg, Wd}, {Sg, Sd}};
  const u32 mine = keep(sm + RINGS + warp * (DEPTH * W_STAGE) + lane * 16);
  Ring r = {nullptr, nullptr, 0, 0, 0, mine, mine};
#pragma unroll 1
  for (int i = 0; i < DEPTH - 1; i++) ask(r, lane < 8 * SPAN, sm, in);
  wait_and_go();
  Place at = {mine, keep(sm + g * 128 + ((q ^ ((g & 1) << 2)) * 16)), sm + FULL, 0};
  const u32 scales = keep(SPAN * 1024 + g * 8 - lane * 16);
  int i = 0;
  Unit u;
#define RUN(GU, N) case N: if constexpr (N <= TOKENS) multiply<GU, N>(sm, r, at, scales, in, pairs, u, h, y); break;
  for (; u = unit_at(sm, i), u.count && !u.down(); i++) {
    switch ((u.count + 7) >> 3) { RUN(true, 1) RUN(true, 2) RUN(true, 3) RUN(true, 4) }
    tell(counter_of(jobs, u.job()));
  }
  for (; u = unit_at(sm, i), u.count; i++) switch ((u.count + 7) >> 3) { RUN(false, 1) RUN(false, 2) RUN(false, 3) RUN(false, 4) }
#undef RUN
  copy_wait<0>();
}
