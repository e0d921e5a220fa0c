// Live nodes of all rows, one after another, as the layers of the target read them. A block per row finds its own start.
#include "../before.cuh"

constexpr int FLATTEN_THREADS = 128;

// Grid (R). Trees padded to N; table [R][pages] of pages of `page` slots: node i lies at position lengths[r] + i of its row.
// Rows from *rows on are empty: their counts become 0. starts [R], total [1], slots [R][N]; tokens, positions, places (a node's slot),
// row_of, node_of [T], ancestors [T][2].
extern "C" __global__ void __launch_bounds__(FLATTEN_THREADS)
flatten(const long long* tree_tokens, const long long* tree_positions, const u64* tree_ancestors, long long* counts,
        const long long* lengths, const int* table, const int* rows, int N, int pages, int page, long long* starts, int* total,
        long long* slots, long long* tokens, long long* positions, long long* places, long long* row_of, long long* node_of,
        u64* ancestors) {
  const int r = blockIdx.x, R = gridDim.x, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  const int live = rows ? min(R, load_int(rows)) : R, end = min(r, live);
  const int before = sum_before<FLATTEN_THREADS>(end, [&](int i) { return (int)load_long(counts + i); });      // nobody writes them
  const int n = r < live ? (int)load_long(counts + r) : 0;
  if (tid == 0) {
    starts[r] = before;
    if (r >= live) counts[r] = 0;
    if (r == R - 1) *total = before + n;
  }
  for (int i = tid; i < n; i += FLATTEN_THREADS) {
    const long long from = (long long)r * N + i, to = before + i, at = lengths[r] + i;
    const int which = (int)min(at / page, (long long)pages - 1);
    const long long slot = (long long)table[(long long)r * pages + which] * page + at % page;
    slots[from] = slot;
    tokens[to] = tree_tokens[from];
    positions[to] = tree_positions[from];
    places[to] = slot;
    row_of[to] = r;
    node_of[to] = i;
    ancestors[2 * to] = tree_ancestors[2 * from];
    ancestors[2 * to + 1] = tree_ancestors[2 * from + 1];
  }
}
