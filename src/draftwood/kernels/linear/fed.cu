// Linear for many tokens by the warp-group products of sm_90, fed by a producer: a block takes 64 * GROUPS rows of weights by 8 *
// TILES tokens and all of K; its segments follow each other and are added up in registers, so nothing is folded. One group of
// warps copies, the others multiply; barriers in shared memory say which slot of the ring is full and which is empty, and no
// barrier of the block stands in the loop. Blocks of a cluster share what they have in common: weights ALONG the tokens, tokens
// ACROSS the rows. Blocks stay and take one tile after another: while results are stored, the next tile's copies are on their way.
// See fold.cuh for the law and the layouts, arrange.cu for x.
#include "fold.cuh"
#include "../warpgroup.cuh"
#include "groups.cuh"

#ifndef TILES
#define TILES 18         // 8-token tiles
#endif
#ifndef GROUPS
#define GROUPS 2         // 1 or 2 groups of four warps that multiply, 64 rows of weights each
#endif
#ifndef SEVERAL
#define SEVERAL 1        // 1: K is more than one segment, and their sums lie beside the accumulators
#endif
#ifndef ALONG
#define ALONG 2          // blocks of a cluster with the same weights
#endif
#ifndef ACROSS
#define ACROSS 1         // blocks of a cluster with the same tokens
#endif
#ifndef DEPTH
#define DEPTH 6          // K64 steps in the ring
#endif
#ifndef ARRANGED
#define ARRANGED 1       // 1: x comes as arrange.cu leaves it; 0: as rows, and the producer's warps put it in order
#endif
#ifndef HELD
#define HELD 3           // x as rows: steps that are on their way
#endif
#include "feed.cuh"
#if ALONG * ACROSS > 1 && !defined(EMULATION)
#define TOGETHER_SHAPE __cluster_dims__(ALONG * ACROSS, 1, 1)
#else
#define TOGETHER_SHAPE
#endif

constexpr int BLOCK = 4 * GROUPS, WSLOT = BLOCK * 2048, XSLOT = TILES * 1024, SLOT = WSLOT + XSLOT, COPIERS = 4;
constexpr int MINE = (TILES + COPIERS - 1) / COPIERS, HELD_STEP = MINE * COPIERS * 1024;   // x as rows: tiles of a producer's warp
// Registers: two groups that multiply take what the producer's gives back; one has enough.
constexpr int PRODUCES = ARRANGED ? 40 : 72, MULTIPLIES = (504 - PRODUCES) / 16 * 8;

#include "results.cuh"

struct Tile {            // of the grid of tiles: a block's rows and tokens
  int head, group, first;
  bool live;             // whether any block of the cluster has tokens
};
// The cluster's `id`-th tiles: those of the same rows follow each other.
struct Tiles {
  int along, across, wide, high, groups, count;
  __device__ __forceinline__ Tiles(int n, int groups, int heads, int along, int across)
      : along(along), across(across), groups(groups) {
    wide = (n + 8 * TILES * ALONG - 1) / (8 * TILES * ALONG);
    high = (groups + ACROSS - 1) / ACROSS;
    count = wide * high * heads;
  }
  __device__ __forceinline__ Tile at(int id, int n) const {
    const int row = id / wide, column = id % wide;
    return {row / high, row % high * ACROSS + across, (column * ALONG + along) * (8 * TILES), column * ALONG * (8 * TILES) < n};
  }
};

struct Ring {
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ void next() { if (++slot == DEPTH) { slot = 0; parity ^= 1; } }
};

// What all of a block's warps know: its ring, its place in the cluster, the tiles that it takes.
struct Block {
  const unsigned char* W;
  int T, cuts, row_tiles, along, across, begin, stride, ahead;   // ahead: steps whose weights are asked for before the wait
  u32 base, full, empty;
  Tiles all;
  int n;                                         // tokens that are there, after the wait

  __device__ __forceinline__ int rows_of(const Tile& tile) const { return max(0, min(BLOCK, row_tiles - tile.group * BLOCK)); }
};

