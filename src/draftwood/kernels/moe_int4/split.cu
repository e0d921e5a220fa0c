// W4A16 gate_up for very few tokens: a block owns 16 rows x whole K of one expert and at most 4 tokens, and everything that it
// reads is on its way at once. For where the stream kernel has too few warps to fill the machine (1 to 4 rows of a slice).
//
// K is split, the chain is not: WARPS warps take every WARPS-th step and store the product c of every group (moe.cuh) where that
// step's weights lay; one more warp walks behind them, a round of WARPS steps at a time, acc = fma(scale, c, acc) in the order of
// the groups: the bits of the other kernels. A round has a named barrier of its own, at which the others do not wait.
// Shared memory: STEPS x 512 B of weights, then STEPS x 64 B of scales. Products of a step: [row 16][token 4][group 2] fp32.
// Registers are few on purpose: the blocks of the next kernel are then there while these run.
#include "moe.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef BLOCKS
#define BLOCKS 3         // of a multiprocessor
#endif
#ifndef XAHEAD
#define XAHEAD 1         // steps that x is read ahead
#endif
#ifdef SCALED
#error "the sums of scaled weights cannot be split"
#endif
constexpr int STEPS = Part<true>::STEPS, OWN = STEPS / WARPS, TOKENS = 4, THREADS = 32 * (WARPS + 1);
static_assert(STEPS % WARPS == 0, "the warps divide K/64");
static_assert(OWN <= 15, "a barrier for every round");

#ifdef EMULATION
static emulated::Barrier of_round[16];
inline void round_done(int round) {
  emulated::Barrier& b = of_round[round];
  if (++b.arrived == THREADS) { b.arrived = 0; b.turn++; }
}
inline void wait_round(int round) { emulated::meet(of_round[round], THREADS); }
#else
__device__ __forceinline__ void round_done(int round) { asm volatile("barrier.cta.arrive %0,%1;" ::"r"(round + 1), "n"(THREADS) : "memory"); }
__device__ __forceinline__ void wait_round(int round) { asm volatile("barrier.cta.sync %0,%1;" ::"r"(round + 1), "n"(THREADS) : "memory"); }
#endif

__device__ __forceinline__ void product(float (&c)[4], u32 w0, u32 w1, const uint4& x) {
  u32 a[4];
  int4_weights(a, w0, whole_factors()); mma_first(c, a, x.x, x.y);
  int4_weights(a, w1, whole_factors()); mma(c, a, x.z, x.w);
}

// This warp's steps: products of its groups into shared memory. weights: its first step; x: this lane's 8 values of its token there.
__device__ __forceinline__ void products(u32 weights, const bf16* x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  uint4 ahead[XAHEAD][2];
#pragma unroll
  for (int i = 0; i < XAHEAD; i++) { ahead[i][0] = load16(x + i * WARPS * 64); ahead[i][1] = load16(x + i * WARPS * 64 + 32); }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    copy_commit();                             // an empty group a step: then step i is here when OWN groups may be missing
    copy_wait<OWN>();
    const u32 at = weights + i * WARPS * TILE_BYTES;
    const uint4 w = shared_load16(at + lane * 16), x0 = ahead[i % XAHEAD][0], x1 = ahead[i % XAHEAD][1];
    if (i + XAHEAD < OWN) {
      ahead[i % XAHEAD][0] = load16(x + (i + XAHEAD) * WARPS * 64);
      ahead[i % XAHEAD][1] = load16(x + (i + XAHEAD) * WARPS * 64 + 32);
    }
    float c[4], d[4];
    product(c, w.x, w.y, x0);
    product(d, w.z, w.w, x1);
    __syncwarp();                              // all have read the step's weights
    if (2 * q < TOKENS) {
      const u32 to = at + g * (TOKENS * 8) + q * 16;
      shared_store16(to, make_uint4(__float_as_uint(c[0]), __float_as_uint(d[0]), __float_as_uint(c[1]), __float_as_uint(d[1])));
      shared_store16(to + 8 * TOKENS * 8,
                     make_uint4(__float_as_uint(c[2]), __float_as_uint(d[2]), __float_as_uint(c[3]), __float_as_uint(d[3])));
    }
    round_done(i);
  }
}

// Lane (r = lane/4, token = lane%4): gate row r and up row r of the tile.
__device__ __forceinline__ void walk(u32 products, u32 scales, float& gate, float& up) {
  const int lane = threadIdx.x & 31;
  u32 c = products + lane * 8, sc = scales + (lane >> 2) * 8;
#pragma unroll 1
  for (int round = 0; round < OWN; round++) {
    wait_round(round);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const uint2 a = shared_load8(c + i * TILE_BYTES), b = shared_load8(c + i * TILE_BYTES + 8 * TOKENS * 8);
      const uint2 f = shared_load8(sc + i * SCALE_BYTES);
      gate = fmaf(low_float(f.x), __uint_as_float(a.x), gate); up = fmaf(high_float(f.x), __uint_as_float(b.x), up);
      gate = fmaf(low_float(f.y), __uint_as_float(a.y), gate); up = fmaf(high_float(f.y), __uint_as_float(b.y), up);
    }
    c += WARPS * TILE_BYTES; sc += WARPS * SCALE_BYTES;
  }
}

// Grid: most jobs * tiles; WARPS + 1 warps. Jobs of at most 4 pairs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gate_up_split(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
              const int* __restrict__ njobs, const int* __restrict__ pairs, bf16* __restrict__ h, int early) {
  DYNAMIC_SHARED(unsigned char, smem);
  constexpr int T = Part<true>::TILES;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, warp = threadIdx.x >> 5;
  const u32 weights = shared_address(smem), scales = weights + STEPS * TILE_BYTES;
  if (!early) { prefetch_lists(jobs + blockIdx.x / T, njobs, pairs); pdl_wait(); }
  const int tile = blockIdx.x % T;
  const int4 job = job_and_count(jobs + blockIdx.x / T, njobs);
  if ((int)blockIdx.x >= job.w * T) { pdl_wait(); return; }
  if (warp < WARPS) {
    const long long first = (long long)(job.x * T + tile) * STEPS + warp;
    const uint4* w = W + first * 32 + lane;
    const char* s = reinterpret_cast<const char*>(S) + first * SCALE_BYTES + lane * 16;
    const u32 to = weights + warp * TILE_BYTES + lane * 16, scales_to = scales + warp * SCALE_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      copy16(to + i * WARPS * TILE_BYTES, w + i * WARPS * 32);
      copy16_if(lane < 4, scales_to + i * WARPS * SCALE_BYTES, s + i * WARPS * SCALE_BYTES);
      copy_commit();
    }
    const int pair = load_new(pairs + job.y + (g < job.z ? g : 0));            // idle columns compute token 0 again
    wait_and_go();
    products(weights + warp * TILE_BYTES, input_row(x, pair) + warp * 64 + q * 8);
    return;
  }
  const long long own = load_new(pairs + job.y + (q < job.z ? q : 0));
  wait_and_go();
  float gate = 0.f, up = 0.f;
  walk(weights, scales, gate, up);
  if (q < job.z) h[own * WIDTH + tile * 8 + g] = __float2bfloat16(swiglu(finish(gate), finish(up)));
}
