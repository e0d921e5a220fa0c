// W4A16 gate_up for slices of the experts, whose units (16 rows x whole K of a job) are few or do not fill whole waves: a block
// takes a run of units and its warps share the run's rounds evenly. So one warp may begin a unit and the next one end it: it
// takes over the sums, and the chain of moe.cuh goes on unbroken. At most 8 tokens a job. See flow.cuh.
//
// A warp first begins the unit that the next warp will end, then does its whole units, and last ends the unit that the
// warp before it began at its start: so nobody waits in practice, and always only for a lower warp that waits for none.
#include "flow.cuh"

#ifdef EMULATION
inline void __threadfence_block() {}
#endif

struct Piece { int unit, from, to; };            // rounds from .. to-1 of a unit
struct Share {                                   // of one warp in its block's run of `units` units
  int begin, end;
  __device__ __forceinline__ Share(int units, int warp) {
    const int all = units * ROUNDS;
    begin = units > WARPS ? all * warp / WARPS : min(warp, units) * ROUNDS;      // few units: a warp each
    end = units > WARPS ? all * (warp + 1) / WARPS : min(warp + 1, units) * ROUNDS;
  }
  __device__ __forceinline__ int pieces() const {
    return end == begin ? 0 : end / ROUNDS - (begin + ROUNDS - 1) / ROUNDS + (end % ROUNDS > 0) + (begin % ROUNDS > 0);
  }
  __device__ __forceinline__ Piece piece(int i) const {
    if (end % ROUNDS && i-- == 0) return {end / ROUNDS, 0, end % ROUNDS};
    const int unit = (begin + ROUNDS - 1) / ROUNDS + i;
    if (unit < end / ROUNDS) return {unit, 0, ROUNDS};
    return {begin / ROUNDS, begin % ROUNDS, ROUNDS};
  }
};

// Any grid: the blocks share all units evenly.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
gate_up_share(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
              const int* __restrict__ njobs, const int* __restrict__ pairs, bf16* __restrict__ h, int early) {
  DYNAMIC_SHARED(unsigned char, smem);                            // RING_BYTES a warp, then handed[WARPS][32], ready[WARPS]
  constexpr int T = P::TILES;
  float4* handed = reinterpret_cast<float4*>(smem + WARPS * RING_BYTES);
  volatile int* ready = reinterpret_cast<int*>(handed + WARPS * 32);
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, warp = threadIdx.x >> 5;
  if (lane == 0) ready[warp] = 0;
  __syncthreads();
  if (!early) { prefetch_lists(jobs, njobs, pairs); pdl_wait(); }
  const long long units = (long long)load_new(njobs) * T;
  const int base = (int)(units * blockIdx.x / gridDim.x);
  const Share share((int)(units * (blockIdx.x + 1) / gridDim.x) - base, warp);
  const int pieces = share.pieces();
  if (pieces == 0) { pdl_wait(); return; }
  W += lane; S += lane * 2;
  const Ring ring(smem);
  Piece now = share.piece(0);
  int4 job = job_and_count(jobs + (base + now.unit) / T, njobs);
  int pair = load_new(pairs + job.y + (g < job.z ? g : 0));                    // idle columns compute token 0 again
  auto start = [&](const int4& j, const Piece& p) {
    Place at = place(W, S, j.x * T + (base + p.unit) % T);
    at.advance(p.from * LEN);
    return at;
  };
  Place at = start(job, now);
  ring.fill(0, at, true);
  wait_and_go();
  const bf16* from = input_row(x, pair) + q * 8 + now.from * LEN * 64;
  Ahead ahead;
  look_all(ahead, from);
  for (int i = 0; i < pieces; i++) {
    const bool more = i + 1 < pieces;
    const Piece next = share.piece(more ? i + 1 : i);
    const int4 next_job = jobs[(base + next.unit) / T];
    const int next_pair = pairs[next_job.y + (g < next_job.z ? g : 0)];
    const bf16* then = input_row(x, next_pair) + q * 8 + next.from * LEN * 64;
    float acc[4];
    clear4(acc);
    if (now.from) {
      while (!__shfl_sync(ALL_LANES, ready[warp - 1], 0)) {}    // the same answer for all lanes
      __threadfence_block();
      const float4 v = handed[(warp - 1) * 32 + lane];
      acc[0] = v.x; acc[1] = v.y; acc[2] = v.z; acc[3] = v.w;
    }
#pragma unroll 1
    for (int r = now.from; r < now.to; r++) {
      const bool last = r + 1 == now.to;
      at.advance(LEN);
      if (last) at = start(next_job, next);
      round<0>(acc, ring, at, !last || more, ahead, from, last ? then : from + LEN * 64);
      from += LEN * 64;
    }
    if (now.to < ROUNDS) {
      handed[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
      __threadfence_block();
      __syncwarp();
      if (lane == 0) ready[warp] = 1;
    } else {
      store_h(acc, job.z, pair, (base + now.unit) % T * 8 + g, h);
    }
    now = next; job = next_job; pair = next_pair; from = then;
  }
}
