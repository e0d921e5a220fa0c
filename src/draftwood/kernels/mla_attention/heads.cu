// Attention of one layer on Hopper for many nodes of 64 heads: a job is all heads of one node and all its keys, as in nodes.cu,
// whose plan and fold these are. Lines (heads) are rows: scores are lines x keys, results lines x values: 64 lines fill a product.
//
// A cluster of two blocks has a job; either has half of the 512 columns of values, and they form scores of tiles in turn: each has
// two tiles' time for one. Maxima go to and fro (a tile's are moved from those of the tile before), probabilities to the other.
// Four roles of four warps: scores; values of 128 columns; of 128 more; copies. They go from job to job without meeting: a role
// waits only for what it takes.
//
// Of a tile that it forms scores of a block has nine pieces of 64 keys x 128 bytes: eight of values, one rotary; of the tile after
// that, which is the other block's, the four of its own columns, in place of those that scores were done with: two such turns, and
// no more, for queries take nine pieces. So each block fetches 13 pieces of two tiles, by itself: half as much again, of L2.
// Whole pages come by the copy engine; tiles of a node's own keys are copied by threads. Pieces are announced three at a time
// (`full`, for either way), those of the other's tile all at once (`full_values`). They are given back by score warps
// (`scored`: the places for the other's tile) and by value warps (`empty_own`, `empty_values`).
// Probabilities take the place of their tile's rotary piece (`ready`); those of the other block's tiles have one place (`arrived`),
// and the other block is told when it is free (`room`). Maxima of two of the other's tiles in turn: `moved`. Queries are those of
// one job (`asked`, `answered`). Copies tell the others of the next job (`told`): of six, for a job has a tile at least, and copies
// begin one when all tiles but the last four are done with.
#include "layout.cuh"
#include "warpgroup.cuh"

static_assert(LATENT == 512 && ROPE == 64, "no such shape");
#ifndef TOGETHER
#define TOGETHER 2
#endif
static_assert(TOGETHER == 2, "two blocks have a job");
constexpr int ROLE = 128, THREADS = 4 * ROLE;
constexpr int LINES_OF_JOB = 64, ASKERS = 2;             // copying warps that ask for pages: of tiles for scores, of the others
constexpr int PIECES = 9, PIECE = TILE * 128, TURNS = 2, PARTS = 3, PER_PART = PIECES / PARTS, HALF = 4;
constexpr int TASKS = 6, FULL = 2 * TURNS * PARTS;       // of barriers
constexpr int SCORES = 1, COPIES = 2;                    // barriers of the block
constexpr int SCORE_REGISTERS = 72, VALUE_REGISTERS = 200, COPY_REGISTERS = 40;
static_assert(ROLE * (SCORE_REGISTERS + 2 * VALUE_REGISTERS + COPY_REGISTERS) <= 65536, "more registers than a multiprocessor has");
#include "engine.cuh"

struct Place {                                           // in shared memory, bytes; sizes.py has the same sum
  static constexpr int q = TURNS * PIECES * PIECE;
  static constexpr int other = q + PIECES * PIECE;       // probabilities of the other block's tile
  static constexpr int rescale = other + PIECE;          // of lines, by what values so far are multiplied: two turns, the other's
  static constexpr int maxima = rescale + 3 * LINES_OF_JOB * 4;  // of lines, of a unit so far: this block's tiles in turn, others
  static constexpr int slots = maxima + 4 * LINES_OF_JOB * 4;    // of a node's own keys
  static constexpr int tasks = slots + 2 * TILE * 4;
  static constexpr int barriers = tasks + TASKS * 64;
  static constexpr int end = barriers + (FULL + 2 * TURNS + 5 * TURNS + TURNS + 2 + TURNS + 2 + TASKS) * 8;
};
#ifdef SHARED_BYTES
static_assert(Place::end == SHARED_BYTES, "the launcher computes another size of shared memory");
#endif

