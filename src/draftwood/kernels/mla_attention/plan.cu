// The work list of a step, from what is in device memory: lengths and node counts of the rows. One launch per step, all
// layers use it. Every block repeats the small searches and sums and writes its share of the list.
#include "layout.cuh"

constexpr int MAX_ROWS = 256;
constexpr int THREADS = 256;
constexpr int SIZES = 208;                // job sizes that are tried: 64 keys, and 16 more of each doubling
constexpr int START = 160;                // what beginning a job costs, in keys
constexpr int MIXED = 8;                  // rows with which runs of several sizes are tried: more rows are jobs enough

// What a tile of keys costs a block with so many lines: with few, the keys are most of the work.
__device__ __forceinline__ int cost(int lines) {
  if (COLUMNS) return lines <= 8 ? 12 : 16;
  return lines <= 16 ? 6 : lines <= 32 ? 9 : 16;
}

// Sum of `mine` over lower lanes; the total of all lanes goes to `all`.
template <class T> __device__ __forceinline__ T before(T mine, T& all) {
  const int lane = threadIdx.x & 31;
  T sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const T o = __shfl_up_sync(ALL_LANES, sum, d); if (lane >= d) sum += o; }
  all = __shfl_sync(ALL_LANES, sum, 31);
  return sum - mine;
}

// A row's lines are cut into full blocks and perhaps one smaller; its keys into runs of whole spans, of about `size` keys: equal ones if
// no span is larger, else equal ones in each of the parts between which spans grow, a run at least a span.
struct Cut {
  int top, full, rest, all;               // keys; full blocks; lines of the smaller one; lines
  bool one;                               // always equal runs, single spans if need be
  __device__ __forceinline__ void set(int length, int count, int heads, int lines, bool always_equal) {
    one = always_equal;
    top = count == 0 ? 0 : base_of(length + count - 1);
    all = count * heads;
    full = all / lines;
    rest = all % lines;
  }
  __device__ __forceinline__ int parts(int size, int span) const {
    return one || span == WHOLE || top == 0 || size >= size_at(top - 1, span) ? 1 : 1 + (top > GROW1) + (top > GROW2) + (top > GROW3);
  }
  __device__ __forceinline__ static int border(int part) { return part == 0 ? 0 : part == 1 ? GROW1 : part == 2 ? GROW2 : GROW3; }
  // Part i of so many: its runs, their keys, where it begins and ends.
  __device__ __forceinline__ int runs_of(int i, int parts, int size, int span, int& keys, int& from, int& to) const {
    from = border(i);
    to = i + 1 == parts ? top : border(i + 1);
    if (from >= to) return 0;
    keys = span == WHOLE ? WHOLE : max(size, size_at(to - 1, span));
    if (span == WHOLE) return 1;
    int n = (to - from + keys - 1) / keys;
    while (n > 1 && round_up(from + (n - 1) * keys, span) >= to) n--;
    return n;
  }
  __device__ __forceinline__ int runs(int size, int span) const {
    const int all = parts(size, span);
    int n = 0, keys, from, to;
    for (int i = 0; i < all; i++) n += runs_of(i, all, size, span, keys, from, to);
    return n;
  }
};

struct Table {
  int length[MAX_ROWS], count[MAX_ROWS], token[MAX_ROWS];
  int full_at[MAX_ROWS + 1], rest_at[MAX_ROWS + 1], own_at[MAX_ROWS + 1];   // first job of each row, by kind
  long long part[MAX_ROWS];
  Cut cut[MAX_ROWS];
  float best[THREADS / 32];
  int best_size[THREADS / 32];
  int span, size;
};

__device__ __forceinline__ int tried(int x) { return __float2int_rn(64.f * ex2((float)x / 16.f)); }

