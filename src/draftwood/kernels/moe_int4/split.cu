// W4A16 gate_up whose K is split over the warps of a block: a warp owns one segment of 16 rows, and the segments' sums are added
// in order (the chain of moe.cuh). Finer units than the stream's: for slices of the experts, whose rows are too few to fill
// the machine or to end together. At most 8 tokens a job. See flow.cuh.
#include "flow.cuh"

static_assert(WARPS == P::SEGMENTS, "a warp a segment");

// Grid: most jobs * tiles.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
gate_up_split(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
              const int* __restrict__ njobs, const int* __restrict__ pairs, bf16* __restrict__ h) {
  DYNAMIC_SHARED(unsigned char, smem);                            // RING_BYTES a warp; at the end its sums: 512 bytes
  constexpr int T = P::TILES;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, warp = threadIdx.x >> 5;
  prefetch_lists(jobs + blockIdx.x / T, njobs, pairs);
  pdl_wait();                                  // the lists come from the router, just before
  pdl_go();
  const int tile = blockIdx.x % T;
  const int4 job = job_and_count(jobs + blockIdx.x / T, njobs);
  if ((int)blockIdx.x >= job.w * T) return;
  Place at = place(W + lane, S + lane * 2, job.x * T + tile);
  at.advance(warp * P::SEGMENT);
  const Ring ring(smem);
  ring.fill(0, at, true);
  const int pair = pairs[job.y + (g < job.z ? g : 0)];                         // idle columns compute token 0 again
  const bf16 *start = input_row(x, pair) + warp * (P::SEGMENT * 64) + q * 8, *from = start;
  Ahead ahead;
  look_all(ahead, start);
  float acc[4];
  clear4(acc);
#pragma unroll 1
  for (int r = 0; r < ROUNDS; r++) {
    const bool on = r + 1 < ROUNDS;
    at.advance(LEN);
    round<0>(acc, ring, at, on, ahead, from, on ? from + LEN * 64 : start);
    from += LEN * 64;
  }
  __syncwarp();                                // the ring of this warp is free
  float4* sums = reinterpret_cast<float4*>(smem);
  sums[warp * (RING_BYTES / 16) + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
  __syncthreads();
  if (warp) return;
  float total[4];
  clear4(total);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float4 v = sums[w * (RING_BYTES / 16) + lane];
    total[0] += v.x; total[1] += v.y; total[2] += v.z; total[3] += v.w;
  }
  const long long p0 = __shfl_sync(ALL_LANES, pair, 8 * q), p1 = __shfl_sync(ALL_LANES, pair, 8 * q + 4);
  const int column = tile * 8 + g;
  if (2 * q < job.z) h[p0 * WIDTH + column] = __float2bfloat16(swiglu(total[0], total[2]));
  if (2 * q + 1 < job.z) h[p1 * WIDTH + column] = __float2bfloat16(swiglu(total[1], total[3]));
}