template <class T> __device__ __forceinline__ T* shared_at(int offset) { return reinterpret_cast<T*>(raw + offset); }
__device__ __forceinline__ u32 barrier(int i) { return shared_address(raw) + Place::barriers + i * 8; }
// Of pages, which the copy engine announces, and of other tiles, which copying threads do.
constexpr int FULL_VALUES = FULL, EMPTY_OWN = FULL_VALUES + 2 * TURNS, EMPTY_VALUES = EMPTY_OWN + 2 * TURNS;
constexpr int SCORED = EMPTY_VALUES + 2 * TURNS, READY = SCORED + TURNS, ARRIVED = READY + TURNS, ROOM = ARRIVED + 1;
constexpr int MOVED = ROOM + 1, ASKED = MOVED + TURNS, ANSWERED = ASKED + 1, TOLD = ANSWERED + 1;
__device__ __forceinline__ u32 full(bool page, int turn, int part) { return barrier(((page ? TURNS : 0) + turn) * PARTS + part); }
__device__ __forceinline__ u32 full_values(bool page, int turn) { return barrier(FULL_VALUES + (page ? TURNS : 0) + turn); }
__device__ __forceinline__ u32 empty_own(int turn, int role) { return barrier(EMPTY_OWN + turn * 2 + role); }
__device__ __forceinline__ u32 empty_values(int turn, int role) { return barrier(EMPTY_VALUES + turn * 2 + role); }
__device__ __forceinline__ u32 scored(int turn) { return barrier(SCORED + turn); }
__device__ __forceinline__ u32 ready(int turn) { return barrier(READY + turn); }
__device__ __forceinline__ u32 arrived() { return barrier(ARRIVED); }
__device__ __forceinline__ u32 room() { return barrier(ROOM); }
__device__ __forceinline__ u32 moved(int turn) { return barrier(MOVED + turn); }
__device__ __forceinline__ u32 asked() { return barrier(ASKED); }
__device__ __forceinline__ u32 answered() { return barrier(ANSWERED); }
__device__ __forceinline__ u32 told(int job) { return barrier(TOLD + job % TASKS); }
// Who arrives at barrier i: threads, or warps.
__device__ __forceinline__ int arrivals(int i) {
  if (i < FULL) return i < FULL / 2 ? ROLE : page_arrivals(PER_PART);
  if (i < EMPTY_OWN) return i < FULL_VALUES + TURNS ? ROLE : page_arrivals(HALF);
  if (i == ROOM) return 8;
  if (i == ASKED) return ROLE - ASKERS * 32;
  if (i == ARRIVED) return 4 * sent_arrivals(1);
  if (i >= MOVED && i < ASKED) return 4 * sent_arrivals(0);
  return i >= TOLD ? 1 : 4;
}

// A thread of warps 0 to 3 of a role: a lane has lines `line` and `line` + 8 of products. rank: of the block in its cluster.
struct Lane {
  int role, warp, lane, line, q, rank;
  u32 apart;                                             // from a place of this block to the other's
  __device__ __forceinline__ u32 beyond(u32 at) const { return at + apart; }
};
__device__ __forceinline__ Lane here() {
  // Through shuffles: in registers, not read again wherever they are used; and the warp is seen to be one for all lanes.
  const int t = __shfl_sync(ALL_LANES, (int)threadIdx.x, threadIdx.x & 31), warp = __shfl_sync(ALL_LANES, t >> 5, 0);
  const int rank = __shfl_sync(ALL_LANES, block_of_cluster(), 0);
  const u32 apart = __shfl_sync(ALL_LANES, beyond(shared_address(raw), rank ^ 1) - shared_address(raw), 0);
  return {warp / 4 - 1, warp & 3, t & 31, (warp & 3) * 16 + (t >> 2 & 7), t & 3, rank, apart};
}

