// How large each tree should be, decided where the trees are: the smaller tree is a prefix, so a size is a number.
//
// `fit` takes nodes of all rows in order of their gain, the chance that a node is accepted, and stops where expected tokens per
// second of the step are most; gains are counted in 16 bins per octave, all nodes of a bin are taken or none. It does so for every
// cap up to the one that trees were grown to, each with costs of its own, for a step with a smaller cap is another graph: one of
// them cuts the trees, the others tell what would have been. Costs are known to a few percent (uneven trees take longer than even
// ones of as many nodes), so whole trees stay where the best cut promises less than that. `learn` corrects the drafter's probabilities by what was accepted.
// Sums are of integers, so they have no order.
#include "../tree/numbers.cuh"

constexpr int FIT_THREADS = 512, LEARN_THREADS = 256, ROWS = 256, MOST = 64, BINS = 257;
constexpr int KINDS = 3, EDGES = 14, CLASSES = EDGES + 1;
constexpr int CAPS = 4;                                                      // trees of at most 8, 16, 32 and 64 nodes beyond the root
constexpr float COLD_HEAT = 1e-5f, WARM_HEAT = .8f;
constexpr float ONE = 262144.f, PER_OCTAVE = 23.083120f;                     // 2^18; 16 / log 2
constexpr float DOUBT = 1.02f;                                               // how much more a cut must promise than whole trees

#ifdef EMULATION
inline void add_int(int* p, int v) { *p += v; }
inline void add_long(long long* p, long long v) { *p += v; }
#else
__device__ __forceinline__ void add_int(int* p, int v) { atomicAdd(p, v); }
__device__ __forceinline__ void add_long(long long* p, long long v) { atomicAdd((unsigned long long*)p, (unsigned long long)v); }
#endif

__device__ __forceinline__ int heat_kind(float heat) { return (heat > COLD_HEAT) + (heat > WARM_HEAT); }

__device__ __forceinline__ int class_of(float logprob) {                     // how many edges lie below
  constexpr float EDGE[EDGES] = {-8.f, -6.f, -5.f, -4.f, -3.f, -2.5f, -2.f, -1.5f, -1.f, -.7f, -.4f, -.2f, -.1f, -.05f};
  int found = 0;
#pragma unroll
  for (int i = 0; i < EDGES; i++) found += EDGE[i] < logprob;
  return found;
}

__device__ __forceinline__ int cap_of(int node) { return (node > 8) + (node > 16) + (node > 32); }

// Seconds of a step with `total` nodes: linear between the points, and along the first or last segment beyond them.
__device__ __forceinline__ float seconds_at(const int* totals, const float* seconds, int points, int total) {
  int high = 1;
  while (high < points - 1 && totals[high] < total) high++;
  if (points == 1) return seconds[0];
  const float slope = div_rn(sub_rn(seconds[high], seconds[high - 1]), (float)(totals[high] - totals[high - 1]));
  return add_rn(seconds[high - 1], mul_rn(slope, (float)(total - totals[high - 1])));
}

// What a step keeps of its trees: nodes of bins up to this one, none with -1; all nodes then, and tokens expected, times 2^18.
struct Kept {
  float rate;
  int bin, nodes;
  long long gain;
};

