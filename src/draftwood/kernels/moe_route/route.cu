// Router of an MoE layer: scores = x W^T, sigmoid, biased choice of TOPK experts, weights, and the lists of the grouped GEMMs.
//
//   scores   partial[seg][row][expert]: grid (EXPERTS/16, SEGMENTS, row blocks); a warp owns 16 experts x 128 of K
//   choose   a row a block: experts[row][slot], weights[row][slot]
//   lists    one block: pairs, jobs, njobs
//   whole    all of it in one launch for at most 128 rows: the last block of some rows chooses, the last of all makes the lists
//
// LAW 1. A score is, for each 128 of K, one chain of mma from 0 (K ascending; the bf16 parts of W in order); the WARPS chains of
// a segment are added in order, then the segments in order. Nothing depends on the number of rows or on other rows. Ties go to
// the lowest id. Bit masks are set with atomicOr: their result has no order.
//
// Macros: HIDDEN, EXPERTS (multiple of 16), TOPK, PARTS (1: W is bf16; 3: W is fp32, cut into three bf16 that sum to it exactly),
// WARPS (HIDDEN is a multiple of 128*WARPS); one of SCORES, CHOOSE, LISTS, WHOLE.
// W[part][EXPERTS/16][HIDDEN/16][lane][16 B]: mma A fragments; step 2b+s, lane (g, q): k0 = 32b+8q+4s, registers (row g, k0..+1),
// (row g+8, same), (row g, k0+2..+3), (row g+8, same): so 16 bytes x[32b+8q .. +7] of a row are the B fragments of two steps.
// Rows from *live on are padding: they get no pairs, and their experts and weights are not written.
#include "../common.cuh"

#ifdef EMULATION
inline u32 __reduce_max_sync(u32, u32 v) {
  u32 best = 0;
  for (int d = 0; d < 32; d++) best = max(best, __shfl_sync(ALL_LANES, v, d));
  return best;
}
inline u32 __reduce_min_sync(u32, u32 v) { return ~__reduce_max_sync(ALL_LANES, ~v); }
inline int take_ticket(int* p) { return (*p)++; }
inline void fence() {}
#else
__device__ __forceinline__ int take_ticket(int* p) { return atomicAdd(p, 1); }
__device__ __forceinline__ void fence() { __threadfence(); }
#endif

constexpr int SEGMENT = 128 * WARPS, SEGMENTS = HIDDEN / SEGMENT;
static_assert(HIDDEN % SEGMENT == 0 && EXPERTS % 16 == 0 && EXPERTS <= 1024 && TOPK <= 32 && TOPK <= EXPERTS, "shape");

#if defined(SCORES) || defined(WHOLE)
typedef float Sums[WARPS][8][17];              // [row][expert]; 17: the writes of a quad spread over the banks
// Scores of this block's 16 experts, segment and rows into partial: [SEGMENTS][rows][EXPERTS]. row_block: rows of a block, a
// multiple of 8. begin is called when the weights are on their way; NEW: nothing has waited for who wrote x and *live.
template <bool NEW, class Begin>
__device__ __forceinline__ void score_rows(Sums* sums, const uint4* W, const bf16* x, const int* live, float* partial, int rows,
                                           int row_block, Begin begin) {
  constexpr int STEPS = 8;                     // of 16 K: a warp's 128
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3, seg = blockIdx.y;
  const int k = seg * SEGMENT + warp * 128;
  u32 a[PARTS][STEPS][4];
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int i = 0; i < STEPS; i++) {          // weights never change: they travel while the previous kernel ends
      const uint4 v = load16_once(W + ((long long)(p * (EXPERTS / 16) + blockIdx.x) * (HIDDEN / 16) + k / 16 + i) * 32 + lane);
      a[p][i][0] = v.x; a[p][i][1] = v.y; a[p][i][2] = v.z; a[p][i][3] = v.w;
    }
  uint4 next[4];
  const int from = blockIdx.z * row_block;
  auto fetch = [&](int row) {                  // rows from *live on are computed and not written
    const bf16* at = x + (long long)min(row + g, rows - 1) * HIDDEN + k + q * 8;
#pragma unroll
    for (int b = 0; b < 4; b++) next[b] = NEW ? load16_new(at + b * 32) : load16(at + b * 32);
  };
  begin();
  fetch(from);                                 // travels with the count
  const int to = min(min(rows, NEW ? load_new(live) : *live), from + row_block);
  int buffer = 0;
