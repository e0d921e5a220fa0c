// Attention of one layer on Hopper for many nodes: a job is some heads of one node and all its keys, so that its block folds all
// in the law's order (layout.cuh, COLUMNS) and writes the result: there are no partials to be read again. Rows that are few and
// long are cut into runs of units, whose partials combine.cu folds. Products are those of columns.cu.
//
// Lines (heads) are columns: scores are keys x lines, results values x lines. Four roles of four warps: scores; values of columns
// 0..255 of a latent; of the others; copies. They go from job to job without meeting: a role waits only for what it takes.
//
// A tile is nine pieces, 64 keys x 128 bytes: eight of values, one rotary, in a ring. Whole pages come by the copy engine; blocks
// of a cluster have heads of the same node, and each fetches its share of the pieces for all. Tiles of a node's own keys are copied
// by threads. Pieces are announced three at a time (`full`, of three tiles in turn, for either way) and given back one by one
// (`empty`). Probabilities, and what goes with them, are there for two tiles (`ready`, `taken`). Queries are those of one job
// (`asked`, `answered`). Copies tell the others of the next job (`told`): of four, because a job has at least nine pieces and the
// ring no 27.
//  EIGHTS  of lines of a job      TOGETHER  blocks of a cluster
#include "layout.cuh"
#include "warpgroup.cuh"

static_assert(LATENT == 512 && ROPE == 64, "no such shape");
#ifndef EIGHTS
#define EIGHTS 4
#endif
#ifndef TOGETHER
#define TOGETHER 1
#endif
constexpr int ROLE = 128, THREADS = 4 * ROLE;
constexpr int MOST = EIGHTS * 8;                        // lines of a job
constexpr int PIECES = 9, PIECE = TILE * 128, RING = EIGHTS > 2 ? 22 : 25, PARTS = 3, PER_PART = PIECES / PARTS;
constexpr int TILES = 3, TASKS = 4, FULL = 2 * TILES * PARTS;   // of barriers
constexpr int SCORES = 1, COPIES = 2, VALUES = 3;        // barriers of the block
constexpr int SCORE_REGISTERS = 72, VALUE_REGISTERS = 192, COPY_REGISTERS = 56;
static_assert(ROLE * (SCORE_REGISTERS + 2 * VALUE_REGISTERS + COPY_REGISTERS) <= 65536, "more registers than a multiprocessor has");
#include "engine.cuh"
#include "jobs.cuh"
static_assert(RING >= 2 * PIECES && RING < 3 * PIECES, "two tiles fit, and no more than three are begun");

struct Place {                                           // in shared memory, bytes; sizes.py has the same sum
  static constexpr int q = RING * PIECE;
  static constexpr int p = q + PIECES * MOST * 128;      // of two tiles in turn, as the next four
  static constexpr int rescale = p + 2 * MOST * 128;
  static constexpr int unit_m = rescale + 2 * MOST * 4;
  static constexpr int maxima = unit_m + 2 * MOST * 4;   // bf16: of each pair of lines, each score warp's
  static constexpr int moved = maxima + 2 * MOST * 8;    // whether any maximum moved: seldom, and values need not look at each
  static constexpr int inverse = moved + 16;             // 1 / l, of two jobs in turn
  static constexpr int slots = inverse + 2 * MOST * 4;   // of a node's own keys
  static constexpr int tasks = slots + 2 * TILE * 4;
  static constexpr int barriers = tasks + TASKS * 64;
  static constexpr int end = barriers + (FULL + RING + 2 + 2 + 2 + TASKS) * 8;
};
#ifdef SHARED_BYTES
static_assert(Place::end == SHARED_BYTES, "the launcher computes another size of shared memory");
#endif

template <class T> __device__ __forceinline__ T* shared_at(int offset) { return reinterpret_cast<T*>(raw + offset); }
__device__ __forceinline__ u32 barrier(int i) { return shared_address(raw) + Place::barriers + i * 8; }
// Of pages, which the copy engine announces, and of other tiles, which copying threads do.
__device__ __forceinline__ u32 full(bool page, int tile, int part) { return barrier(((page ? TILES : 0) + tile) * PARTS + part); }
__device__ __forceinline__ u32 empty(int slot) { return barrier(FULL + slot); }
__device__ __forceinline__ u32 ready(int turn) { return barrier(FULL + RING + turn); }
__device__ __forceinline__ u32 taken(int turn) { return barrier(FULL + RING + 2 + turn); }
__device__ __forceinline__ u32 asked() { return barrier(FULL + RING + 4); }
__device__ __forceinline__ u32 answered() { return barrier(FULL + RING + 5); }
__device__ __forceinline__ u32 told(int job) { return barrier(FULL + RING + 6 + job % TASKS); }
// Who arrives at barrier i: threads, or warps.
__device__ __forceinline__ int arrivals(int i) {
  if (i < TILES * PARTS || barrier(i) == asked()) return ROLE;
  if (i < FULL) return PAGE_ARRIVALS;
  if (i < FULL + RING) return 4 * TOGETHER;
  return barrier(i) == taken(0) || barrier(i) == taken(1) ? 8 : barrier(i) >= told(0) ? 1 : 4;
}