// The best of a cap, the first of equals, where `none` is kept in any case, or all where the best is not worth a cut; by a warp,
// each lane a run of bins.
__device__ __forceinline__ Kept best_of(const int (&nodes_in)[CAPS][BINS], const long long (&gain_in)[CAPS][BINS], int cap,
                                        const int* totals, const float* seconds, int points, Kept none) {
  constexpr int EACH = (BINS + 31) / 32;
  const int lane = threadIdx.x & 31, first = lane * EACH, end = min(first + EACH, BINS);
  int nodes = 0;
  long long gain = 0;
  auto add = [&](int bin) {
    int more = 0;
    for (int c = 0; c <= cap; c++) { more += nodes_in[c][bin]; gain += gain_in[c][bin]; }
    nodes += more;
    return more > 0;
  };
  for (int bin = first; bin < end; bin++) add(bin);
  int nodes_here = nodes;
  long long gain_here = gain;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int n = __shfl_up_sync(ALL_LANES, nodes, d);
    const long long g = __shfl_up_sync(ALL_LANES, gain, d);
    if (lane >= d) { nodes += n; gain += g; }
  }
  Kept all{0.f, BINS - 1, none.nodes + __shfl_sync(ALL_LANES, nodes, 31), none.gain + __shfl_sync(ALL_LANES, gain, 31)};
  all.rate = div_rn((float)all.gain, seconds_at(totals, seconds, points, all.nodes));
  nodes += none.nodes - nodes_here;
  gain += none.gain - gain_here;
  none.rate = div_rn((float)none.gain, seconds_at(totals, seconds, points, none.nodes));
  Kept best = none;
  for (int bin = first; bin < end; bin++) {
    if (!add(bin)) continue;
    const float rate = div_rn((float)gain, seconds_at(totals, seconds, points, nodes));
    if (rate > best.rate) best = Kept{rate, bin, nodes, gain};
  }
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const Kept o{__shfl_xor_sync(ALL_LANES, best.rate, d), __shfl_xor_sync(ALL_LANES, best.bin, d),
                 __shfl_xor_sync(ALL_LANES, best.nodes, d), __shfl_xor_sync(ALL_LANES, best.gain, d)};
    if (o.rate > best.rate || (o.rate == best.rate && o.bin < best.bin)) best = o;
  }
  return best.rate > mul_rn(all.rate, DOUBT) ? best : all;
}

// One block. Of `live` places the first `free` decode. counts [R] (cut for rows with automatic[r]), logprob [R][N], heat [R];
// ratio [KINDS][CLASSES]; totals, seconds [CAPS][points], totals ascending. For caps 0 .. own: expected, tokens that decoding
// places return on average, times 2^18, and sized, the nodes of the step; 0 for larger caps. The trees are cut as cap `own` has
// it.
extern "C" __global__ void __launch_bounds__(FIT_THREADS)
fit_sizes(const int* live, const int* free, int R, int N, const unsigned char* automatic, const float* logprob, const float* heat,
          const float* ratio, const int* totals, const float* seconds, int points, int own, long long* counts,
          long long* expected, long long* sized) {
  __shared__ unsigned short bin_of[ROWS * MOST];
  __shared__ long long gain_in[CAPS][BINS], fixed_gain;                      // 128 rows of 64 sure nodes are 2^31 units
  __shared__ int nodes_in[CAPS][BINS], fixed_nodes, best;
  const int tid = threadIdx.x, lane = tid & 31;
  pdl_wait();
  pdl_go();
  const int places = min(R, load_int(live)), decoding = min(places, load_int(free));
  for (int i = tid; i < CAPS * BINS; i += FIT_THREADS) { nodes_in[i / BINS][i % BINS] = 0; gain_in[i / BINS][i % BINS] = 0; }
  if (tid == 0) { fixed_nodes = 0; fixed_gain = 0; }
  if (tid < CAPS) { expected[tid] = 0; sized[tid] = 0; }
  __syncthreads();
  for (int r = tid >> 5; r < places; r += FIT_THREADS / 32) {                // a warp per row
    const int n = (int)load_long(counts + r);
    if (r >= decoding) {
      if (lane == 0) add_int(&fixed_nodes, n);
      continue;
    }
    const bool chosen = automatic[r] != 0;
    if (lane == 0) add_int(&fixed_nodes, chosen ? 1 : n);
    const int kind = heat_kind(heat[r]);
    float least = 1.f;
    for (int first = 1; first < n; first += 32) {
      const int i = first + lane;
      float p = 1.f;
      if (i < n) {
        const float given = logprob[(long long)r * N + i];
        p = min(mul_rn(exp_of(min(given, 0.f)), ratio[kind * CLASSES + class_of(given)]), 1.f);
      }
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {                                     // least of this lane and those before
        const float other = __shfl_sync(ALL_LANES, p, lane >= d ? lane - d : lane);
        p = min(p, other);
      }
      p = min(p, least);
      least = __shfl_sync(ALL_LANES, p, 31);
      if (i >= n) continue;
      const int gain = (int)mul_rn(p, ONE);
      if (!chosen) { add_long(&fixed_gain, gain); continue; }
      const float octaves = gain > 0 ? mul_rn(minus_log(p), PER_OCTAVE) : (float)BINS;
      const int bin = min((int)octaves, BINS - 1), cap = cap_of(i);
      bin_of[r * MOST + i - 1] = (unsigned short)bin;
      add_int(&nodes_in[cap][bin], 1);
      add_long(&gain_in[cap][bin], gain);
    }
  }
  __syncthreads();
  if (const int cap = tid >> 5; cap <= own) {                                // a warp per cap
    const Kept none{0.f, -1, fixed_nodes, fixed_gain + (long long)decoding * (int)ONE};
    const Kept kept = best_of(nodes_in, gain_in, cap, totals + cap * points, seconds + cap * points, points, none);
    if (lane == 0) {
      if (cap == own) best = kept.bin;
      expected[cap] = kept.gain;
      sized[cap] = kept.nodes;
    }
  }
  __syncthreads();
  for (int r = tid; r < decoding; r += FIT_THREADS) {
    if (!automatic[r]) continue;
    const int n = (int)min(load_long(counts + r), (long long)(8 << own) + 1);
    int size = 0;
    while (size < n - 1 && (int)bin_of[r * MOST + size] <= best) size++;
    counts[r] = size + 1;
  }
}

