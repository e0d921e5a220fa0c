// The work list of nodes.cu and heads.cu, from what is in device memory: lengths and node counts of the rows. One launch per step,
// for all layers. A job is some heads of a node, and all its keys or, of nodes that are cut, a run of whole units of them, whose
// partial results combine.cu folds. Nodes are cut where rows are long and few, or where they would be a last turn in which few
// blocks have work. Every block repeats the small searches and sums and writes its share of the list.
#include "layout.cuh"
#include "lists.cuh"

constexpr int MAX_ROWS = 256, THREADS = 1024, WARPS = THREADS / 32;
// What beginning a job, a launch that folds, and a line's partial cost, in tiles (one of heads.cu is 2 us).
constexpr float START = 2.f, FOLDING = 1.f, PARTIAL = 1.f / 2048;
constexpr int LEAST = 4;                  // tiles of a run

// Rows by place, longest first; the first nodes of them all are whole (places 0 ..), the others may be cut (places `rows` ..).
struct Table {
  int length[MAX_ROWS], count[MAX_ROWS], token[MAX_ROWS], top[MAX_ROWS];    // top: keys before those of any node's own
  int before[MAX_ROWS], row[MAX_ROWS];                                      // nodes before a row's; by place: its row
  int at[2 * MAX_ROWS + 1], live[2 * MAX_ROWS + 1];                         // by place: jobs before; nodes before that are folded
  long long part[2 * MAX_ROWS];                                             // first partial
  float best[WARPS];
  int best_tiles[WARPS], best_whole[WARPS];
};

__device__ __forceinline__ int tiles_of(int top) { return top / TILE + 2; }

// A row cut into runs of about `tiles` tiles: whole if it has no more. A node's own keys go with the last run, or alone.
struct Runs {
  int n, keys;
  bool alone;
  __device__ __forceinline__ Runs(int top, int tiles) : n(1), keys(WHOLE), alone(false) {
    if (tiles_of(top) <= tiles || top == 0) return;
    const int unit = size_at(top - 1, UNIT);
    keys = max(tiles * TILE + unit / 2 & -unit, unit);
    n = (top + keys - 1) / keys;
    while (n > 1 && round_up((n - 1) * keys, UNIT) >= top) n--;
    alone = tiles_of(top - begin(n - 1)) > max(tiles, keys / TILE);
    n += alone;
  }
  __device__ __forceinline__ bool whole() const { return keys == WHOLE; }
  __device__ __forceinline__ int begin(int x) const { return x == 0 ? 0 : round_up(x * keys, UNIT); }
  // Tiles of the longest one.
  __device__ __forceinline__ int longest(int top) const {
    const int last = n - 1 - alone;
    return max(tiles_of(top - begin(last)) - (alone ? 2 : 0), last > 0 ? keys / TILE : 0);
  }
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

// Of a row's nodes, those that are whole if the first `whole` nodes of all rows are.
__device__ __forceinline__ int whole_of(const Table& t, int r, int whole) { return min(max(whole - t.before[r], 0), t.count[r]); }

// What there is room for: blocks at once, partials, jobs.
struct Room { int blocks; long long parts; int jobs; };

// Estimated time of the step, in tiles, if all nodes but the first `whole` are cut into runs of `tiles` tiles; beyond all others if
// there is no room. By a warp. Jobs are taken in turns: of whole nodes, then of the others. per: jobs of a whole node.
__device__ __forceinline__ float time_of(const Table& t, int rows, int per, int lines, int whole, int tiles, const Room& room) {
  float jobs[2] = {}, work[2] = {}, longest[2] = {}, partials = 0.f, own = 0.f;
  for (int r = threadIdx.x & 31; r < rows; r += 32) {
#pragma unroll
    for (int cut = 0; cut < 2; cut++) {
      const int first = whole_of(t, r, whole), nodes = cut ? t.count[r] - first : first;
      if (nodes == 0) continue;
      const Runs runs(t.top[r], cut ? tiles : WHOLE);
      jobs[cut] += (float)(nodes * per * runs.n);
      work[cut] += (float)(nodes * per) * ((float)tiles_of(t.top[r]) + START * (float)runs.n);
      longest[cut] = fmaxf(longest[cut], START + (float)(runs.whole() ? tiles_of(t.top[r]) : runs.longest(t.top[r])));
      if (runs.whole()) continue;
      partials += (float)pieces_before(t.top[r], UNIT) * (float)(nodes * per * lines);
      own += 2.f * (float)(nodes * per * lines);
    }
  }
  float time = 0.f, all = 0.f;
#pragma unroll
  for (int cut = 0; cut < 2; cut++) {
    const float n = sum_of_lanes(jobs[cut]);
    time += fmaxf(most_of_lanes(longest[cut]), ceilf(n / (float)room.blocks) * sum_of_lanes(work[cut]) / fmaxf(n, 1.f));
    all += n;
  }
  partials = sum_of_lanes(partials), own = sum_of_lanes(own);
  if (partials > (float)room.parts || all > (float)room.jobs) return 1e30f;
  return time + (own > 0.f ? FOLDING + PARTIAL * (partials + own) : 0.f);
}

struct Choice { int whole, tiles; };                              // nodes that are not cut; tiles of a run of the others

// Warp k tries a k + 1-th of the longest row, for all nodes and for those of the last turn. All threads get the best.
__device__ __forceinline__ Choice choose(Table& t, int rows, int per, int lines, const Room& room) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float most = 0.f, nodes = 0.f;
  for (int r = lane; r < rows; r += 32) {
    if (t.count[r] > 0) most = fmaxf(most, (float)tiles_of(t.top[r]));
    nodes += (float)t.count[r];
  }
  most = most_of_lanes(most);
  const int turns = (int)sum_of_lanes(nodes) * per / room.blocks * room.blocks / per;   // nodes of full turns
  int mine = warp == 0 ? WHOLE : max(LEAST, ((int)most + warp) / (warp + 1)), first = 0;
  float time = time_of(t, rows, per, lines, 0, mine, room);
  if (turns > 0) {
    const float other = time_of(t, rows, per, lines, turns, mine, room);
    if (other < time) time = other, first = turns;
  }
  if (lane == 0) t.best[warp] = time, t.best_tiles[warp] = mine, t.best_whole[warp] = first;
  __syncthreads();
  int best = 0;
  for (int i = 1; i < WARPS; i++) if (t.best[i] < t.best[best]) best = i;
  return {t.best_whole[best], t.best_tiles[best]};
}