#pragma unroll 1
  for (int row = from; row < to; row += 8, buffer ^= 1) {
    uint4 b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = next[i];
    if (row + 8 < to) fetch(row + 8);
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int p = 0; p < PARTS; p++) mma(acc, a[p][2 * i + s], s ? b[i].z : b[i].x, s ? b[i].w : b[i].y);
    float (*sum)[17] = sums[buffer][warp];
    sum[2 * q][g] = acc[0]; sum[2 * q + 1][g] = acc[1]; sum[2 * q][g + 8] = acc[2]; sum[2 * q + 1][g + 8] = acc[3];
    __syncthreads();                           // two buffers: the next round writes the other one
    for (int i = tid; i < 128; i += 32 * WARPS) {
      const int r = i >> 4, e = i & 15;
      float v = sums[buffer][0][r][e];
#pragma unroll
      for (int w = 1; w < WARPS; w++) v += sums[buffer][w][r][e];
      if (row + r < to) partial[((long long)seg * rows + row + r) * EXPERTS + blockIdx.x * 16 + e] = v;
    }
  }
}
#endif

#ifdef SCORES
extern "C" __global__ void __launch_bounds__(32 * WARPS)
scores(const uint4* __restrict__ W, const bf16* __restrict__ x, const int* __restrict__ live, float* __restrict__ partial,
       int rows, int row_block) {
  __shared__ Sums sums[2];
  score_rows<false>(sums, W, x, live, partial, rows, row_block, [] {
    pdl_wait();
    pdl_go();                                  // go after wait: `choose` reads *live ahead of its own
  });
}
#endif

#if defined(CHOOSE) || defined(WHOLE)
// Rows from .. to-1 of the block: score[row][expert] in shared memory, then a warp a row chooses. bias: in shared memory,
// filled by this block's threads before the call.
// Raw weights go out for the experts first .. first+held-1, exactly 0 for those of other ranks.
__device__ __forceinline__ void choose_rows(float* score, const float* partial, const float* bias, int rows, int from, int to,
                                            int first, int held, float scale, int* experts, float* weights) {
  const int tid = threadIdx.x, lane = tid & 31, count = (to - from) * EXPERTS;
  constexpr int BATCH = 4;                       // scores whose segments a thread loads before it waits for the first
  for (int begin = tid; begin < count; begin += BATCH * blockDim.x) {
    float part[BATCH][SEGMENTS];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int s = 0; s < SEGMENTS; s++) {
        const int i = begin + b * blockDim.x;
        if (i < count) part[b][s] = load_new(partial + ((long long)s * rows + from) * EXPERTS + i);
      }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      float v = part[b][0];
#pragma unroll
      for (int s = 1; s < SEGMENTS; s++) v += part[b][s];
      if (begin + b * blockDim.x < count) score[begin + b * blockDim.x] = 1.f / (1.f + expf(-v));
    }
  }
  __syncthreads();
  for (int row = from + (tid >> 5); row < to; row += blockDim.x >> 5) {
    constexpr int MINE = (EXPERTS + 31) / 32;  // experts of a lane: lane, lane + 32, ...
    const float* s = score + (row - from) * EXPERTS;
    u32 key[MINE];                             // orders as the biased score; 0: none, or chosen already
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int e = lane + 32 * i;
      key[i] = e < EXPERTS ? max(float_order(s[e] + bias[e]), 1u) : 0;
    }
    u32 mine = 0;                              // the choice of slot `lane`
#pragma unroll 1
    for (int k = 0; k < TOPK; k++) {
      u32 best = key[0];
#pragma unroll
      for (int i = 1; i < MINE; i++) best = max(best, key[i]);
      best = __reduce_max_sync(ALL_LANES, best);
      u32 id = ~0u;                            // the lowest expert with that score
#pragma unroll
      for (int i = MINE - 1; i >= 0; i--) id = key[i] == best ? lane + 32 * i : id;
      id = __reduce_min_sync(ALL_LANES, id);
#pragma unroll
      for (int i = 0; i < MINE; i++) if (lane + 32 * i == id) key[i] = 0;
      if (lane == k) mine = id;
    }
    const float w = lane < TOPK ? s[mine] : 0.f;
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < TOPK; k++) total += __shfl_sync(ALL_LANES, w, k);
    if (lane < TOPK) {
      const bool here = mine - (u32)first < (u32)held;
      experts[row * TOPK + lane] = mine;
      weights[row * TOPK + lane] = here ? w / (total + 1e-20f) * scale : 0.f;
    }
  }
}
#endif