// One block. Verified nodes of decoding places: predicted and observed acceptances by kind and class, in units of 2^-18; a class
// forgets half of what it knows, and half again, while either passes `memory`; ratio = (observed + prior) / (predicted + prior).
// path [R][P], accepted [R].
extern "C" __global__ void __launch_bounds__(LEARN_THREADS)
learn_accepts(const int* free, int R, int N, int P, const long long* counts, const float* logprob, const float* heat,
              const long long* path, const long long* accepted, float memory, float prior, long long* predicted,
              long long* observed, float* ratio) {
  __shared__ long long said[KINDS * CLASSES], seen[KINDS * CLASSES];
  const int tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  const int decoding = min(R, load_int(free));
  for (int i = tid; i < KINDS * CLASSES; i += LEARN_THREADS) { said[i] = 0; seen[i] = 0; }
  __syncthreads();
  for (int item = tid; item < decoding * MOST; item += LEARN_THREADS) {
    const int r = item / MOST, i = item % MOST + 1;
    if (i >= (int)load_long(counts + r)) continue;
    const float given = logprob[(long long)r * N + i];
    const int at = heat_kind(heat[r]) * CLASSES + class_of(given);
    add_long(said + at, (long long)mul_rn(exp_of(min(given, 0.f)), ONE));
    const int n = (int)min(load_long(accepted + r), (long long)P);
    for (int k = 1; k < n; k++) if (load_long(path + (long long)r * P + k) == i) add_long(seen + at, (long long)ONE);
  }
  __syncthreads();
  for (int i = tid; i < KINDS * CLASSES; i += LEARN_THREADS) {
    long long p = predicted[i] + said[i], o = observed[i] + seen[i];
    while ((float)max(p, o) > mul_rn(memory, ONE)) { p /= 2; o /= 2; }
    predicted[i] = p;
    observed[i] = o;
    const float extra = mul_rn(prior, ONE);
    ratio[i] = div_rn(add_rn((float)o, extra), add_rn((float)p, extra));
  }
}