// Rows by length, longest first.
__device__ __forceinline__ void sort(Table& t, int rows) {
  const int r = threadIdx.x;
  if (r < rows) {
    int place = 0, nodes = 0;
    for (int i = 0; i < rows; i++)
      if (t.top[i] > t.top[r] || (t.top[i] == t.top[r] && i < r)) place++, nodes += t.count[i];
    t.before[r] = nodes;
    t.row[place] = r;
  }
  __syncthreads();
}

// The nodes at a place: of row r, from `first` on, and how they are cut.
struct Nodes {
  int r, first, count;
  Runs runs;
  __device__ __forceinline__ Nodes(const Table& t, int rows, int place, const Choice& as)
      : r(t.row[place < rows ? place : place - rows]), first(place < rows ? 0 : whole_of(t, r, as.whole)),
        count(place < rows ? whole_of(t, r, as.whole) : t.count[r] - first), runs(t.top[r], place < rows ? WHOLE : as.tiles) {}
};

// Where each place's jobs, nodes that are folded and partials are. By a warp, which has a run of places for each lane.
__device__ __forceinline__ void lay_out(Table& t, int rows, int per, int lines, const Choice& as) {
  if (threadIdx.x >= 32) return;
  const int each = (2 * rows + 31) / 32, from = min((int)threadIdx.x * each, 2 * rows), to = min(from + each, 2 * rows);
  int jobs = 0, live = 0;
  long long part = 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int p = from; p < to; p++) {
      const Nodes at(t, rows, p, as);
      if (pass) t.at[p] = jobs, t.live[p] = live, t.part[p] = part;
      jobs += at.count * per * at.runs.n;
      if (at.runs.whole()) continue;
      live += at.count;
      part += (long long)pieces_before(t.top[at.r], UNIT) * at.count * per * lines;
    }
    if (pass) break;
    int all_jobs, all_live;
    long long all_part;
    jobs = before(jobs, all_jobs), live = before(live, all_live), part = before(part, all_part);
    if (threadIdx.x == 0) t.at[2 * rows] = all_jobs, t.live[2 * rows] = all_live;
  }
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
  sort(t, rows);
  const int per = heads / lines;
  const Choice as = choose(t, rows, per, lines, {blocks, parts, max_jobs});
  lay_out(t, rows, per, lines, as);
  __syncthreads();
  const int places = 2 * rows, total = t.at[places], first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  if (first == 0) *head = Head{total, UNIT, 0, 0, t.live[places], {}};
  for (int j = first; j < total; j += step) {
    const int place = find(t.at, places, j), x = j - t.at[place];
    const Nodes at(t, rows, place, as);
    const Runs& runs = at.runs;
    const int all = at.count * per, run = x / all, line = (x - run * all) * lines;
    Job o{};
    o.row = at.r; o.token = t.token[at.r] + at.first + line / heads; o.first = line % heads; o.live = lines;
    o.length = t.length[at.r]; o.step = at.count * heads;
    const bool last = run + 1 == runs.n, only = last && runs.alone;
    o.kind = (last ? WITH_OWN : 0) | (runs.whole() ? WHOLE_ROW : 0);
    o.begin = only ? 0 : runs.begin(run);
    o.end = only ? 0 : run + 1 + runs.alone == runs.n ? WHOLE : runs.begin(run + 1);
    o.part = t.part[place] + (long long)pieces_before(o.begin, UNIT) * o.step + line;
    jobs[j] = o;
  }
  for (int n = first; n < t.live[places]; n += step) {
    const int place = find(t.live, places, n), node = n - t.live[place];
    const Nodes at(t, rows, place, as);
    const long long part = t.part[place] + (long long)node * heads;
    live[n] = Node{t.length[at.r], t.token[at.r] + at.first + node, at.count * heads, at.r, part, 0};
  }
}
