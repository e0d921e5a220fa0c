// Jobs of nodes_plan.cu as blocks of nodes.cu and heads.cu see them: what all roles know of one, and what must be found out first.
#pragma once

// A job as all roles see it.
struct __align__(16) Task {
  int tiles, shared, count, pages;        // tiles of keys; those before base(p); keys of the last one; tiles that are whole pages
  int begin, step;                        // its first tile, of the row; from a unit's partial to the next's
  bool whole;                             // all of the row's keys
  long long line, part, own;              // its first head's place in q and the result; its partials: first unit's, own keys'
};
static_assert(sizeof(Task) == 64, "its place");

// The block's job number `job`, once copies have told of it.
__device__ __forceinline__ Task task_of(int job) {
  mbarrier_wait(told(job), job / TASKS & 1);
  return shared_at<Task>(Place::tasks)[job % TASKS];
}

// Tile i is its unit's last. A node's own tiles are a unit each.
__device__ __forceinline__ bool ends(const Task& t, int i) {
  return i >= t.shared || unit_ends((t.begin + i) * TILE, i + 1 == t.shared);
}

// Slots of the keys base..p of a node, `count` of them, in two tiles, by the copying threads, of the fourth role. The row's first
// key, which every node has, stands in for those that the second tile lacks: their probabilities are 0.
__device__ __forceinline__ void own_slots(const Job& job, const Inputs& in, const int* table, int base, int count, int* slots) {
  const int v = threadIdx.x - 3 * ROLE;
  auto slot_of = [&](int position) { return table[position / TILE] * TILE + position % TILE; };
  if (v >= count || base + v < job.length) slots[v] = slot_of(v >= count ? 0 : base + v);
  if (v < in.words * 64) {                                   // ancestor v: at depth = set bits below it, stored at length + v
    const u64* mask = in.masks + (size_t)job.token * in.words;
    if (!(mask[v >> 6] >> (v & 63) & 1)) return;
    int depth = __popcll(mask[v >> 6] & ((1ull << (v & 63)) - 1));
    for (int w = 0; w < v >> 6; w++) depth += __popcll(mask[w]);
    const int x = job.length + depth - base;
    if (x >= 0) slots[x] = slot_of(job.length + v);
  }
}

// What a job's block must find out by itself, for plan.cu knows no masks.
struct Extent {
  int base, own;                                                // base(p), keys from there on
  int begin, shared, tiles, pages;                              // tiles: first; before base(p); all; that are whole pages
  __device__ __forceinline__ Extent(const Job& job, int depth) {
    const int p = job.length + depth;
    const bool mine = job.kind & WITH_OWN;
    base = base_of(p);
    own = p + 1 - base;
    begin = job.begin / TILE;
    shared = min(job.end, base) / TILE - begin;
    tiles = shared + (mine ? own > TILE ? 2 : 1 : 0);
    pages = shared + (mine && job.length - base >= TILE);
  }
  // Keys of the last tile.
  __device__ __forceinline__ int last() const { return tiles == shared ? TILE : own > TILE ? own - TILE : own; }
  __device__ __forceinline__ int page(int i) const { return i < shared ? begin + i : base / TILE; }
};

// What must be known of a job before its keys can be fetched. L1 is not asked: it may hold an older step's.
struct Known {
  Job job;
  int depth, page;                                              // page: the first one
  __device__ __forceinline__ Known(const Job& of, const Inputs& in) : job(of) {
    page = load_new(&in.table[(size_t)job.row * in.pages + job.begin / TILE]);
    depth = -1;
    for (int w = 0; w < in.words; w++) depth += __popcll(load_new(&in.masks[(size_t)job.token * in.words + w]));
  }
};