// Estimated time of the step, in keys times cost, if runs have `size` keys and `blocks` blocks work at once. Equal runs work in waves; where
// some are shorter, these fill what the longest leave.
__device__ float estimate(const Table& t, int rows, int lines, int span, int blocks, int size) {
  const int full_cost = cost(lines);
  const bool fill = rows <= MIXED;
  float jobs = 0, total = 0, longest = 0, shortest = 1e30f;
  for (int r = 0; r < rows; r++) {
    const Cut& cut = t.cut[r];
    const int rest = cut.rest ? cost(cut.rest) : 0, parts = cut.parts(size, span);
    for (int i = 0; i < parts; i++) {
      int keys, from, to;
      const int n = cut.runs_of(i, parts, size, span, keys, from, to);
      if (n == 0) continue;
      const int least = size_at(to - 1, span), most = (min(keys, to - from) + least - 1) & -least;
      const float one = (float)(most + START) * (float)(cut.full ? full_cost : rest);
      total += (float)(to - from + n * START) * (float)(cut.full * full_cost + rest);
      if (fill && one > longest) jobs = 0;
      if (!fill || one >= longest) jobs += (float)n * (cut.full ? (float)cut.full + (float)rest / (float)full_cost : 1.f);
      longest = fmaxf(longest, one);
      shortest = fminf(shortest, one);
    }
  }
  const float waves = ceilf(jobs / (float)blocks);
  return fmaxf(total / (float)blocks + (fill && shortest < longest ? 0.5f * shortest : 0.f), waves * longest);
}

// The size with the smallest estimate, the largest of equal ones; all threads of the block.
__device__ void choose_size(Table& t, int rows, int lines, int span, int blocks) {
  const int x = threadIdx.x, lane = x & 31;
  int size = tried(x < SIZES ? x : 0);
  float time = x < SIZES ? estimate(t, rows, lines, span, blocks, size) : 1e30f;
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    const float other = __shfl_xor_sync(ALL_LANES, time, d);
    const int other_size = __shfl_xor_sync(ALL_LANES, size, d);
    if (other < time || (other == time && other_size > size)) { time = other; size = other_size; }
  }
  if (lane == 0) { t.best[x >> 5] = time; t.best_size[x >> 5] = size; }
  __syncthreads();
  if (x == 0) {
    for (int w = 1; w < THREADS / 32; w++)
      if (t.best[w] < time || (t.best[w] == time && t.best_size[w] > size)) { time = t.best[w]; size = t.best_size[w]; }
    t.size = size;
  }
  __syncthreads();
}

// Prefix sums with spans of `span` keys, by one warp; lane l has the rows l*each ... Returns whether everything fits.
__device__ bool lay_out(Table& t, int rows, int heads, int lines, int span, long long parts, int jobs) {
  const int lane = threadIdx.x & 31, each = (rows + 31) / 32, r0 = min(lane * each, rows), r1 = min(r0 + each, rows);
  const int own = 2 * ((heads + lines - 1) / lines);
  int full = 0, rest = 0, mine = 0;
  long long p = 0;
  for (int pass = 0; pass < 2; pass++) {
    if (pass) {
      int all_full, all_rest, all_mine;
      long long all_p;
      full = before(full, all_full);
      rest = before(rest, all_rest);
      mine = before(mine, all_mine);
      p = before(p, all_p);
      if (lane == 0) { t.full_at[rows] = all_full; t.rest_at[rows] = all_rest; t.own_at[rows] = all_mine; t.span = span; }
      if (all_p > parts || (long long)all_full + all_rest + all_mine > jobs) return false;
    }
    for (int r = r0; r < r1; r++) {
      const Cut& cut = t.cut[r];
      if (pass) { t.full_at[r] = full; t.rest_at[r] = rest; t.own_at[r] = mine; t.part[r] = p; }
      const int n = cut.runs(t.size, span);
      full += n * cut.full;
      rest += cut.rest ? n : 0;
      mine += t.count[r] * own;
      p += (long long)(span == WHOLE ? 2 : pieces_before(cut.top, span)) * cut.all;
    }
  }
  return true;
}

__device__ __forceinline__ int find(const int* at, int rows, int j) {   // the row with at[row] <= j < at[row + 1]
  int low = 0, high = rows;
  while (high - low > 1) { const int mid = (low + high) >> 1; if (at[mid] <= j) low = mid; else high = mid; }
  return low;
}