// The place of piece c of the block's n-th tile, and which use of it this is.
struct Slots {
  int first, use;
  __device__ __forceinline__ explicit Slots(int n) : first(n * PIECES % RING), use(n * PIECES / RING) {}
  __device__ __forceinline__ int slot(int c) const { return first + c < RING ? first + c : first + c - RING; }
  __device__ __forceinline__ int used(int c) const { return first + c < RING ? use : use + 1; }
  __device__ __forceinline__ u32 at(int c) const { return shared_address(raw) + slot(c) * PIECE; }
};
__device__ __forceinline__ u32 p_at(int turn) { return shared_address(raw) + Place::p + turn * MOST * 128; }

// The block's job number `job`, once copies have told of it.
__device__ __forceinline__ Task task_of(int job) {
  mbarrier_wait(told(job), job / TASKS & 1);
  return shared_at<Task>(Place::tasks)[job % TASKS];
}

// ------------------------------------------------------------------------------------------------- scores
constexpr float SLACK = 8.f;                           // a maximum moves when it is outgrown by a factor of 256: seldom

// The n-th tile's scores: a lane has keys 16w + g and 16w + g + 8 of a tile, lines 8j + 2q and 8j + 2q + 1: s[4j + 2h + c].
// phases: a bit for each barrier of a tile.
__device__ __forceinline__ void form_scores(float (&s)[EIGHTS * 4], int n, bool page, u32& phases) {
  const Slots slots(n);
  const int kind = (page ? TILES : 0) + n % TILES;
  const u64 queries = operand(shared_address(raw) + Place::q);
#pragma unroll
  for (int x = 0; x < EIGHTS * 4; x++) s[x] = 0.f;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    mbarrier_wait(full(page, n % TILES, part), phases >> kind & 1);
    show_to_products();
    products_begin();
#pragma unroll
    for (int x = 0; x < PER_PART * 4; x++) {
      const int c = part * PER_PART + x / 4, step = x % 4 * 32;
      product<EIGHTS, false>(s, further(operand(slots.at(c)), step), further(queries, c * MOST * 128 + step), part + x > 0);
    }
    products_commit();
  }
  phases ^= 1u << kind;
  products_wait<0>();
  settle(s);
}

// The tile's maxima, of this warp's keys.
__device__ __forceinline__ void find_maxima(const float (&s)[EIGHTS * 4], int n) {
  const int warp = threadIdx.x >> 5, L = threadIdx.x & 31, g = L >> 2, q = L & 3;
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    u32 most = pack_bf16(fmaxf(s[4 * j], s[4 * j + 2]), fmaxf(s[4 * j + 1], s[4 * j + 3]));
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) most = max_bf16_pair(most, __shfl_xor_sync(ALL_LANES, most, d));
    if (g == j) *shared_at<u32>(Place::maxima + (n & 1) * MOST * 8 + (j * 4 + q) * 16 + warp * 4) = most;
  }
}

