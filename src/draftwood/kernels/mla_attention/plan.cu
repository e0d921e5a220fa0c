// The work list of a step, from what is in device memory: lengths and node counts of the rows. One launch per step, all
// layers use it. Every block repeats the small prefix sums and writes its share of the list.
#include "layout.cuh"

constexpr int MAX_ROWS = 256;
constexpr int THREADS = 256;

// Sum of `mine` over lower lanes; the total of all lanes goes to `all`.
template <class T> __device__ __forceinline__ T before(T mine, T& all) {
  const int lane = threadIdx.x & 31;
  T sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const T o = __shfl_up_sync(ALL_LANES, sum, d); if (lane >= d) sum += o; }
  all = __shfl_sync(ALL_LANES, sum, 31);
  return sum - mine;
}

struct Table {
  int length[MAX_ROWS], count[MAX_ROWS], token[MAX_ROWS];
  int shared_at[MAX_ROWS + 1], own_at[MAX_ROWS + 1];   // first job of each row, by kind
  long long part[MAX_ROWS];
  int span;
};

// Prefix sums with spans of `span` keys, by one warp; lane l has the rows l*each ... Returns whether everything fits.
__device__ bool lay_out(Table& t, int rows, int heads, int lines, int span, int own, long long parts, int jobs) {
  const int lane = threadIdx.x & 31, each = (rows + 31) / 32, r0 = min(lane * each, rows), r1 = min(r0 + each, rows);
  auto spans = [&](int r) { return pieces_before(base_of(t.length[r] + t.count[r] - 1), span); };
  auto blocks = [&](int r) { return (t.count[r] * heads + lines - 1) / lines; };
  int a = 0, b = 0;
  long long p = 0;
  for (int r = r0; r < r1; r++) {
    a += spans(r) * blocks(r);
    b += t.count[r] * own;
    p += (long long)(span == WHOLE ? 2 : spans(r)) * t.count[r] * heads;
  }
  int all_a, all_b;
  long long all_p;
  a = before(a, all_a); b = before(b, all_b); p = before(p, all_p);
  for (int r = r0; r < r1; r++) {
    t.shared_at[r] = a; t.own_at[r] = b; t.part[r] = p;
    a += spans(r) * blocks(r);
    b += t.count[r] * own;
    p += (long long)(span == WHOLE ? 2 : spans(r)) * t.count[r] * heads;
  }
  if (lane == 0) { t.shared_at[rows] = all_a; t.own_at[rows] = all_b; t.span = span; }
  return all_p <= parts && (long long)all_a + all_b <= jobs;
}

__device__ __forceinline__ int find(const int* at, int rows, int j) {   // the row with at[row] <= j < at[row + 1]
  int low = 0, high = rows;
  while (high - low > 1) { const int mid = (low + high) >> 1; if (at[mid] <= j) low = mid; else high = mid; }
  return low;
}

// lengths, counts, starts: int32, or int64 read by its low word (step 2). lines: of a SHARED_KEYS block; own_heads: of an
// OWN_KEYS block. span: UNIT or GROUP; if partials or jobs of spans of GROUP do not fit, each block walks whole rows.
extern "C" __global__ void __launch_bounds__(THREADS) mla_plan(
    const int* lengths, int length_step, const int* counts, int count_step, const int* starts, int start_step, int rows,
    int heads, int lines, int own_heads, int span, long long parts, int max_jobs, Job* jobs, Row* info, Head* head) {
  __shared__ Table t;
  pdl_wait();
  pdl_go();
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    t.length[r] = lengths[r * length_step]; t.count[r] = counts[r * count_step]; t.token[r] = starts[r * start_step];
  }
  __syncthreads();
  const int head_blocks = (heads + own_heads - 1) / own_heads, own = 2 * head_blocks;
  if (threadIdx.x < 32 && !lay_out(t, rows, heads, lines, span, own, parts, max_jobs))
    lay_out(t, rows, heads, lines, WHOLE, own, parts, max_jobs);
  __syncthreads();
  const int shared = t.shared_at[rows], total = shared + t.own_at[rows];
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *head = Head{total, t.span};
    for (int r = threadIdx.x; r < rows; r += THREADS)
      info[r] = Row{t.length[r], t.count[r], t.token[r], t.count[r] * heads, t.part[r], 0};
  }
  for (int j = blockIdx.x * THREADS + threadIdx.x; j < total; j += gridDim.x * THREADS) {
    Job o{};
    if (j < shared) {
      const int r = find(t.shared_at, rows, j), all = t.count[r] * heads, blocks = (all + lines - 1) / lines;
      const int top = base_of(t.length[r] + t.count[r] - 1), pieces = pieces_before(top, t.span);
      const int x = j - t.shared_at[r], piece = pieces - 1 - x / blocks, first = x % blocks * lines;   // long pieces come first
      o.kind = SHARED_KEYS; o.row = r; o.token = t.token[r]; o.first = first; o.live = min(lines, all - first);
      o.begin = t.span == WHOLE ? 0 : piece_begin(piece, t.span);
      o.end = t.span == WHOLE ? top : min(top, piece_begin(piece + 1, t.span));
      o.part = t.part[r] + (long long)piece * all + first;
      o.spare = t.span == WHOLE ? o.part + all : o.part;
    } else {
      const int r = find(t.own_at, rows, j - shared), x = j - shared - t.own_at[r], node = x / own, y = x % own;
      const int first = y % head_blocks * own_heads;
      o.kind = OWN_KEYS; o.row = r; o.token = t.token[r] + node; o.first = first; o.live = min(own_heads, heads - first);
      o.begin = y / head_blocks;
    }
    o.length = t.length[o.row];
    jobs[j] = o;
  }
}
