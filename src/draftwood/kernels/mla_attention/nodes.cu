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
constexpr int LINES_OF_JOB = EIGHTS * 8;                        // lines of a job
constexpr int PIECES = 9, PIECE = TILE * 128, RING = EIGHTS > 2 ? 22 : 25, PARTS = 3, PER_PART = PIECES / PARTS;
constexpr int TILES = 3, TASKS = 4, FULL = 2 * TILES * PARTS;   // of barriers
constexpr int ASKERS = 1;                                       // copying warps that ask for pages
constexpr int SCORES = 1, COPIES = 2, VALUES = 3;        // barriers of the block
constexpr int SCORE_REGISTERS = 72, VALUE_REGISTERS = 192, COPY_REGISTERS = 56;
static_assert(ROLE * (SCORE_REGISTERS + 2 * VALUE_REGISTERS + COPY_REGISTERS) <= 65536, "more registers than a multiprocessor has");
#include "engine.cuh"
static_assert(RING >= 2 * PIECES && RING < 3 * PIECES, "two tiles fit, and no more than three are begun");

struct Place {                                           // in shared memory, bytes; sizes.py has the same sum
  static constexpr int q = RING * PIECE;
  static constexpr int p = q + PIECES * LINES_OF_JOB * 128;      // of two tiles in turn, as the next four
  static constexpr int rescale = p + 2 * LINES_OF_JOB * 128;
  static constexpr int unit_m = rescale + 2 * LINES_OF_JOB * 4;
  static constexpr int maxima = unit_m + 2 * LINES_OF_JOB * 4;   // bf16: of each pair of lines, each score warp's
  static constexpr int moved = maxima + 2 * LINES_OF_JOB * 8;    // whether any maximum moved: seldom, and values need not look at each
  static constexpr int inverse = moved + 16;             // 1 / l, of two jobs in turn
  static constexpr int slots = inverse + 2 * LINES_OF_JOB * 4;   // of a node's own keys
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
  if (i < FULL) return page_arrivals(PER_PART);
  if (i < FULL + RING) return 4 * TOGETHER;
  return barrier(i) == taken(0) || barrier(i) == taken(1) ? 8 : barrier(i) >= told(0) ? 1 : 4;
}

// The place of piece c of the block's n-th tile, and which use of it this is. As copies.cuh wants it: which in turn the tile is.
struct Slots {
  int n, rank, first, use;
  __device__ __forceinline__ explicit Slots(int tile, int of_block = 0)
      : n(tile), rank(of_block), first(n * PIECES % RING), use(n * PIECES / RING) {}
  __device__ __forceinline__ int slot(int c) const { return first + c < RING ? first + c : first + c - RING; }
  __device__ __forceinline__ int used(int c) const { return first + c < RING ? use : use + 1; }
  __device__ __forceinline__ u32 at(int c) const { return shared_address(raw) + slot(c) * PIECE; }
  __device__ __forceinline__ void wait(int c) const { if (used(c) > 0) mbarrier_wait(empty(slot(c)), (used(c) - 1) & 1); }
  __device__ __forceinline__ static int first_page(int, int, int) { return 0; }
  __device__ __forceinline__ bool takes(int) const { return true; }
  __device__ __forceinline__ u32 tell(bool page, int c) const { return full(page, n % TILES, c / PER_PART); }
  __device__ __forceinline__ bool ends(int c) const { return c % PER_PART == PER_PART - 1; }
  // Ask for this block's share of a page, from row `row` of the cache on: one lane.
  __device__ __forceinline__ void ask(const void* map, int row) const {
    const u32 announce = full(true, n % TILES, 0);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      wait(c);
      if (c % PER_PART == 0) mbarrier_expect(announce + c / PER_PART * 8, PER_PART * PIECE);
      if ((c + n) % TOGETHER == rank) box_to_all(at(c), map, c * 64, row, announce + c / PER_PART * 8);
    }
  }
};
__device__ __forceinline__ u32 p_at(int turn) { return shared_address(raw) + Place::p + turn * LINES_OF_JOB * 128; }

#include "jobs.cuh"

// ------------------------------------------------------------------------------------------------- scores
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
      product<EIGHTS, false>(s, further(operand(slots.at(c)), step), further(queries, c * LINES_OF_JOB * 128 + step), part + x > 0);
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
    if (g == j) *shared_at<u32>(Place::maxima + (n & 1) * LINES_OF_JOB * 8 + (j * 4 + q) * 16 + warp * 4) = most;
  }
}

// Probabilities and what value warps need of the n-th tile, which `ends` its unit, once its maxima are there.
__device__ __forceinline__ void weigh(const float (&s)[EIGHTS * 4], float (&m)[EIGHTS][2], float scale, int n, bool ends) {
  const int warp = threadIdx.x >> 5, L = threadIdx.x & 31, g = L >> 2, q = L & 3, turn = n & 1;
  const int maxima = Place::maxima + turn * LINES_OF_JOB * 8;
  float rescale[EIGHTS][2];
  u32 p[EIGHTS][2];
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const uint4 all = shared_load16(shared_address(raw) + maxima + (j * 4 + q) * 16);
    const u32 most = max_bf16_pair(max_bf16_pair(all.x, all.y), max_bf16_pair(all.z, all.w));
    float safe[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float highest = __int_as_float((int)(c ? most & 0xffff0000u : most << 16));
      safe[c] = move_maximum(m[j][c], __fmul_rn(highest, scale), rescale[j][c]);
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
        const int line = (turn * LINES_OF_JOB + j * 8 + q * 2) * 4;
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
#include "copies.cuh"

// Jobs of a block: one of each round, in the order of plan.cu. spare: floats [blocks, LINES_OF_JOB, LATENT].
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) mla_attend(
    BOXES_OF(const bf16*) map, const bf16* q, const bf16* q_pe, int pe_stride, const bf16* cache, const int* table, int pages,
    const u64* masks, int words, int heads, float scale, const Job* jobs, const Head* head, float* spare, float* o, float2* ml,
    float* own_o, float2* own_ml, bf16* out) {
  const Inputs in{q, q_pe, cache, pe_stride, table, pages, masks, words, heads, scale};
  const int role = threadIdx.x / ROLE;
  // The plan, masks and pages are older than what may still run (rule (b) of common.cuh; the plan lets nobody start early).
  const int mine = max(0, (load_new(&head->jobs) - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
  if (threadIdx.x < (Place::end - Place::barriers) / 8) mbarrier_begin(barrier(threadIdx.x), arrivals(threadIdx.x));
  cluster_begun<THREADS>();
  if (role == 3) {
    give_registers<COPY_REGISTERS>();
    copy_role(jobs, load_all_new(&jobs[blockIdx.x]), blockIdx.x, gridDim.x, mine, in, &map);
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
