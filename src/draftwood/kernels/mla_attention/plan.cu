// The work list of a step, from what is in device memory: lengths and node counts of the rows. One launch per step, all
// layers use it. Every block repeats the small searches and sums and writes its share of the list.
#include "layout.cuh"
#include "lists.cuh"

constexpr int MAX_ROWS = 256;
constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int START = 160;                // what beginning a job costs, in keys
constexpr int MIXED = 8;                  // rows with which runs of several sizes are tried: more rows are jobs enough
constexpr int PARTS = 4;                  // of a row, between which spans grow

// What a tile of keys costs a block with so many lines: with few, the keys are most of the work.
__device__ __forceinline__ int cost(int lines) {
  if (COLUMNS) return lines <= 8 ? 12 : 16;
  return lines <= 16 ? 6 : lines <= 32 ? 9 : 16;
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
    rest = all - full * lines;
  }
  __device__ __forceinline__ int parts(int size, int span) const {
    return one || span == WHOLE || top == 0 || size >= size_at(top - 1, span) ? 1 : 1 + (top > GROW1) + (top > GROW2) + (top > GROW3);
  }
  __device__ __forceinline__ static int border(int part) { return part == 0 ? 0 : part == 1 ? GROW1 : part == 2 ? GROW2 : GROW3; }
  // Part i of so many: where it begins and ends, and the keys of a run.
  __device__ __forceinline__ int keys_of(int i, int parts, int size, int span, int& from, int& to) const {
    from = border(i);
    to = i + 1 >= parts ? top : border(i + 1);
    return span == WHOLE ? WHOLE : max(size, size_at(to > 0 ? to - 1 : 0, span));
  }
  // Its runs; none of a part that there is not.
  __device__ __forceinline__ int runs_of(int i, int parts, int size, int span, int& keys, int& from, int& to) const {
    keys = keys_of(i, parts, size, span, from, to);
    if (i >= parts || from >= to) return 0;
    if (span == WHOLE) return 1;
    int n = (to - from + keys - 1) / keys;
    while (n > 1 && round_up(from + (n - 1) * keys, span) >= to) n--;
    return n;
  }
};

struct Table {
  int length[MAX_ROWS], count[MAX_ROWS], token[MAX_ROWS];
  int full_at[MAX_ROWS + 1], rest_at[MAX_ROWS + 1], own_at[MAX_ROWS + 1];   // first job of each row, by kind
  int runs[MAX_ROWS][PARTS];
  long long part[MAX_ROWS];
  Cut cut[MAX_ROWS];
  float best[WARPS];
  int best_size[WARPS];
  bool fits;
};

// ------------------------------------------------------------------------------------------------- sizes of runs
// Estimated time of the step, in keys times cost, if runs have `size` keys. Equal runs work in waves; where some are shorter, these
// fill what the longest leave.
struct Estimate {
  float jobs = 0.f, total = 0.f, longest = 0.f, shortest = 1e30f;   // jobs: if `fill`, of the longest
  bool fill;
  __device__ __forceinline__ void add(const Cut& cut, int i, int size, int span, int full_cost) {
    int keys, from, to;
    const int n = cut.runs_of(i, cut.parts(size, span), size, span, keys, from, to);
    if (n == 0) return;
    const int rest = cut.rest ? cost(cut.rest) : 0, least = size_at(to - 1, span), most = (min(keys, to - from) + least - 1) & -least;
    const float one = (float)(most + START) * (float)(cut.full ? full_cost : rest);
    total += (float)(to - from + n * START) * (float)(cut.full * full_cost + rest);
    if (fill && one > longest) jobs = 0.f;
    if (!fill || one >= longest) jobs += (float)n * ((float)cut.full + (rest ? cut.full ? (float)rest / (float)full_cost : 1.f : 0.f));
    longest = fmaxf(longest, one);
    shortest = fminf(shortest, one);
  }
  // What the lane `d` away has, too.
  __device__ __forceinline__ void join(int d) {
    const float other = __shfl_xor_sync(ALL_LANES, jobs, d), length = __shfl_xor_sync(ALL_LANES, longest, d);
    jobs = !fill || length == longest ? jobs + other : length > longest ? other : jobs;
    longest = fmaxf(longest, length);
    total += __shfl_xor_sync(ALL_LANES, total, d);
    shortest = fminf(shortest, __shfl_xor_sync(ALL_LANES, shortest, d));
  }
  __device__ __forceinline__ float time(int blocks) const {
    return fmaxf(total / (float)blocks + (fill && shortest < longest ? 0.5f * shortest : 0.f), ceilf(jobs / (float)blocks) * longest);
  }
};