#if defined(LISTS) || defined(WHOLE)
// The choice of pair p; NEW: this kernel's other blocks have written it.
template <bool NEW> __device__ __forceinline__ u32 choice(const int* chosen, int p) { return NEW ? load_new(chosen + p) : chosen[p]; }

// One block of THREADS: pairs grouped by expert (ascending, then by row), jobs of at most `tile` pairs balanced in multiples of 8.
// mask: [held][words] bits of the rows that chose an expert; at: [held + 33].
template <int THREADS, bool NEW>
__device__ __forceinline__ void make_lists(u32* mask, u32* at, const int* chosen, int n, int words, int first, int held, int tile,
                                           int* pairs, int4* jobs, int* njobs) {
  constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;      // experts of a thread, in a row
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  for (int i = tid; i < held * words; i += THREADS) mask[i] = 0;
  __syncthreads();
  for (int p = tid; p < n * TOPK; p += THREADS) {
    const u32 e = choice<NEW>(chosen, p) - first, t = p / TOPK;
    if (e < (u32)held) atomicOr(&mask[e * words + (t >> 5)], 1u << (t & 31));
  }
  __syncthreads();
  // Exclusive prefix over experts of (pairs << 16 | jobs): at most 32768 pairs and 4096 jobs.
  int counts[EACH], sizes[EACH], cuts[EACH];
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = tid * EACH + i;
    int count = 0, size = 8, cut = 0;
    if (e < held) {
      for (int w = 0; w < words; w++) count += __popc(mask[e * words + w]);
      if (count) {
        const int least = (count + tile - 1) / tile;
        size = ((count + 7) / 8 + least - 1) / least * 8;
        cut = (count + size - 1) / size;
      }
    }
    counts[i] = count; sizes[i] = size; cuts[i] = cut;
    own += (u32)count << 16 | (u32)cut;
  }
  u32 sum = own;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u32 o = __shfl_up_sync(ALL_LANES, sum, d);
    if (lane >= d) sum += o;
  }
  if (lane == 31) at[held + warp] = sum;
  __syncthreads();
  u32 before = 0, all = 0;
  for (int w = 0; w < THREADS / 32; w++) {
    if (w == warp) before = all;
    all += at[held + w];
  }
  u32 start = before + sum - own;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = tid * EACH + i;
    if (e >= held) continue;
    at[e] = start >> 16;
    for (int j = 0; j < cuts[i]; j++)
      jobs[(start & 0xffff) + j] = make_int4(e, (start >> 16) + j * sizes[i], min(sizes[i], counts[i] - j * sizes[i]), 0);
    start += (u32)counts[i] << 16 | (u32)cuts[i];
  }
  if (tid == 0) *njobs = all & 0xffff;
  __syncthreads();
  for (int p = tid; p < n * TOPK; p += THREADS) {
    const u32 e = choice<NEW>(chosen, p) - first, t = p / TOPK;
    if (e < (u32)held) {
      const u32* m = mask + e * words;
      int rank = __popc(m[t >> 5] & ((1u << (t & 31)) - 1));
      for (u32 w = 0; w < t >> 5; w++) rank += __popc(m[w]);
      pairs[at[e] + rank] = p;
    }
  }
}
#endif

#ifdef WHOLE
// The lists of at most 32 pairs by one warp; a job holds at least as many pairs as an expert can have rows.
__device__ __forceinline__ void few_lists(const int* chosen, int n, int first, int held, int* pairs, int4* jobs, int* njobs) {
  const int p = threadIdx.x, count = n * TOPK;
  const u32 expert = p < count ? load_new(chosen + p) - first : ~0u;
  const bool here = expert < (u32)held;
  int start = 0, rank = 0, same = 0;           // pairs of lower experts; of this one: before p, and in all
  for (int o = 0; o < count; o++) {
    const u32 e = __shfl_sync(ALL_LANES, expert, o);
    if (e < (u32)held) { start += e < expert; rank += e == expert && o < p; same += e == expert; }
  }
  const u32 heads = __ballot_sync(ALL_LANES, here && rank == 0);
  int job = 0;
  for (int o = 0; o < count; o++) job += __shfl_sync(ALL_LANES, expert, o) < expert && (heads >> o & 1);
  if (here) pairs[start + rank] = p;
  if (here && rank == 0) jobs[job] = make_int4(expert, start, same, 0);
  if (p == 0) *njobs = __popc(heads);
}
#endif

