// W4A16 experts for few tokens each: a warp owns 16 rows x whole K of one expert and at most 8 tokens (gate_up), a block 16
// rows of all experts (down). See flow.cuh.
#include "flow.cuh"

#ifdef GATE_UP
// h[pair][WIDTH] = silu(gate) * up. Grid: ceil(most jobs * tiles / WARPS); the hardware hands out the tiles.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
gate_up_stream(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
               const int* __restrict__ njobs, const int* __restrict__ pairs, bf16* __restrict__ h, int early) {
  DYNAMIC_SHARED(unsigned char, smem);                            // RING_BYTES a warp
  constexpr int T = P::TILES;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, u = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (!early) { prefetch_lists(jobs + u / T, njobs, pairs); pdl_wait(); }
  const int4 job = job_and_count(jobs + u / T, njobs);
  if (u >= job.w * T) { pdl_wait(); return; }
  const int count = job.z, pair = load_new(pairs + job.y + (g < count ? g : 0));         // idle columns compute token 0 again
  Place at = place(W + lane, S + lane * 2, job.x * T + u % T);
  const Ring ring(smem);
  ring.fill(0, at, true);
  wait_and_go();
  const bf16 *start = input_row(x, pair) + q * 8, *from = start;
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
  store_h(acc, count, pair, (u % T) * 8 + g, h);
}
#else
// Row-stationary: a block owns 16 output rows, its warps take the jobs in turn, y of every (token, slot) waits in shared
// memory (64 * TOPK bytes a token), then each token's slots are summed in order. Grid: HIDDEN/16. Rows from *live on are left.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
down_stream(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ h, const int4* __restrict__ jobs,
            const int* __restrict__ njobs, const int* __restrict__ pairs, const float* __restrict__ weights,
            const bf16* __restrict__ shared, const int* __restrict__ live, bf16* __restrict__ out, int rows) {
  DYNAMIC_SHARED(unsigned char, smem);                            // RING_BYTES a warp, then y[rows * TOPK][16]
  constexpr int T = P::TILES;
  float* y = reinterpret_cast<float*>(smem + WARPS * RING_BYTES);
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, tile = blockIdx.x;
  const int nj = *njobs;                       // written before gate_up started: safe ahead of the wait
  int j = threadIdx.x >> 5, count[UNITS], pair[UNITS];
  W += lane; S += lane * 2;
  const Ring ring(smem);
  Place at = {W, S};
  auto job_at = [&](int k) { return k < nj ? jobs[k] : make_int4(0, 0, 0, 0); };
  auto pair_of = [&](const int4& job) { return job.z ? pairs[job.y + (g < job.z ? g : 0)] : 0; };
#pragma unroll
  for (int u = 0; u < UNITS; u++) {            // the first weights travel while gate_up ends
    const int4 job = job_at(j + u * WARPS);
    count[u] = job.z; pair[u] = pair_of(job);
    at = place(W, S, job.x * T + tile);
    ring.fill(u * LEN, at, job.z);
  }
  int4 later = job_at(j + UNITS * WARPS);
  const int n = min(rows, *live);              // as the lists: known before gate_up started
  for (int e = threadIdx.x; e < n * 8; e += 32 * WARPS) {
    prefetch(weights + (e >> 3) * TOPK);
    if (shared) prefetch(shared + (long long)(e >> 3) * HIDDEN + tile * 16);
  }
  pdl_wait();
  pdl_go();
  const bf16* from = input_row(h, pair[0]) + q * 8;
  Ahead ahead;
  if (j < nj) look_all(ahead, from);
  for (bool more = j < nj; more;) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int next_pair = pair_of(later), next_count = later.z;
      const Place next = place(W, S, later.x * T + tile);
      later = job_at(j + (UNITS + 1) * WARPS);
      const bf16* then = input_row(h, UNITS == 1 ? next_pair : pair[(u + 1) % UNITS]) + q * 8;
      float acc[4];
      clear4(acc);
      if constexpr (UNITS > 1) {
        switch (u) {
#define RUN(N) case N: if constexpr (N < UNITS) round<N * LEN>(acc, ring, next, next_count, ahead, from, then); break;
          RUN(0) RUN(1) RUN(2) RUN(3) RUN(4) RUN(5) RUN(6) RUN(7)
#undef RUN
        }
      } else {
#pragma unroll 1
        for (int r = 0; r < ROUNDS; r++) {
          const bool last = r + 1 == ROUNDS;
          at.advance(LEN);
          if (last) at = next;
          round<0>(acc, ring, at, !last || next_count, ahead, from, last ? then : from + LEN * 64);
          from += LEN * 64;
        }
      }
      const int p0 = __shfl_sync(ALL_LANES, pair[u], 8 * q), p1 = __shfl_sync(ALL_LANES, pair[u], 8 * q + 4);
      if (2 * q < count[u]) { y[p0 * 16 + g] = finish(acc[0]); y[p0 * 16 + g + 8] = finish(acc[2]); }
      if (2 * q + 1 < count[u]) { y[p1 * 16 + g] = finish(acc[1]); y[p1 * 16 + g + 8] = finish(acc[3]); }
      count[u] = next_count; pair[u] = next_pair;
      from = then;
      j += WARPS;
      if (j >= nj) { more = false; break; }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < n * 8; e += 32 * WARPS) {
    const int t = e >> 3, r = (e & 7) * 2;
    float v0 = 0.f, v1 = 0.f;
#pragma unroll
    for (int k = 0; k < TOPK; k++) {
      const float c = weights[t * TOPK + k];
      if (c != 0.f) {                          // 0: an expert of another rank, whose y was never written
        const float2 v = *reinterpret_cast<const float2*>(&y[(t * TOPK + k) * 16 + r]);
        v0 = fmaf(c, v.x, v0); v1 = fmaf(c, v.y, v1);
      }
    }
    const long long at_out = (long long)t * HIDDEN + tile * 16 + r;
    if (shared) {
      const u32 add = *reinterpret_cast<const u32*>(&shared[at_out]);
      v0 += low_float(add); v1 += high_float(add);
    }
    *reinterpret_cast<u32*>(&out[at_out]) = pack_bf16(v0, v1);
  }
}
#endif