__device__ __forceinline__ u32 piece_at(int turn, int c) { return shared_address(raw) + (turn * PIECES + c) * PIECE; }
// The places of the block's n-th tile, as copies.cuh wants them. Either it forms scores of it, as its k-th one; or it is the tile
// after that (the first of block 1 is a tile after none).
struct Slots {
  int rank, k, turn;
  bool mine;
  __device__ __forceinline__ Slots(int n, int of_block)
      : rank(of_block), k((n - rank) >> 1), turn(k & 1), mine(((n - rank) & 1) == 0) {}
  // Of tiles that are pages, after `past` ones: warp 0 asks for those of which scores are formed, warp 1 for the others.
  __device__ __forceinline__ static int first_page(int warp, int past, int rank) { return ((past ^ rank) & 1) ^ warp; }
  __device__ __forceinline__ bool takes(int c) const { return mine || c / HALF == rank; }
  __device__ __forceinline__ u32 at(int c) const { return piece_at(turn, mine ? c : c ^ HALF); }
  __device__ __forceinline__ void wait(int c) const {
    if (!mine) {
      if (c % HALF == 0) mbarrier_wait(scored(turn), k >> 1 & 1);
    } else if (c % 2 == 0 && c < PIECES - 1) {           // and then both value roles have given back
      const bool own = c / HALF == rank;
      mbarrier_wait((own ? empty_own(turn, 0) : empty_values(turn, 0)) + c % HALF / 2 * 8, ((k + (own ? 0 : rank)) >> 1 & 1) ^ 1);
    }
  }
  // Pieces that are announced together: which barrier is told of piece c; whether it is the first or last of them; their number.
  __device__ __forceinline__ u32 tell(bool page, int c) const {
    return mine ? full(page, turn, c / PER_PART) : full_values(page, turn);
  }
  __device__ __forceinline__ bool ends(int c) const { return mine ? c % PER_PART == PER_PART - 1 : c % HALF == HALF - 1; }
  // Ask for a page from row `row` of the cache on: one lane. (A wait for a phase before the first returns at once.)
  __device__ __forceinline__ void ask(const void* map, int row) const {
    if (!mine) {
      const u32 to = piece_at(turn, (1 - rank) * HALF), announce = full_values(true, turn);
      mbarrier_wait(scored(turn), k >> 1 & 1);
      mbarrier_expect(announce, HALF * PIECE);
#pragma unroll
      for (int c = 0; c < HALF; c++)
        box(to + c * PIECE, map, (rank * HALF + c) * 64, row, announce);
      return;
    }
    const u32 to = piece_at(turn, 0), announce = full(true, turn, 0);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      wait(c);
      if (c % PER_PART == 0) mbarrier_expect(announce + c / PER_PART * 8, PER_PART * PIECE);
      box(to + c * PIECE, map, c * 64, row, announce + c / PER_PART * 8);
    }
  }

  // Of value warps: the first of their two pieces in half `role` of the block's columns; probabilities; what goes with them.
  __device__ __forceinline__ u32 values(int role) const { return piece_at(turn, (mine ? rank : 1 - rank) * HALF + role * 2); }
  __device__ __forceinline__ u32 weights() const { return mine ? piece_at(turn, PIECES - 1) : shared_address(raw) + Place::other; }
  __device__ __forceinline__ const float* rescale() const {
    return shared_at<float>(Place::rescale) + (mine ? turn : TURNS) * LINES_OF_JOB;
  }
};
// Maxima after tile n, of this block's tiles or of the other's.
__device__ __forceinline__ int maxima_place(int n, bool mine) {
  return Place::maxima + ((mine ? 0 : 2) + (n >> 1 & 1)) * LINES_OF_JOB * 4;
}
__device__ __forceinline__ void wait_for_maxima(int n) { mbarrier_wait(moved(n >> 1 & 1), n >> 2 & 1); }

#include "jobs.cuh"

// Where tile x of a job, whose unit began with tile `unit`, stands in the fold.
struct Stand {
  bool complete, begins_group, ends_group;               // its unit is; and is its group's first, its group's last
  __device__ __forceinline__ Stand(const Task& t, int x, int unit) : complete(ends(t, x)) {
    const bool own = x >= t.shared;
    const int size = own ? TILE : size_at(unit * TILE, GROUP);
    begins_group = own ? x == t.shared : (unit * TILE & (size - 1)) == 0;
    ends_group = complete && (x + 1 == (own ? t.tiles : t.shared) || (!own && ((x + 1) * TILE & (size - 1)) == 0));
  }
};