// The part of the producer's warp `part`: every COPIERS-th row tile of those that this block copies. By an elected lane.
struct Weighs {
  const Block& block;
  int part, mine;                                // mine: its first row tile
  u32 same_rows;
  __device__ __forceinline__ Weighs(const Block& block, int part) : block(block), part(part), mine(part * SAME_ROWS + block.along) {
    same_rows = ((1u << SAME_ROWS) - 1) << block.across * SAME_ROWS;
  }
  __device__ __forceinline__ const unsigned char* of(const Tile& tile) const {
    return block.W + ((long long)tile.head * block.row_tiles + tile.group * BLOCK + mine) * block.T * 2048;
  }
  __device__ __forceinline__ void ask(const unsigned char* from, int have, u32 slot) const {
    const u32 full = block.full + 8 * slot;
    if (part == 0) mbarrier_expect(full, have * 2048 + ARRANGED * XSLOT);
#pragma unroll 1
    for (int i = mine; i < have; i += COPIERS * SAME_ROWS) {
      bulk_copy_to(block.base + slot * SLOT + XSLOT + i * 2048, from, 2048, full, same_rows);
      from += (long long)block.T * (2048 * COPIERS * SAME_ROWS);
    }
  }
};

#include "rows.cuh"

// Copies x that is in order, and weights, by an elected lane.
__device__ __forceinline__ void feed_ordered(const Block& block, const Weighs& weights, const bf16* X, long long tokens) {
  u32 mask = 0;
#pragma unroll
  for (int i = 0; i < SAME_TOKENS; i++) mask |= 1u << (i * SAME_ROWS + block.along);
  constexpr int PART = XSLOT / SAME_TOKENS / COPIERS;
  const int place = (block.across * COPIERS + weights.part) * PART;
  Ring ring;
  int done = block.ahead;
  for (int id = block.begin; id < block.all.count; id += block.stride, done = 0) {
    const Tile tile = block.all.at(id, block.n);
    const unsigned char* x = (const unsigned char*)X + ((long long)tile.head * block.T * tokens + tile.first) * 128 + place;
    const unsigned char* w = weights.of(tile);
    const int steps = tile.live ? block.T : done;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      if (step >= done) {
        mbarrier_wait(block.empty + 8 * ring.slot, ring.parity ^ 1);
        weights.ask(w, block.rows_of(tile), ring.slot);
      }
      bulk_copy_to(block.base + ring.slot * SLOT + place, x, PART, block.full + 8 * ring.slot, mask);
      x += tokens * 128; w += 2048;
      ring.next();
    }
  }
}

// The sums of a live tile, segment after segment: `total`, or `acc` where K is one segment. The slots that were read are told of.
__device__ __forceinline__ void multiply(const Block& block, const Peers& peers, Ring& ring, bool on, float (&acc)[TILES][4],
                                         float (&total)[TILES][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Weights even = {}, odd = {};
  u32 last = DEPTH;                              // the slot that products under way read; DEPTH: none
  auto turn = [&](Weights& v) {                  // the products under way read the other weights
    mbarrier_wait(block.full + 8 * ring.slot, ring.parity);
    const u32 at = block.base + ring.slot * SLOT;
    if (on) fetch(v, at + XSLOT + warp * 2048 + lane * 16);
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) warpgroup_mma<TILES>(acc, v.a[k], at + k * 32);
    warpgroup_commit();
    warpgroup_wait<1>();
    if (last < DEPTH) peers.tell(last);
    last = ring.slot;
    ring.next();
  };
  int step = 0, s = 0;
#pragma unroll 1
  do {                                           // `for` might run no time: that spills 256 bytes at 176 tokens
    const int end = SEVERAL ? block.T * (s + 1) >> block.cuts : block.T;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[t][i] = 0.f;
#pragma unroll 1
    while (step < end) {
      turn(even);
      if (++step < end) { turn(odd); step++; }
    }
    warpgroup_wait<0>();
    settled(acc);
    peers.tell(last);
    last = DEPTH;
    if (SEVERAL)
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[t][i] = s == 0 ? acc[t][i] : add_rn(total[t][i], acc[t][i]);
  } while (SEVERAL && ++s < 1 << block.cuts);
}

// The producer's warps: weights of the first tile before the wait, then everything. held: where rows of x are on their way.
__device__ __forceinline__ void feed(Block& block, const bf16* X, const int* rows, int n, int K, long long x_stride,
                                     long long x_head, u32 held) {
  const Weighs weights(block, (threadIdx.x >> 5) - 4 * GROUPS);
  if (block.ahead && elected()) {
    const Tile tile = block.all.at(block.begin, n);
#pragma unroll 1
    for (int i = 0; i < block.ahead; i++) weights.ask(weights.of(tile) + i * 2048, block.rows_of(tile), i);
  }
  pdl_wait();
  pdl_go();
  if (rows) block.n = min(n, load_int(rows));
  if (!ARRANGED) feed_rows(block, weights, X, K, x_stride, x_head, held);
  else if (elected()) feed_ordered(block, weights, X, x_stride);
}