// Run x of the row's block of lines from `first`, counted from the last.
__device__ Job shared_job(const Table& t, const Cut& cut, int r, int x, int first, int live) {
  Job o{};
  o.kind = SHARED_KEYS; o.row = r; o.token = t.token[r]; o.first = first; o.live = live; o.length = t.length[r]; o.step = cut.all;
  const int parts = cut.parts(t.size, t.span);
  int keys = WHOLE, from = 0, to = cut.top;
  for (int i = parts - 1; i >= 0; i--) {
    const int n = cut.runs_of(i, parts, t.size, t.span, keys, from, to);
    if (x < n) { x = n - 1 - x; break; }
    x -= n;
  }
  o.begin = t.span == WHOLE ? 0 : round_up(from + x * keys, t.span);
  o.end = t.span == WHOLE ? cut.top : min(to, round_up(from + (x + 1) * keys, t.span));
  o.part = t.part[r] + (long long)pieces_before(o.begin, t.span) * cut.all + first;
  o.spare = t.span == WHOLE ? o.part + cut.all : o.part;
  return o;
}

// lengths, counts, starts: int32, or int64 read by its low word (step 2). lines: of a block. span: UNIT or GROUP; if partials or
// jobs of spans of GROUP do not fit, each block walks whole rows. blocks: how many work at once.
extern "C" __global__ void __launch_bounds__(THREADS) mla_plan(
    const int* lengths, int length_step, const int* counts, int count_step, const int* starts, int start_step, int rows,
    int heads, int lines, int span, int blocks, long long parts, int max_jobs, Job* jobs, Row* info, Head* head, Node* live) {
  __shared__ Table t;
  pdl_wait();
  pdl_go();
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    t.length[r] = lengths[r * length_step]; t.count[r] = counts[r * count_step]; t.token[r] = starts[r * start_step];
    t.cut[r].set(t.length[r], t.count[r], heads, lines, rows > MIXED);
  }
  __syncthreads();
  choose_size(t, rows, lines, span, blocks);
  if (threadIdx.x < 32 && !lay_out(t, rows, heads, lines, span, parts, max_jobs)) lay_out(t, rows, heads, lines, WHOLE, parts, max_jobs);
  __syncthreads();
  const int full = t.full_at[rows], rest = t.rest_at[rows], total = full + rest + t.own_at[rows];
  const int head_blocks = (heads + lines - 1) / lines;
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *head = Head{total, t.span, 0, 0, t.own_at[rows] / (2 * head_blocks), {}};
    for (int r = threadIdx.x; r < rows; r += THREADS)
      info[r] = Row{t.length[r], t.count[r], t.token[r], t.count[r] * heads, t.part[r], 0};
  }
  for (int j = blockIdx.x * THREADS + threadIdx.x; j < total; j += gridDim.x * THREADS) {   // what takes longest comes first
    if (j < full + rest) {
      const bool whole = j < full;
      const int r = whole ? find(t.full_at, rows, j) : find(t.rest_at, rows, j - full), x = whole ? j - t.full_at[r] : j - full - t.rest_at[r];
      const Cut& cut = t.cut[r];
      // Blocks that read the same keys follow each other.
      jobs[j] = whole ? shared_job(t, cut, r, x / cut.full, x % cut.full * lines, lines) : shared_job(t, cut, r, x, cut.full * lines, cut.rest);
    } else {
      const int r = find(t.own_at, rows, j - full - rest), x = j - full - rest - t.own_at[r], node = x / (2 * head_blocks), y = x % (2 * head_blocks);
      Job o{};
      o.kind = OWN_KEYS; o.row = r; o.token = t.token[r] + node; o.first = y % head_blocks * lines; o.live = min(lines, heads - o.first);
      o.begin = y / head_blocks;
      o.length = t.length[r];
      jobs[j] = o;
      if (y == 0) live[(j - full - rest) / (2 * head_blocks)] = Node{r, node};
    }
  }
}