// ------------------------------------------------------------------------------------------------- scores
// Scores of a tile in a turn: a lane has lines 16w + g and 16w + g + 8, keys 8j + 2q and 8j + 2q + 1: s[4j + 2h + c].
// phases: a bit for each kind of tile and turn.
__device__ __forceinline__ void form_scores(float (&s)[32], int turn, bool page, u32& phases) {
  const int kind = (page ? TURNS : 0) + turn;
  const u64 queries = operand(shared_address(raw) + Place::q), keys = operand(piece_at(turn, 0));
#pragma unroll
  for (int x = 0; x < 32; x++) s[x] = 0.f;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    mbarrier_wait(full(page, turn, part), phases >> kind & 1);
    if (!page) show_to_products();                       // the copy engine's writes need none
    products_begin();
#pragma unroll
    for (int x = 0; x < PER_PART * 4; x++) {
      const int at = (part * PER_PART + x / 4) * PIECE + x % 4 * 32;
      product_turned<false>(s, further(queries, at), further(keys, at), part + x > 0);
    }
    products_commit();
  }
  phases ^= 1u << kind;
  products_wait<0>();
  settle(s);
}

// Weigh tile n, the block's k-th one: from maxima of the tile before, unless a unit begins, new ones; probabilities. To the value
// warps of both blocks.
__device__ __forceinline__ void weigh(const Lane& i, const float (&s)[32], float scale, const Slots& slots, int n, bool begins) {
  const int warp = i.warp, L = i.lane, line = i.line;
  float m[2], most[2] = {minus_infinity(), minus_infinity()}, safe[2], rescale[2];
#pragma unroll
  for (int x = 0; x < 32; x++) most[x >> 1 & 1] = fmaxf(most[x >> 1 & 1], s[x]);
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int d = 1; d < 4; d <<= 1) most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], d));
  const u32 rounded = pack_bf16(most[0], most[1]);
  if (n > 0) wait_for_maxima(n - 1);
  const float* before = shared_at<float>(maxima_place(n - 1, false)) + line;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float highest = __int_as_float((int)(h ? rounded & 0xffff0000u : rounded << 16));
    m[h] = begins ? minus_infinity() : before[h * 8];
    safe[h] = move_maximum(m[h], __fmul_rn(highest, scale), rescale[h]);
  }
  if ((L & 3) == 0) {
    const int place = maxima_place(n, true);
    float* to = shared_at<float>(place) + line;
    to[0] = m[0], to[8] = m[1];
    const u32 there = i.beyond(shared_address(raw) + maxima_place(n, false) + line * 4), tell = i.beyond(moved(n >> 1 & 1));
    store_beyond(there, m[0], tell), store_beyond(there + 32, m[1], tell);
    float* factors = shared_at<float>(Place::rescale) + slots.turn * LINES_OF_JOB + line;
    factors[0] = rescale[0], factors[8] = rescale[1];
  }
  if (L == 0) expect_beyond(i.beyond(moved(n >> 1 & 1)), 64);
  bar_sync<SCORES, ROLE>();                              // no warp's products read the rotary piece any more
  // stmatrix: lanes 0..7 and 8..15 name this warp's first and second 8 lines of a step's first 8 keys, 16..31 of the others.
  const u32 from = slots.weights() + warp * 2 * UNIT_ROWS, to = from + (L & 15) * 128;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 p[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {                        // h = e & 1, 8 keys = e >> 1
      const float* v = &s[(2 * k + (e >> 1)) * 4 + (e & 1) * 2];
      p[e] = pack_bf16(ex2(__fmaf_rn(v[0], scale, -safe[e & 1])), ex2(__fmaf_rn(v[1], scale, -safe[e & 1])));
    }
    stmatrix4(to + (((k * 2 + (L >> 4)) ^ (L & 7)) << 4), p[0], p[1], p[2], p[3]);
  }
  show_to_products();
  __syncwarp();
  if (L == 0) mbarrier_arrive(ready(slots.turn));
  if (slots.k > 0) mbarrier_wait(room(), (slots.k - 1) & 1);
  __syncwarp();
  const u32 tell = i.beyond(arrived());
  if (L == 0) {
    expect_beyond(tell, 2 * UNIT_ROWS + 64);
    copy_beyond(i.beyond(shared_address(raw) + Place::other + warp * 2 * UNIT_ROWS), from, 2 * UNIT_ROWS, tell);
  }
  if ((L & 3) == 0) {
    const u32 there = i.beyond(shared_address(raw) + Place::rescale + (2 * LINES_OF_JOB + line) * 4);
    store_beyond(there, rescale[0], tell), store_beyond(there + 32, rescale[1], tell);
  }
}

