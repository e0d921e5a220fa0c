// The work list of nodes.cu, from what is in device memory: lengths and node counts of the rows. One launch per step, for all layers.
// A job is some heads of a node, and all its keys or, where rows are long and few, a run of whole units of them, whose partial
// results combine.cu folds. Every block repeats the small searches and sums and writes its share of the list.
#include "layout.cuh"

constexpr int MAX_ROWS = 256, THREADS = 1024, WARPS = THREADS / 32;
constexpr int START = 3, FOLDING = 3;     // what beginning a job, and a launch that folds, cost, in tiles
constexpr int LEAST = 4;                  // tiles of a run

struct Table {
  int length[MAX_ROWS], count[MAX_ROWS], token[MAX_ROWS], top[MAX_ROWS];    // top: keys before those of any node's own
  int jobs[MAX_ROWS], cut[MAX_ROWS];                                        // of a row: jobs; nodes that are folded
  long long partials[MAX_ROWS];
  int row[MAX_ROWS], at[MAX_ROWS + 1], live[MAX_ROWS + 1];                  // by place, longest first: jobs and nodes before
  long long part[MAX_ROWS];                                                 // first partial
  float best[WARPS];
  int best_tiles[WARPS];
};

__device__ __forceinline__ int tiles_of(int top) { return top / TILE + 2; }

// A row cut into runs of about `tiles` tiles: whole if it has no more. A node's own keys go with the last run, or alone.
struct Runs {
  int n, keys;
  bool alone;
  __device__ __forceinline__ Runs(int top, int tiles) : n(1), keys(WHOLE), alone(false) {
    if (tiles_of(top) <= tiles || top == 0) return;
    keys = max(tiles * TILE, size_at(top - 1, UNIT));
    n = (top + keys - 1) / keys;
    while (n > 1 && round_up((n - 1) * keys, UNIT) >= top) n--;
    alone = tiles_of(top - begin(n - 1)) > max(tiles, keys / TILE);
    n += alone;
  }
  __device__ __forceinline__ bool whole() const { return keys == WHOLE; }
  __device__ __forceinline__ int begin(int x) const { return x == 0 ? 0 : round_up(x * keys, UNIT); }
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) x += __shfl_xor_sync(ALL_LANES, x, d);
  return x;
}
__device__ __forceinline__ float most_of_lanes(float x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
  return x;
}

// Estimated time of the step with runs of `tiles` tiles, in tiles; beyond all others if there is no room. By a warp.
__device__ __forceinline__ float time_of(const Table& t, int rows, int heads, int lines, int tiles, int blocks, long long parts,
                                         int max_jobs) {
  float jobs = 0.f, work = 0.f, longest = 0.f, partials = 0.f;
  for (int r = threadIdx.x & 31; r < rows; r += 32) {
    if (t.count[r] == 0) continue;
    const Runs runs(t.top[r], tiles);
    const float all = (float)(t.count[r] * (heads / lines));
    jobs += all * runs.n;
    work += all * (tiles_of(t.top[r]) + START * runs.n);
    longest = fmaxf(longest, (float)(min(tiles_of(t.top[r]), runs.whole() ? WHOLE : runs.keys / TILE) + START));
    if (!runs.whole()) partials += (float)pieces_before(t.top[r], UNIT) * (float)(t.count[r] * heads);
  }
  jobs = sum_of_lanes(jobs), work = sum_of_lanes(work), partials = sum_of_lanes(partials), longest = most_of_lanes(longest);
  if (partials > (float)parts || jobs > (float)max_jobs) return 1e30f;
  return fmaxf(longest, ceilf(jobs / (float)blocks) * work / fmaxf(jobs, 1.f)) + (partials > 0.f ? FOLDING : 0);
}

// Warp k tries a k + 1-th of the longest row. All threads get the best.
__device__ __forceinline__ int choose_tiles(Table& t, int rows, int heads, int lines, int blocks, long long parts, int max_jobs) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float most = 0.f;
  for (int r = lane; r < rows; r += 32) if (t.count[r] > 0) most = fmaxf(most, (float)tiles_of(t.top[r]));
  most = most_of_lanes(most);
  const int mine = warp == 0 ? WHOLE : max(LEAST, ((int)most + warp) / (warp + 1));
  const float time = time_of(t, rows, heads, lines, mine, blocks, parts, max_jobs);
  if (lane == 0) t.best[warp] = time, t.best_tiles[warp] = mine;
  __syncthreads();
  float best = t.best[0];
  int tiles = t.best_tiles[0];
  for (int i = 1; i < WARPS; i++) if (t.best[i] < best) best = t.best[i], tiles = t.best_tiles[i];
  return tiles;
}

