// The start of a step: what the host says about each place and what the device knows of its row become lengths, roots and trees.
// And, where prompts run beside trees, which live nodes are verified. A block for each place.
#include "../before.cuh"

constexpr int BEGIN_THREADS = 64;

// Grid (R). Places 0 .. *free - 1 are rows that decode: length and root are their row's (ids). Places from there to *live - 1 are
// pieces of prompts: chunks[r] known tokens from prompt + offsets[r], after bases[r] committed ones. Trees padded to N: a decoding
// row gets its root alone, a piece a chain. floor_left[r] is how many more tokens, floor_ends[r] in all, must come before an end
// token may be chosen at the root (or the end of a piece). Places from *live on are not touched.
extern "C" __global__ void __launch_bounds__(BEGIN_THREADS)
begin_step(const int* live, const int* free, const long long* ids, const long long* bases, const int* chunks, const int* offsets,
      const int* prompt, const int* floor_ends, const long long* row_lengths, const long long* row_roots, int N, long long* lengths,
      long long* roots, int* floor_left, long long* tokens, long long* parents, long long* depths, long long* positions,
      long long* counts, float* logprob, u64* ancestors) {
  const int r = blockIdx.x, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if (r >= load_int(live)) return;
  const bool forced = r >= load_int(free);
  const long long id = ids[r], first = (long long)r * N;
  const long long length = forced ? bases[r] : load_long(row_lengths + id), root = forced ? 0 : load_long(row_roots + id);
  const int n = forced ? min(chunks[r], N) : 1;
  if (tid == 0) { lengths[r] = length; roots[r] = root; counts[r] = n; floor_left[r] = floor_ends[r] - (int)(length + n); }
  for (int i = tid; i < n; i += BEGIN_THREADS) {
    const long long to = first + i;
    tokens[to] = forced ? (long long)prompt[offsets[r] + i] : root;
    parents[to] = i - 1;
    depths[to] = i;
    positions[to] = length + i;
    logprob[to] = 0.f;
    ancestors[2 * to] = i < 63 ? (2ull << i) - 1 : ~0ull;
    ancestors[2 * to + 1] = i < 64 ? 0 : (2ull << (i - 64)) - 1;
  }
}

// Grid (R). Verified are all live nodes of the places before *free and the last node of the pieces that end a prompt (emits), in
// order. index[m]: which of the flat nodes, rows[m], nodes[m]: place and node, *verified: how many.
extern "C" __global__ void __launch_bounds__(BEGIN_THREADS)
list_verified(const int* live, const int* free, const unsigned char* emits, const long long* counts, const long long* starts,
       long long* index, long long* rows, long long* nodes, int* verified) {
  const int r = blockIdx.x, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  const int places = min((int)gridDim.x, load_int(live)), decoding = load_int(free);
  auto count = [&](int i) { return i < decoding ? (int)load_long(counts + i) : emits[i] ? 1 : 0; };
  const int before = sum_before<BEGIN_THREADS>(min(r, places), count);
  const int all = r < places ? (int)load_long(counts + r) : 0, skipped = r < decoding ? 0 : all - 1;
  const int n = r >= places ? 0 : r < decoding ? all : emits[r] ? 1 : 0;
  if (tid == 0 && r == (int)gridDim.x - 1) *verified = before + n;
  for (int i = tid; i < n; i += BEGIN_THREADS) {
    index[before + i] = load_long(starts + r) + skipped + i;
    rows[before + i] = r;
    nodes[before + i] = skipped + i;
  }
}