__device__ __forceinline__ void score_role(int jobs, float scale) {
  const Lane i = here();
  float s[32];
  u32 phases = 0;
  int last = -1;
  for (int job = 0, n = 0; job < jobs; job++) {
    const Task task = task_of(job);
    const int first = (n ^ i.rank) & 1;
    mbarrier_wait(asked(), job & 1);
    __syncwarp();                                        // nobody still waits for what the next queries bring on
    if (i.lane == 0 && first >= task.tiles) mbarrier_arrive(answered());
    for (int x = first; x < task.tiles; x += 2) {
      const Slots slots(n + x, i.rank);
      form_scores(s, slots.turn, x < task.pages, phases);
      __syncwarp();
      if (i.lane == 0) {
        mbarrier_arrive(scored(slots.turn));
        if (x + 2 >= task.tiles) mbarrier_arrive(answered());
      }
      if (x + 1 == task.tiles && task.count < TILE)
#pragma unroll
        for (int e = 0; e < 32; e++)
          if (e / 4 * 8 + i.q * 2 + (e & 1) >= task.count) s[e] = minus_infinity();
      weigh(i, s, scale, slots, n + x, x == 0 || ends(task, x - 1));
      last = slots.k;
    }
    n += task.tiles;
  }
  // Nobody leaves before what it has sent is there and used, nor before all that is sent to it has come: each role waits for that.
  if (last >= 0) mbarrier_wait(room(), last & 1);
}

#include "heads_values.cuh"
#include "copies.cuh"

// Jobs of a cluster: one of each round, in the order of nodes_plan.cu. spare: floats [blocks, 64, 256].
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) mla_attend(
    BOXES_OF(const bf16*) map, const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages,
    const u64* masks, int words, int heads, float scale, const Job* jobs, const Head* head, float* spare, float* o, float2* ml,
    float* own_o, float2* own_ml, bf16* out) {
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  const int role = threadIdx.x / ROLE, team = blockIdx.x / TOGETHER, teams = gridDim.x / TOGETHER;
  if (threadIdx.x < (Place::end - Place::barriers) / 8) mbarrier_begin(barrier(threadIdx.x), arrivals(threadIdx.x));
  // The plan, masks and pages are older than what may still run (rule (b) of common.cuh; the plan lets nobody start early).
  // There is room for more jobs than clusters, so one may be read that is none.
  const int all = load_new(&head->jobs);
  Job first{};
  if (role == 3) first = load_all_new(&jobs[team]);
  cluster_begun<THREADS>();
  const int mine = max(0, (all - team + teams - 1) / teams);
  if (role == 3) {
    give_registers<COPY_REGISTERS>();
    copy_role(jobs, first, team, teams, mine, in, &map);
    return;
  }
  pdl_wait();
  pdl_go();
  if (role == 0) {
    give_registers<SCORE_REGISTERS>();
    score_role(mine, scale);
  } else {
    take_registers<VALUE_REGISTERS>();
    value_role(mine, heads, spare, {o, ml}, {own_o, own_ml}, out);
  }
}