// Probabilities and what value warps need of the n-th tile, which `ends` its unit, once its maxima are there.
__device__ __forceinline__ void weigh(const float (&s)[EIGHTS * 4], float (&m)[EIGHTS][2], float scale, int n, bool ends) {
  const int warp = threadIdx.x >> 5, L = threadIdx.x & 31, g = L >> 2, q = L & 3, turn = n & 1;
  const int maxima = Place::maxima + turn * MOST * 8;
  float rescale[EIGHTS][2];
  u32 p[EIGHTS][2];
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const uint4 all = shared_load16(shared_address(raw) + maxima + (j * 4 + q) * 16);
    const u32 most = max_bf16_pair(max_bf16_pair(all.x, all.y), max_bf16_pair(all.z, all.w));
    float safe[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float old = m[j][c];
      float now = fmaxf(old, __fmul_rn(__int_as_float((int)(c ? most & 0xffff0000u : most << 16)), scale));
      if (now <= __fadd_rn(old, SLACK)) now = old;
      safe[c] = now == minus_infinity() ? 0.f : now;
      rescale[j][c] = old == minus_infinity() ? 1.f : ex2(__fsub_rn(old, safe[c]));     // nothing yet: O is zero
      m[j][c] = now;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
      p[j][h] = pack_bf16(ex2(__fmaf_rn(s[4 * j + 2 * h], scale, -safe[0])), ex2(__fmaf_rn(s[4 * j + 2 * h + 1], scale, -safe[1])));
  }
  if (n >= 2) mbarrier_wait(taken(turn), (n / 2 - 1) & 1);
  // stmatrix: lanes 0..7 and 8..15 name the lines of eight j and this warp's first and second 8 keys, lanes 16..31 eight j + 1's.
  const u32 to = p_at(turn) + (L >> 4) * UNIT_ROWS + (L & 7) * 128 + (((warp * 2 + (L >> 3 & 1)) ^ (L & 7)) << 4);
#pragma unroll
  for (int j = 0; j < EIGHTS; j += 2) stmatrix4_trans(to + j * UNIT_ROWS, p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]);
  if (warp == 0) {
    bool same = true;
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) same = same && rescale[j][0] == 1.f && rescale[j][1] == 1.f;
    same = __all_sync(ALL_LANES, same);
    if (L == 0) shared_at<int>(Place::moved)[turn] = !same;
    if (g == 0)
#pragma unroll
      for (int j = 0; j < EIGHTS; j++) {
        const int line = (turn * MOST + j * 8 + q * 2) * 4;
        *shared_at<float2>(Place::rescale + line) = make_float2(rescale[j][0], rescale[j][1]);
        if (ends) *shared_at<float2>(Place::unit_m + line) = make_float2(m[j][0], m[j][1]);
      }
  }
  show_to_products();
  __syncwarp();
  if (L == 0) mbarrier_arrive(ready(turn));
  if (ends)
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) m[j][0] = m[j][1] = minus_infinity();
}

__device__ __forceinline__ void score_role(int jobs, float scale) {
  const int warp = threadIdx.x >> 5, L = threadIdx.x & 31, key = warp * 16 + (L >> 2);
  float m[EIGHTS][2], s[EIGHTS * 4];
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) m[j][0] = m[j][1] = minus_infinity();
  u32 phases = 0;
  for (int job = 0, n = 0; job < jobs; job++) {
    const Task task = task_of(job);
    mbarrier_wait(asked(), job & 1);
    for (int i = 0; i < task.tiles; i++, n++) {
      form_scores(s, n, i < task.pages, phases);
      __syncwarp();
      arrive_at_all(empty(Slots(n).slot(PIECES - 1)));
      if (L == 0 && i + 1 == task.tiles) mbarrier_arrive(answered());
      if (i + 1 == task.tiles && task.count < TILE)
#pragma unroll
        for (int x = 0; x < EIGHTS * 4; x++)
          if (key + (x & 2) * 4 >= task.count) s[x] = minus_infinity();
      find_maxima(s, n);
      bar_sync<SCORES, ROLE>();
      weigh(s, m, scale, n, ends(task, i));
    }
  }
}

#include "nodes_values.cuh"