__device__ __forceinline__ void take_better(float& time, int& size, float other, int other_size) {
  if (other < time || (other == time && other_size > size)) { time = other; size = other_size; }
}

// The size with the smallest estimate, the largest of equal ones; all threads of the block, each gets it. Few rows: 256 sizes, 16 of each
// doubling, a lane for each part of a row. Many: 64 sizes, 16 lanes share the rows, whose runs are all equal.
__device__ __forceinline__ int choose_size(Table& t, int rows, int lines, int span, int blocks) {
  const bool few = rows <= MIXED;
  const int x = threadIdx.x, lane = x & 31, each = few ? PARTS : 16, mine = x & (each - 1), full_cost = cost(lines);
  int size = __float2int_rn(64.f * ex2((float)(x / each) / (few ? 16.f : 4.f)));
  Estimate all;
  all.fill = few;
  for (int r = few ? 0 : mine; r < rows; r += few ? 1 : each) all.add(t.cut[r], few ? mine : 0, size, span, full_cost);
  for (int d = 1; d < each; d <<= 1) all.join(d);
  float time = all.time(blocks);
  for (int d = each; d < 32; d <<= 1) take_better(time, size, __shfl_xor_sync(ALL_LANES, time, d), __shfl_xor_sync(ALL_LANES, size, d));
  if (lane == 0) { t.best[x >> 5] = time; t.best_size[x >> 5] = size; }
  __syncthreads();
  time = t.best[lane];
  size = t.best_size[lane];
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) take_better(time, size, __shfl_xor_sync(ALL_LANES, time, d), __shfl_xor_sync(ALL_LANES, size, d));
  return size;
}
static_assert(WARPS == 32, "a warp looks at all warps' best sizes");

