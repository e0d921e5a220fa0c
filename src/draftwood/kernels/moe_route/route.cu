// Router of an MoE layer: scores = x W^T, sigmoid, biased choice of TOPK experts, weights, and the lists of the grouped GEMMs.
//
//   scores   partial[seg][row][expert]: grid (EXPERTS/16/SPAN, SEGMENTS, row blocks); a warp owns 16 SPAN experts x 128 of K
//   settle   a row a warp: experts[row][slot], weights[row][slot]; the last block makes the lists: pairs, jobs, njobs
//   whole    all of it in one launch for at most 128 rows: the last block of some rows chooses, the last of all makes the lists
//
// LAW 1. A score is, for each 128 of K, one chain of mma from 0 (K ascending; the bf16 parts of W in order); the WARPS chains of
// a segment are added in order, then the segments in order. Nothing depends on the number of rows or on other rows. Ties go to
// the lowest id. Bit masks are set with atomicOr: their result has no order.
//
// Macros: HIDDEN, EXPERTS (multiple of 16), TOPK, PARTS (1: W is bf16; 3: W is fp32, cut into three bf16 that sum to it exactly),
// WARPS (HIDDEN is a multiple of 128*WARPS); one of SCORES, SETTLE, WHOLE.
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
// [row][expert] of a warp's 128 of K and the rows of a turn; + 1: the writes of a quad spread over the banks
template <int TILES, int SPAN> struct Sums { float of[WARPS][8 * TILES][16 * SPAN + 1]; };
// Scores of this block's 16 SPAN experts, segment and rows into partial: [SEGMENTS][rows][EXPERTS]. row_block: rows of a block, a
// multiple of 8 * TILES, the rows of a turn. sums: BUFFERS of them. begin is called when the weights are on their way; NEW: nothing has waited for who
// wrote x and *live.
template <bool NEW, int BUFFERS, int TILES, int SPAN, class Begin>
__device__ __forceinline__ void score_rows(Sums<TILES, SPAN>* sums, const uint4* W, const bf16* x, const int* live, float* partial, int rows,
                                           int row_block, Begin begin) {
  constexpr int STEPS = 8;                     // of 16 K: a warp's 128
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3, seg = blockIdx.y;
  const int k = seg * SEGMENT + warp * 128;
  u32 a[SPAN][PARTS][STEPS][4];
#pragma unroll
  for (int e = 0; e < SPAN; e++)
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int i = 0; i < STEPS; i++) {        // weights never change: they travel while the previous kernel ends
        const long long tile = p * (EXPERTS / 16) + blockIdx.x * SPAN + e;
        const uint4 v = load16_once(W + (tile * (HIDDEN / 16) + k / 16 + i) * 32 + lane);
        a[e][p][i][0] = v.x; a[e][p][i][1] = v.y; a[e][p][i][2] = v.z; a[e][p][i][3] = v.w;
      }
  uint4 next[TILES][4];
  const int from = blockIdx.z * row_block;
  auto fetch = [&](int row) {                  // rows from *live on are computed and not written
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const bf16* at = x + (long long)min(row + 8 * t + g, rows - 1) * HIDDEN + k + q * 8;
#pragma unroll
      for (int b = 0; b < 4; b++) next[t][b] = NEW ? load16_new(at + b * 32) : load16(at + b * 32);
    }
  };
  begin();
  fetch(from);                                 // travels with the count
  const int to = min(min(rows, NEW ? load_new(live) : *live), from + row_block);
  int buffer = 0;
#pragma unroll 1
  for (int row = from; row < to; row += 8 * TILES, buffer ^= BUFFERS - 1) {
    uint4 b[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) b[t][i] = next[t][i];
    if (row + 8 * TILES < to) fetch(row + 8 * TILES);
    float acc[SPAN][TILES][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
          for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < SPAN; e++)
              mma(acc[e][t], a[e][p][2 * i + s], s ? b[t][i].z : b[t][i].x, s ? b[t][i].w : b[t][i].y);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int e = 0; e < SPAN; e++) {
        float *even = sums[buffer].of[warp][8 * t + 2 * q] + 16 * e + g, *odd = sums[buffer].of[warp][8 * t + 2 * q + 1] + 16 * e + g;
        even[0] = acc[e][t][0]; odd[0] = acc[e][t][1]; even[8] = acc[e][t][2]; odd[8] = acc[e][t][3];
      }
    __syncthreads();                           // of two buffers the next turn writes the other one
    for (int i = tid; i < 128 * TILES * SPAN; i += 32 * WARPS) {
      const int r = i / (16 * SPAN), e = i % (16 * SPAN);
      float v = sums[buffer].of[0][r][e];
#pragma unroll
      for (int w = 1; w < WARPS; w++) v += sums[buffer].of[w][r][e];
      if (row + r < to) partial[((long long)seg * rows + row + r) * EXPERTS + blockIdx.x * 16 * SPAN + e] = v;
    }
    if (BUFFERS == 1) __syncthreads();
  }
}
#endif

#ifdef SCORES
extern "C" __global__ void __launch_bounds__(32 * WARPS)
scores(const uint4* __restrict__ W, const bf16* __restrict__ x, const int* __restrict__ live, float* __restrict__ partial,
       int rows, int row_block) {
  // 48 experts a block read x a third as often; with W in three parts their registers are not there.
  constexpr int SPAN = PARTS == 1 && EXPERTS % 48 == 0 ? 3 : 1, BUFFERS = SPAN == 1 ? 2 : 1;
  __shared__ Sums<2, SPAN> sums[BUFFERS];
  score_rows<false, BUFFERS>(sums, W, x, live, partial, rows, row_block, [] {
    pdl_wait();
    pdl_go();
  });
}
#endif

#if defined(SETTLE) || defined(WHOLE)
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