// Grid: clusters of ALONG * ACROSS blocks, as many as there are tiles or run at once. Arguments as linear_wide's, the heads, and
// cuts: K is 1 << cuts segments. groups = ceil(N / 16 / BLOCK). ARRANGED: x_stride = tokens of X, a multiple of 8 TILES ALONG. y's
// rows start on 16 bytes (fp32: on 4). Shared memory: DEPTH * (SLOT + 16) bytes, HELD * HELD_STEP where x comes as rows, and
// GROUPS * RESULTS but for a SwiGLU. A slot: x, then weights. `full`: its bytes are there (and x, by those who put it in order);
// `empty`: all warps that multiply, of every block that copies here or is copied to, have read it. Weights of the first tile are
// asked for before anything else; if the device's count of rows leaves no tokens for that tile, its first DEPTH steps are skipped
// over.
extern "C" __global__ void TOGETHER_SHAPE __launch_bounds__(128 * (GROUPS + 1), 1)
linear_fed(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
           int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide, int heads, int cuts) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 base = shared_address(smem), held = base + DEPTH * SLOT, results = held + (ARRANGED ? 0 : HELD * HELD_STEP);
  const u32 full = results + (GLU ? 0 : GROUPS * RESULTS), empty = full + 8 * DEPTH;
  const int warp = threadIdx.x >> 5, T = (K + 63) >> 6;
  const int along = blockIdx.x % SAME_ROWS, across = blockIdx.x / SAME_ROWS % SAME_TOKENS;   // (0, 0) in emulation
  const int begin = blockIdx.x / (ALONG * ACROSS), stride = gridDim.x / (ALONG * ACROSS);
  const Tiles all(n, groups, heads, blockIdx.x % ALONG, blockIdx.x / ALONG % ACROSS);
  const int ahead = begin < all.count ? min(DEPTH, T) : 0;
  Block block = {W, T, cuts, N >> 4, along, across, begin, stride, ahead, base, full, empty, all, n};
  if (threadIdx.x == 0)
    for (int i = 0; i < DEPTH; i++) {
      mbarrier_begin(full + 8 * i, ARRANGED ? 1 : 1 + COPIERS);
      mbarrier_begin(empty + 8 * i, 4 * GROUPS * (SAME_ROWS + SAME_TOKENS - 1));
    }
  barriers_begun();
  if (warp >= 4 * GROUPS) {
    if (GROUPS > 1) give_registers<PRODUCES>();
    feed(block, X, rows, n, K, x_stride, x_head, held);
  } else {
    if (GROUPS > 1) take_registers<MULTIPLIES>();
    pdl_wait();
    pdl_go();
    if (rows) block.n = min(n, load_int(rows));
    const Peers peers(empty, along, across);
    Ring ring;
    float acc[TILES][4], total[TILES][4];
    int done = ahead;
    for (int id = begin; id < all.count; id += stride, done = 0) {
      const Tile tile = all.at(id, block.n);
      if (!tile.live) {
#pragma unroll 1
        for (int i = 0; i < done; i++) { mbarrier_wait(full + 8 * ring.slot, ring.parity); peers.tell(ring.slot); ring.next(); }
        continue;
      }
      const int row_tile = tile.group * BLOCK + warp;
      const bool on = row_tile < block.row_tiles;
      multiply(block, peers, ring, on, acc, total);
      const long long y0 = tile.head * y_head;
      void* const y = wide ? (void*)((float*)Y + y0) : (void*)((bf16*)Y + y0);
      const Output out = {y, residual ? residual + y0 : nullptr, y_stride, wide != 0};
      const auto& sums = SEVERAL ? total : acc;
      if (!GLU && !out.wide)
        store_lines(sums, out, results + warp / 4 * RESULTS, row_tile & ~3, block.row_tiles, tile.first, block.n);
      else if (on) store(sums, out, row_tile * 16, tile.first, block.n);
    }
  }
  cluster_end();
}
