// The end of a step: what a walk accepted becomes the state of its row. For measuring: guesses and choices that make walks as long
// as asked.
#include "../rounded.cuh"

#ifdef EMULATION
inline void count_two(int* p) { *p += 2; }
#else
__device__ __forceinline__ void count_two(int* p) { atomicAdd(p, 2); }     // integers: sums have no order
#endif

// Grid (R), a warp each. Decoding places (before *free) and the pieces that end a prompt (emits): length and root of row ids[r]
// move on, and what was emitted ([R][P]) is counted in line history_rows[r] (-1: none) of history [..][V].
extern "C" __global__ void __launch_bounds__(32)
advance_rows(const int* live, const int* free, const long long* ids, const unsigned char* emits, const long long* lengths,
        const long long* accepted, const long long* emitted, const long long* final, const long long* tokens, int P,
        const int* history_rows, int* history, int V, long long* row_lengths, long long* row_roots) {
  const int r = blockIdx.x, lane = threadIdx.x;
  pdl_wait();
  pdl_go();
  if (r >= load_int(live) || (r >= load_int(free) && !emits[r])) return;
  if (lane == 0) {
    row_lengths[ids[r]] = load_long(lengths + r) + load_long(accepted + r);
    row_roots[ids[r]] = load_long(final + r);
  }
  if (!history || history_rows[r] < 0) return;
  const int n = (int)min(load_long(emitted + r), (long long)P);
  for (int i = lane; i < n; i += 32) {
    const long long token = load_long(tokens + (long long)r * P + i);
    if (token >= 0 && token < V) count_two(history + (long long)history_rows[r] * V + token);
  }
}

// A number that seeds and lengths decide, whatever else there is.
__device__ __forceinline__ u64 hash_of(long long seed, long long length) {
  u64 h = (u64)seed * 0x9E3779B97F4A7C15ull + (u64)length;
  h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
  h = (h ^ h >> 27) * 0x94D049BB133111EBull;
  return h ^ h >> 31;
}

// Grid (R). Trees of the places before *free, beyond their roots. tokens [R][N]: all of a tree differ, and those of trees of other
// roots, for a random drafter says the same at every depth, and nodes of one token choose the same experts. logprob [R][N]: what the
// walks that synthetic_choices makes are like, so that sizes can be chosen: the first node of a depth is passed for sure up to depth
// `whole`, with probability `part` one deeper, and never else.
extern "C" __global__ void __launch_bounds__(32)
synthetic_guesses(const int* free, const long long* seeds, const long long* lengths, const long long* counts,
          const long long* depths, int N, int V, int whole, float log_part, float never, long long* tokens, float* logprob) {
  const int r = blockIdx.x;
  pdl_wait();
  pdl_go();
  if (r >= load_int(free)) return;
  const int n = (int)load_long(counts + r);
  const u64 first = hash_of(seeds[r] + (load_long(tokens + (long long)r * N) << 32), load_long(lengths + r)) % V;
  for (int i = 1 + threadIdx.x; i < n; i += 32) tokens[(long long)r * N + i] = (first + (u64)i * (V / N)) % V;
  if (threadIdx.x) return;
  int deepest = 0;
  for (int i = 1; i < n; i++) {
    const long long at = (long long)r * N + i;
    const int depth = (int)load_long(depths + at);
    logprob[at] = depth <= deepest ? never : depth <= whole ? 0.f : depth == whole + 1 ? log_part : never;
    deepest = max(deepest, depth);
  }
}

// Grid (R). Changes the choices at nodes of the places before *free (where [R][N] -> m) so that a walk accepts `whole` nodes
// beyond the root, or one more with probability `part` (a hash of seed and length), or as many as the tree is deep.
extern "C" __global__ void __launch_bounds__(32)
synthetic_choices(const int* free, const long long* seeds, const long long* lengths, const long long* counts,
          const long long* tokens, const long long* parents, const long long* depths, const int* where, int N, int V, int whole,
          float part, long long* choices) {
  const int r = blockIdx.x;
  pdl_wait();
  pdl_go();
  if (r >= load_int(free) || threadIdx.x) return;
  const u64 h = hash_of(seeds[r], load_long(lengths + r));
  const int want = whole + (int)((float)(h >> 40) * (1.f / 16777216.f) < part);
  const long long at = (long long)r * N;
  const int n = (int)load_long(counts + r);
  int node = 0;
  for (int i = 1; i < n; i++)                              // the first node of the wanted depth, or of the greatest below it
    if (load_long(depths + at + i) <= want && load_long(depths + at + i) > load_long(depths + at + node)) node = i;
  long long last = choices[where[at + node]];              // a token that no child of the last node holds
  for (int i = node + 1; i < n; i++)
    if (load_long(parents + at + i) == node && load_long(tokens + at + i) == last) { last = last + 1 < V ? last + 1 : 0; i = node; }
  choices[where[at + node]] = last;
  while (node > 0) {
    const int parent = (int)load_long(parents + at + node);
    choices[where[at + parent]] = load_long(tokens + at + node);
    node = parent;
  }
}