// Where each row's jobs, nodes that are folded and partials are. Rows that are cut are longer than those that are not.
__device__ __forceinline__ void lay_out(Table& t, int rows, int heads, int lines, int tiles) {
  const int r = threadIdx.x;
  if (r < rows) {
    const Runs runs(t.top[r], tiles);
    t.jobs[r] = t.count[r] * (heads / lines) * runs.n;
    t.cut[r] = runs.whole() ? 0 : t.count[r];
    t.partials[r] = (long long)pieces_before(t.top[r], UNIT) * t.cut[r] * heads;
  }
  __syncthreads();
  if (r < rows) {
    int place = 0, jobs = 0, nodes = 0;
    long long partials = 0;
    for (int i = 0; i < rows; i++)
      if (t.top[i] > t.top[r] || (t.top[i] == t.top[r] && i < r))
        place++, jobs += t.jobs[i], nodes += t.cut[i], partials += t.partials[i];
    t.row[place] = r;
    t.at[place] = jobs;
    t.live[place] = nodes;
    t.part[place] = partials;
    if (place + 1 == rows) t.at[rows] = jobs + t.jobs[r], t.live[rows] = nodes + t.cut[r];
  }
  __syncthreads();
}

__device__ __forceinline__ int find(const int* at, int rows, int j) {   // the place with at[place] <= j < at[place + 1]
  int low = 0, high = rows;
  while (high - low > 1) { const int mid = (low + high) >> 1; if (at[mid] <= j) low = mid; else high = mid; }
  return low;
}

// lengths, counts, starts: int32, or int64 read by its low word (step 2). lines: heads of a job, which divides `heads`. blocks: how
// many work at once. parts, max_jobs: room.
extern "C" __global__ void __launch_bounds__(THREADS) mla_plan_nodes(
    const int* lengths, int length_step, const int* counts, int count_step, const int* starts, int start_step, int rows, int heads,
    int lines, int blocks, long long parts, int max_jobs, Job* jobs, Head* head, Node* live) {
  __shared__ Table t;
  pdl_wait();                                                  // nobody starts before the end: lists are read ahead of a wait
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    t.length[r] = lengths[r * length_step]; t.count[r] = counts[r * count_step]; t.token[r] = starts[r * start_step];
    t.top[r] = t.count[r] == 0 ? 0 : base_of(t.length[r] + t.count[r] - 1);
  }
  __syncthreads();
  const int tiles = choose_tiles(t, rows, heads, lines, blocks, parts, max_jobs), per = heads / lines;
  lay_out(t, rows, heads, lines, tiles);
  const int total = t.at[rows], first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  if (first == 0) *head = Head{total, UNIT, 0, 0, t.live[rows], {}};
  for (int j = first; j < total; j += step) {
    const int place = find(t.at, rows, j), r = t.row[place], x = j - t.at[place];
    const int all = t.count[r] * per, run = x / all, line = (x - run * all) * lines;
    const Runs runs(t.top[r], tiles);
    Job o{};
    o.row = r; o.token = t.token[r] + line / heads; o.first = line % heads; o.live = lines;
    o.length = t.length[r]; o.step = t.count[r] * heads;
    const bool last = run + 1 == runs.n, only = last && runs.alone;
    o.kind = (last ? WITH_OWN : 0) | (runs.whole() ? WHOLE_ROW : 0);
    o.begin = only ? 0 : runs.begin(run);
    o.end = only ? 0 : run + 1 + runs.alone == runs.n ? WHOLE : runs.begin(run + 1);
    o.part = t.part[place] + (long long)pieces_before(o.begin, UNIT) * o.step + line;
    jobs[j] = o;
  }
  for (int n = first; n < t.live[rows]; n += step) {
    const int place = find(t.live, rows, n), r = t.row[place], node = n - t.live[place];
    live[n] = Node{t.length[r], t.token[r] + node, t.count[r] * heads, r, t.part[place] + (long long)node * heads, 0};
  }
}