#ifdef CHOOSE
// A row a block, 128 threads.
extern "C" __global__ void __launch_bounds__(128)
choose(const float* __restrict__ partial, const float* __restrict__ bias, const int* __restrict__ live, int* __restrict__ experts,
       float* __restrict__ weights, int rows, int first, int held, float scale) {
  __shared__ float score[EXPERTS], biases[EXPERTS];
  const int row = blockIdx.x, n = min(rows, *live);               // scores has waited for who wrote *live
  for (int e = threadIdx.x; e < EXPERTS; e += 128) biases[e] = bias[e];
  pdl_wait();
  pdl_go();                                    // go after wait: `lists` reads *live ahead of its own
  if (row < n) choose_rows(score, partial, biases, rows, row, row + 1, first, held, scale, experts, weights);
}
#endif

#ifdef LISTS
// One block of 1024 threads. Dynamic shared memory: 4 * (held * (ceil(rows / 32) | 1) + held + 33) bytes.
extern "C" __global__ void __launch_bounds__(1024)
lists(const int* __restrict__ experts, const int* __restrict__ live, int* __restrict__ pairs, int4* __restrict__ jobs,
      int* __restrict__ njobs, int rows, int first, int held, int tile) {
  DYNAMIC_SHARED(u32, space);
  const int n = min(rows, *live);
  pdl_wait();
  pdl_go();
  const int words = (rows + 31) / 32 | 1;      // odd: the words of 32 experts lie in 32 banks
  make_lists<1024, false>(space, space + held * words, experts, n, words, first, held, tile, pairs, jobs, njobs);
}
#endif

#ifdef WHOLE
// Is this block the last of `count` that come here? Then it sees what the others wrote before, through load_new.
__device__ __forceinline__ bool last_of(int* ticket, int count) {
  __shared__ int last;
  fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = take_ticket(ticket) == count - 1;
    if (last) *ticket = 0;                     // for the next launch
  }
  __syncthreads();
  if (last) fence();
  return last;
}

// Grid as scores. tickets: [1 + row blocks], zero between launches.
// Runs beside the kernel before by rule (d) of common.cuh: x and *live are older than that one, whose blocks have all waited for who
// wrote them before they let this one start. Nothing here waits for it but the end, so that what comes next may rely on it.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
whole(const uint4* __restrict__ W, const bf16* x, const int* live, float* partial, const float* __restrict__ bias, int* experts,
      float* weights, int* pairs, int4* jobs, int* njobs, int* tickets, int rows, int row_block, int first, int held, float scale,
      int tile) {
  constexpr int WORDS = 128 / 32 | 1;
  __shared__ union {                           // one after the other
    Sums sums[2];
    struct { float score[WARPS * EXPERTS], biases[EXPERTS]; } choosing;
    struct { u32 mask[EXPERTS * WORDS], at[EXPERTS + 33]; } listing;
  } space;
  score_rows<true>(space.sums, W, x, live, partial, rows, row_block, [] { pdl_go_early(); });
  if (!last_of(tickets + 1 + blockIdx.z, gridDim.x * gridDim.y)) return;
  const int n = min(rows, load_new(live)), from = blockIdx.z * row_block, to = min(n, from + row_block);
  for (int e = threadIdx.x; e < EXPERTS; e += 32 * WARPS) space.choosing.biases[e] = bias[e];
  for (int row = from; row < to; row += WARPS) {
    choose_rows(space.choosing.score, partial, space.choosing.biases, rows, row, min(row + WARPS, to), first, held, scale, experts,
                weights);
    __syncthreads();
  }
  if (!last_of(tickets, gridDim.z)) return;
  const int words = (rows + 31) / 32 | 1;
  if (n * TOPK > 32 || n > tile)
    make_lists<32 * WARPS, true>(space.listing.mask, space.listing.at, experts, n, words, first, held, tile, pairs, jobs, njobs);
  else if (threadIdx.x < 32) few_lists(experts, n, first, held, pairs, jobs, njobs);
  pdl_wait();
}
#endif