// ------------------------------------------------------------------------------------------------- copies
// Sixteen rows at once, eight threads a row.
struct Copier {
  const Inputs& in;
  int row, chunk;
  u32 turned;                                                   // this thread's place in its row of any piece, and its row
  __device__ __forceinline__ explicit Copier(const Inputs& i) : in(i) {
    const int v = threadIdx.x - 3 * ROLE;
    row = v / 8;
    chunk = v % 8;
    turned = row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  // The block's n-th tile. This thread's keys are row, row + 16, ... of it.
  __device__ __forceinline__ void tile(int n, const bf16* const (&keys)[4]) const {
    const Slots slots(n);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      const int used = slots.used(c);
      if (used > 0) mbarrier_wait(empty(slots.slot(c)), (used - 1) & 1);
#pragma unroll
      for (int x = 0; x < 4; x++) copy16(slots.at(c) + x * 16 * 128 + turned, keys[x] + c * 64 + chunk * 8);
      if (c % PER_PART == PER_PART - 1) copy_arrive(full(false, n % TILES, c / PER_PART));
    }
  }
  // The same of a page, by one thread.
  __device__ __forceinline__ void page(int n, const void* map, int page) const {
    const Slots slots(n);
    const int rank = block_of_cluster();
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      const int used = slots.used(c);
      if (used > 0) mbarrier_wait(empty(slots.slot(c)), (used - 1) & 1);
      const u32 tell = full(true, n % TILES, c / PER_PART);
      if (c % PER_PART == 0) mbarrier_expect(tell, PER_PART * PIECE);
      if ((c + n) % TOGETHER == rank) box_to_all(slots.at(c), map, c * 64, page * TILE, tell);
    }
  }
  __device__ __forceinline__ void queries(long long line) const {
    const u32 at = shared_address(raw) + Place::q;
#pragma unroll
    for (int r = 0; r < MOST; r += 16)
#pragma unroll
      for (int c = 0; c < PIECES; c++) {
        const long long x = line + r + row;
        const bf16* from = c < PIECES - 1 ? in.q + x * LATENT + c * 64 : in.q_pe + x * in.pe_stride;
        copy16(at + c * MOST * 128 + r * 128 + turned, from + chunk * 8);
      }
    copy_arrive(asked());
  }
};

// Returns the tiles that the block has had so far.
__device__ __forceinline__ int copy_job(const Known& known, const Inputs& in, const void* map, int number, int past) {
  const Copier copier(in);
  const Job& job = known.job;
  const int* table = in.table + (size_t)job.row * in.pages;
  const bool first = threadIdx.x == 3 * ROLE;
  const Extent at(job, known.depth);
  const long long line = (long long)job.token * in.heads + job.first;
  if (first) {
    shared_at<Task>(Place::tasks)[number % TASKS] = Task{
        at.tiles, at.shared, at.last(), at.pages, at.begin, job.step, (job.kind & WHOLE_ROW) != 0, line, job.part,
        line + (long long)job.token * in.heads};
    mbarrier_arrive(told(number));
    if (at.pages > 0) copier.page(past, map, at.shared > 0 ? known.page : table[at.page(0)]);
  }
  auto queries = [&]() {
    if (number > 0) mbarrier_wait(answered(), (number - 1) & 1);
    copier.queries(line);
  };
  if (at.pages > 0) queries();
  if (first)
    for (int i = 1; i < at.pages; i++) copier.page(past + i, map, table[at.page(i)]);
  int* slots = shared_at<int>(Place::slots);
  if (at.pages < at.tiles) own_slots(job, in, table, at.base, at.own, slots);
  bar_sync<COPIES, ROLE>();                                     // also: the ring's slots are as far as the first thread knows
  for (int i = at.pages; i < at.tiles; i++) {
    const bf16* keys[4];
#pragma unroll
    for (int x = 0; x < 4; x++) keys[x] = in.cache + (size_t)slots[(i - at.shared) * TILE + copier.row + x * 16] * WIDTH;
    copier.tile(past + i, keys);
    if (i == 0) queries();
  }
  bar_sync<COPIES, ROLE>();                                     // all have read the slots
  return past + at.tiles;
}

// Jobs of a block: one of each round, in the order of plan.cu. spare: floats [blocks, MOST, LATENT].
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) mla_attend(
    BOXES_OF(const bf16*) map, const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages,
    const u64* masks, int words, int heads, float scale, const Job* jobs, const Head* head, float* spare, float* o, float2* ml,
    float* own_o, float2* own_ml, bf16* out) {
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  const int role = threadIdx.x / ROLE;
  if (threadIdx.x < (Place::end - Place::barriers) / 8) mbarrier_begin(barrier(threadIdx.x), arrivals(threadIdx.x));
  cluster_begun<THREADS>();
  // The plan, masks and pages are older than what may still run (rule (b) of common.cuh; the plan lets nobody start early).
  const int mine = max(0, (load_new(&head->jobs) - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
  if (role == 3) {
    give_registers<COPY_REGISTERS>();
    if (mine > 0) {
      Known known(&jobs[blockIdx.x], in);
      pdl_wait();
      pdl_go();
      for (int number = 0, past = 0;;) {
        past = copy_job(known, in, &map, number, past);
        if (++number >= mine) break;
        known = Known(&jobs[blockIdx.x + number * gridDim.x], in);
      }
      copy_commit();
      copy_wait<0>();
    }
    cluster_ended();
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
  cluster_ended();
}