// ------------------------------------------------------------------------------------------------- where everything is
// Each row's jobs and partials with spans of `span` keys, then their sums over the rows before. All threads; `t.fits` tells.
__device__ __forceinline__ void lay_out(Table& t, int rows, int own, int size, int span, long long parts, int jobs) {
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    const Cut& cut = t.cut[r];
    const int all = cut.parts(size, span);
    int n = 0, keys, from, to;
#pragma unroll
    for (int i = 0; i < PARTS; i++) n += t.runs[r][i] = cut.runs_of(i, all, size, span, keys, from, to);
    t.full_at[r] = n * cut.full;
    t.rest_at[r] = cut.rest ? n : 0;
    t.own_at[r] = t.count[r] * own;
    t.part[r] = (long long)(span == WHOLE ? 2 : pieces_before(cut.top, span)) * cut.all;
  }
  __syncthreads();
  if (threadIdx.x < 32) {                                      // lane l has the rows l * each ..
    const int each = (rows + 31) / 32, r0 = min((int)threadIdx.x * each, rows), r1 = min(r0 + each, rows);
    int full = 0, rest = 0, mine = 0, all_full, all_rest, all_mine;
    long long p = 0, all_p;
    for (int r = r0; r < r1; r++) full += t.full_at[r], rest += t.rest_at[r], mine += t.own_at[r], p += t.part[r];
    full = before(full, all_full);
    rest = before(rest, all_rest);
    mine = before(mine, all_mine);
    p = before(p, all_p);
    for (int r = r0; r < r1; r++) {
      int next = full + t.full_at[r];
      t.full_at[r] = full, full = next;
      next = rest + t.rest_at[r];
      t.rest_at[r] = rest, rest = next;
      next = mine + t.own_at[r];
      t.own_at[r] = mine, mine = next;
      const long long next_p = p + t.part[r];
      t.part[r] = p, p = next_p;
    }
    if (threadIdx.x == 0) {
      t.full_at[rows] = all_full; t.rest_at[rows] = all_rest; t.own_at[rows] = all_mine;
      t.fits = all_p <= parts && (long long)all_full + all_rest + all_mine <= jobs;
    }
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------- jobs
// Run x of the row's block of lines from `first`, counted from the last.
__device__ __forceinline__ Job shared_job(const Table& t, int r, int x, int first, int live, int size, int span) {
  const Cut& cut = t.cut[r];
  Job o{};
  o.kind = SHARED_KEYS; o.row = r; o.token = t.token[r]; o.first = first; o.live = live; o.length = t.length[r]; o.step = cut.all;
  int i = PARTS - 1, from, to;
  while (i > 0 && x >= t.runs[r][i]) x -= t.runs[r][i--];
  x = t.runs[r][i] - 1 - x;
  const int keys = cut.keys_of(i, cut.parts(size, span), size, span, from, to);
  o.begin = span == WHOLE ? 0 : round_up(from + x * keys, span);
  o.end = span == WHOLE ? cut.top : min(to, round_up(from + (x + 1) * keys, span));
  o.part = t.part[r] + (long long)pieces_before(o.begin, span) * cut.all + first;
  o.spare = span == WHOLE ? o.part + cut.all : o.part;
  return o;
}

// Tile y / head_blocks of a node's own keys, for its y % head_blocks-th heads.
__device__ __forceinline__ Job own_job(const Table& t, int r, int node, int y, int head_blocks, int heads, int lines) {
  Job o{};
  o.kind = OWN_KEYS; o.row = r; o.token = t.token[r] + node; o.begin = y >= head_blocks; o.length = t.length[r];
  o.first = (y - o.begin * head_blocks) * lines;
  o.live = min(lines, heads - o.first);
  return o;
}

// lengths, counts, starts: int32, or int64 read by its low word (step 2). lines: of a block. span: UNIT or GROUP; if partials or
// jobs of spans of GROUP do not fit, each block walks whole rows. blocks: how many work at once.
extern "C" __global__ void __launch_bounds__(THREADS) mla_plan(
    const int* lengths, int length_step, const int* counts, int count_step, const int* starts, int start_step, int rows,
    int heads, int lines, int span, int blocks, long long parts, int max_jobs, Job* jobs, Head* head, Node* live) {
  __shared__ Table t;
  pdl_wait();                                                  // nobody starts before the end: lists are read ahead of a wait
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    t.length[r] = lengths[r * length_step]; t.count[r] = counts[r * count_step]; t.token[r] = starts[r * start_step];
    t.cut[r].set(t.length[r], t.count[r], heads, lines, rows > MIXED);
  }
  __syncthreads();
  const int size = choose_size(t, rows, lines, span, blocks), head_blocks = (heads + lines - 1) / lines, own = 2 * head_blocks;
  lay_out(t, rows, own, size, span, parts, max_jobs);
  if (!t.fits) {
    __syncthreads();                                           // all know it
    lay_out(t, rows, own, size, span = WHOLE, parts, max_jobs);
  }
  const int full = t.full_at[rows], shared = full + t.rest_at[rows], total = shared + t.own_at[rows];
  if (blockIdx.x == 0 && threadIdx.x == 0) *head = Head{total, span, 0, 0, t.own_at[rows] / own, {}};
  for (int j = blockIdx.x * THREADS + threadIdx.x; j < total; j += gridDim.x * THREADS) {   // what takes longest comes first
    if (j < full) {
      const int r = find(t.full_at, rows, j), x = j - t.full_at[r], run = x / t.cut[r].full;
      jobs[j] = shared_job(t, r, run, (x - run * t.cut[r].full) * lines, lines, size, span);   // blocks that read the same keys follow each other
    } else if (j < shared) {
      const int r = find(t.rest_at, rows, j - full);
      jobs[j] = shared_job(t, r, j - full - t.rest_at[r], t.cut[r].full * lines, t.cut[r].rest, size, span);
    } else {
      const int r = find(t.own_at, rows, j - shared), x = j - shared - t.own_at[r], node = x / own, y = x - node * own;
      jobs[j] = own_job(t, r, node, y, head_blocks, heads, lines);
      if (y == 0) live[t.own_at[r] / own + node] = Node{t.length[r], t.token[r] + node, t.cut[r].all, r, t.part[r] + (long long)node * heads, 0};
    }
  }
}