// Shared memory of make_lists, for `held` experts and `words` times 32 rows.
struct ListSpace {
  u32 *mask, *at;                                // [held][words] bits of the rows that chose an expert; [held + 33] first pairs, sums of warps
  unsigned short *before, *ids;                  // [held][words] pairs of an expert before a word's rows; [pairs] their experts
};
constexpr u32 ELSEWHERE = 0xffff;                // an expert of another rank

// One block of THREADS: pairs grouped by expert (ascending, then by row), jobs of at most `tile` pairs balanced in multiples of 8.
// This kernel's other blocks have written `chosen`.
template <int THREADS>
__device__ __forceinline__ void make_lists(const ListSpace& space, const int* chosen, int n, int words, int first, int held, int tile,
                                           int* pairs, int4* jobs, int* njobs) {
  constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;      // experts of a thread, in a row
  constexpr int BATCH = 4;                                     // choices that a thread asks for before it waits for the first
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, count_all = n * TOPK, used = (n + 31) / 32;
  u32 *mask = space.mask, *at = space.at;
  for (int i = tid; i < held * words; i += THREADS) mask[i] = 0;
  __syncthreads();
  for (int begin = tid; begin < count_all; begin += BATCH * THREADS) {
    u32 id[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int p = begin + b * THREADS;
      id[b] = p < count_all ? load_new(chosen + p) - first : ~0u;
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int p = begin + b * THREADS, t = p / TOPK;
      const bool here = id[b] < (u32)held;
      if (here) atomicOr(&mask[id[b] * words + (t >> 5)], 1u << (t & 31));
      if (p < count_all) space.ids[p] = here ? id[b] : ELSEWHERE;
    }
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
      for (int w = 0; w < used; w++) {
        space.before[e * words + w] = count;
        count += __popc(mask[e * words + w]);
      }
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
  for (int p = tid; p < count_all; p += THREADS) {
    const u32 e = space.ids[p], t = p / TOPK, word = e * words + (t >> 5);
    if (e != ELSEWHERE) pairs[at[e] + space.before[word] + __popc(mask[word] & ((1u << (t & 31)) - 1))] = p;
  }
}

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

#ifdef SETTLE
// A row a warp, CHOOSERS rows a block; the last block makes the lists. Dynamic shared memory: what `settle_bytes` of op.py says.
// tickets: [1], zero between launches. beside: it runs beside the kernel before by rule (d) of common.cuh: partial and *live are
// older than that one.
constexpr int CHOOSERS = 16;
extern "C" __global__ void __launch_bounds__(32 * CHOOSERS, 1)   // 1: else ptxas stops at 40 registers and spills
settle(const float* partial, const float* __restrict__ bias, const int* live, int* experts, float* weights, int* pairs, int4* jobs,
       int* njobs, int* tickets, int rows, int first, int held, float scale, int tile, int beside) {
  DYNAMIC_SHARED(u32, space);
  float *score = reinterpret_cast<float*>(space), *biases = score + CHOOSERS * EXPERTS;
  for (int e = threadIdx.x; e < EXPERTS; e += 32 * CHOOSERS) biases[e] = bias[e];
  if (beside) pdl_go_early();
  else {
    pdl_wait();
    pdl_go();                                  // go after wait: kernels of moe_int4 read lists ahead of their own
  }
  const int n = min(rows, load_new(live)), from = blockIdx.x * CHOOSERS, to = min(n, from + CHOOSERS);
  if (from < to) choose_rows(score, partial, biases, rows, from, to, first, held, scale, experts, weights);
  if (!last_of(tickets, gridDim.x)) return;
  const int words = (rows + 31) / 32 | 1;      // odd: the words of 32 experts lie in 32 banks
  ListSpace lists = {space, space + held * words};
  lists.before = reinterpret_cast<unsigned short*>(lists.at + held + 33);
  lists.ids = lists.before + held * words;
  make_lists<32 * CHOOSERS>(lists, experts, n, words, first, held, tile, pairs, jobs, njobs);
  if (beside) pdl_wait();
}
#endif

#ifdef WHOLE
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int LEAST_BLOCKS = 1;                // else ptxas stops at 80 registers and spills
#else
constexpr int LEAST_BLOCKS = 0;
#endif
// Grid as scores. tickets: [1 + row blocks], zero between launches.
// Runs beside the kernel before by rule (d) of common.cuh: x and *live are older than that one, whose blocks have all waited for who
// wrote them before they let this one start. Nothing here waits for it but the end, so that what comes next may rely on it.
extern "C" __global__ void __launch_bounds__(32 * WARPS, LEAST_BLOCKS)
whole(const uint4* __restrict__ W, const bf16* x, const int* live, float* partial, const float* __restrict__ bias, int* experts,
      float* weights, int* pairs, int4* jobs, int* njobs, int* tickets, int rows, int row_block, int first, int held, float scale,
      int tile) {
  constexpr int WORDS = 128 / 32 | 1;
  __shared__ union {                           // one after the other
    Sums<1, 1> sums[2];
    struct { float score[WARPS * EXPERTS], biases[EXPERTS]; } choosing;
    struct { u32 mask[EXPERTS * WORDS], at[EXPERTS + 33]; unsigned short before[EXPERTS * WORDS], ids[128 * TOPK]; } listing;
  } space;
  score_rows<true, 2>(space.sums, W, x, live, partial, rows, row_block, [] { pdl_go_early(); });
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
    make_lists<32 * WARPS>({space.listing.mask, space.listing.at, space.listing.before, space.listing.ids}, experts, n, words, first,
                           held, tile, pairs, jobs, njobs);
  else if (threadIdx.x < 32) few_lists(experts, n, first, held, pairs, jobs, njobs);
  pdl_wait();
}
#endif
