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
#ifndef SEGMENTS
#define SEGMENTS 4       // S
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
#include "feed.cuh"
#if ALONG * ACROSS > 1 && !defined(EMULATION)
#define TOGETHER_SHAPE __cluster_dims__(ALONG * ACROSS, 1, 1)
#else
#define TOGETHER_SHAPE
#endif

constexpr int BLOCK = 4 * GROUPS, WSLOT = BLOCK * 2048, XSLOT = TILES * 1024, SLOT = WSLOT + XSLOT, COPIERS = 4;
// x as rows: tiles of a producer's warp, and the steps that it has asked for and holds in registers.
constexpr int MINE = (TILES + COPIERS - 1) / COPIERS, HELD = MINE > 4 ? 1 : MINE == 4 ? 2 : MINE == 3 ? 3 : 4;
// Registers: two groups that multiply take what the producer's gives back; one has enough.
constexpr int PRODUCES = ARRANGED ? 40 : HELD == 1 ? 72 : 112, MULTIPLIES = (504 - PRODUCES) / 16 * 8;

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

// A warp's results, row row0 + ... of the token at `first` + ..., where they go. d[t]: rows g, g + 8, tokens 8t + 2q, 8t + 2q + 1.
// No branches: the chains of all tiles may run side by side.
__device__ __forceinline__ void store(const float (&d)[TILES][4], const Output& out, int row0, int first, int n) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, left = n - first - g;   // tokens from the lane's own
  const long long stride = out.stride;
  if (GLU) {             // rows g are gates, rows g + 8 their ups
    bf16* y = (bf16*)out.y + (first + g) * stride + row0 / 2 + 2 * q;
#pragma unroll
    for (int t = 0; t < TILES; t++, y += 8 * stride)
      store4_if(t * 8 < left, y, transposed(pack_bf16(silu(d[t][0]) * d[t][2], silu(d[t][1]) * d[t][3])));
  } else if (out.wide) {
    float* y = (float*)out.y + (first + 2 * q) * stride + row0 + g;
#pragma unroll
    for (int t = 0; t < TILES; t++, y += 8 * stride)
#pragma unroll
      for (int i = 0; i < 4; i++)
        store4_if(t * 8 + 2 * q + (i & 1) < n - first, y + (i & 1) * stride + (i >> 1) * 8, __float_as_uint(d[t][i]));
  } else {               // lanes exchange, so that each has four rows of a token: 32 bytes of four lanes
    uint2 v[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const u32 a = transposed(pack_bf16(d[t][0], d[t][1])), b = transposed(pack_bf16(d[t][2], d[t][3]));
      const u32 other = __shfl_xor_sync(ALL_LANES, q & 1 ? a : b, 1);
      v[t] = make_uint2(q & 1 ? other : a, q & 1 ? b : other);
    }
    const long long at = (first + g) * stride + row0 + (q & 1) * 8 + (q >> 1) * 4;
    bf16* y = (bf16*)out.y + at;
    if (out.residual) {
      const bf16* from = out.residual + at;
      uint2 r[TILES];
#pragma unroll
      for (int t = 0; t < TILES; t++, from += 8 * stride) r[t] = load8_if(t * 8 < left, from);
#pragma unroll
      for (int t = 0; t < TILES; t++) v[t] = make_uint2(add_pair(v[t].x, r[t].x), add_pair(v[t].y, r[t].y));
    }
#pragma unroll
    for (int t = 0; t < TILES; t++, y += 8 * stride) store8_if(t * 8 < left, y, v[t]);
  }
}

// Grid: clusters of ALONG * ACROSS blocks, as many as there are tiles or run at once. Arguments as linear_wide's and the heads;
// groups = ceil(N / 16 / BLOCK). ARRANGED: x_stride = tokens of X, a multiple of 8 TILES ALONG. y's rows start on 8 bytes. Shared
// memory: DEPTH * (SLOT + 16) bytes. A slot: x, then weights. `full`: its bytes are there (and x, by those who put it in order);
// `empty`: all warps that multiply, of every block that copies here or is copied to, have read it. Weights of the first tile are
// asked for before anything else; if the device's count of rows leaves no tokens for that tile, its first DEPTH steps are skipped
// over.
extern "C" __global__ void TOGETHER_SHAPE __launch_bounds__(128 * (GROUPS + 1), 1)
linear_fed(const unsigned char* W, const bf16* X, void* Y, const bf16* residual, const int* rows, int n, int N, int K,
           int groups, long long x_stride, long long x_head, long long y_stride, long long y_head, int wide, int heads) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 base = shared_address(smem), full = base + DEPTH * SLOT, empty = full + 8 * DEPTH;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, T = (K + 63) >> 6, tiles = N >> 4;
  const int along = blockIdx.x % SAME_ROWS, across = blockIdx.x / SAME_ROWS % SAME_TOKENS;   // (0, 0) in emulation
  const int begin = blockIdx.x / (ALONG * ACROSS), stride = gridDim.x / (ALONG * ACROSS);
  const Tiles all(n, groups, heads, blockIdx.x % ALONG, blockIdx.x / ALONG % ACROSS);
  const int ahead = begin < all.count ? min(DEPTH, T) : 0;                   // steps whose weights are asked for before the wait
  if (threadIdx.x == 0)
    for (int i = 0; i < DEPTH; i++) {
      mbarrier_begin(full + 8 * i, ARRANGED ? 1 : 1 + COPIERS);
      mbarrier_begin(empty + 8 * i, 4 * GROUPS * (SAME_ROWS + SAME_TOKENS - 1));
    }
  barriers_begun();

  if (warp >= 4 * GROUPS) {                      // the producer
    if (GROUPS > 1) give_registers<PRODUCES>();
    // Each of its warps asks for a part: a copy takes a thread some 100 clocks to ask for.
    const int part = warp - 4 * GROUPS, mine = part * SAME_ROWS + along;       // its first row tile
    const u32 same_rows = ((1u << SAME_ROWS) - 1) << across * SAME_ROWS;
    auto weights_of = [&](const Tile& tile) { return W + ((long long)tile.head * tiles + tile.group * BLOCK + mine) * T * 2048; };
    auto rows_of = [&](const Tile& tile) { return max(0, min(BLOCK, tiles - tile.group * BLOCK)); };
    auto weights = [&](const unsigned char* from, int have, u32 slot) {
      if (part == 0) mbarrier_expect(full + 8 * slot, have * 2048 + ARRANGED * XSLOT);
#pragma unroll 1
      for (int i = mine; i < have; i += COPIERS * SAME_ROWS) {
        bulk_copy_to(base + slot * SLOT + XSLOT + i * 2048, from, 2048, full + 8 * slot, same_rows);
        from += (long long)T * (2048 * COPIERS * SAME_ROWS);
      }
    };
    if (lane == 0 && ahead) {
      const Tile tile = all.at(begin, n);
#pragma unroll 1
      for (int i = 0; i < ahead; i++) weights(weights_of(tile) + i * 2048, rows_of(tile), i);
    }
    pdl_wait();
    pdl_go();
    if (rows) n = min(n, load_int(rows));
    Ring ring;
    if (ARRANGED) {
      if (lane == 0) {
        u32 mask = 0;
#pragma unroll
        for (int i = 0; i < SAME_TOKENS; i++) mask |= 1u << (i * SAME_ROWS + along);
        constexpr int PART = XSLOT / SAME_TOKENS / COPIERS;
        const int place = (across * COPIERS + part) * PART;
        int done = ahead;
        for (int id = begin; id < all.count; id += stride, done = 0) {
          const Tile tile = all.at(id, n);
          const unsigned char* x = (const unsigned char*)X + ((long long)tile.head * T * x_stride + tile.first) * 128 + place;
          const unsigned char* w = weights_of(tile);
          const int steps = tile.live ? T : done;
#pragma unroll 1
          for (int step = 0; step < steps; step++) {
            if (step >= done) {
              mbarrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
              weights(w, rows_of(tile), ring.slot);
            }
            bulk_copy_to(base + ring.slot * SLOT + place, x, PART, full + 8 * ring.slot, mask);
            x += x_stride * 128; w += 2048;
            ring.next();
          }
        }
      }
    } else {
      // Lane (g, q) of a warp takes 16 bytes of token g of every fourth tile, twice a step, and puts each word where four lanes
      // together are a chunk (arrange.cu). When a step is put down, the one HELD steps on is asked for.
      const int g = lane >> 2, q = lane & 3;
      uint4 held[HELD][MINE][2];
      struct Place { int id, step, steps, done; Tile tile; } asks = {begin, 0, 0, ahead}, puts = asks;
      auto find = [&](Place& at) {               // from this tile on, one with something to do
        for (; at.id < all.count; at.id += stride, at.done = 0) {
          at.tile = all.at(at.id, n);
          at.steps = at.tile.live ? T : at.done;
          if (at.steps > 0) return true;
        }
        return false;
      };
      auto advance = [&](Place& at) {            // to the next step; whether there is one
        if (++at.step < at.steps) return true;
        at.step = 0; at.id += stride; at.done = 0;
        return find(at);
      };
      const bf16* from[MINE];
      auto rows_from = [&] {                     // rows that are not there: another one's, or the first
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          const int token = max(0, min(n - 1, asks.tile.first + (i * COPIERS + part) * 8 + g));
          from[i] = X + asks.tile.head * x_head + token * x_stride + q * 8;
        }
      };
      bool more = find(asks);
      auto ask = [&](uint4 (&v)[MINE][2]) {
        if (!more) return;
        if (asks.step == 0) rows_from();
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
          for (int b = 0; b < 2; b++)
            if (TAIL && asks.step * 64 + b * 32 + q * 8 >= K) v[i][b] = make_uint4(0, 0, 0, 0);
            else v[i][b] = load16(from[i] + asks.step * 64 + b * 32);
        more = advance(asks);
      };
      auto put = [&](uint4 (&v)[MINE][2]) {      // whether there is another one to put
        if (puts.step >= puts.done) {
          mbarrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
          if (lane == 0) weights(weights_of(puts.tile) + puts.step * 2048, rows_of(puts.tile), ring.slot);
        }
        const u32 to = base + ring.slot * SLOT + part * 1024 + g * 128 + q * 4;
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
          for (int b = 0; b < 2; b++)
            if (i * COPIERS + part < TILES) {
              const u32 w[4] = {v[i][b].x, v[i][b].y, v[i][b].z, v[i][b].w};
#pragma unroll
              for (int k = 0; k < 4; k++) shared_store(to + i * (COPIERS * 1024) + ((4 * b + k) ^ g) * 16, __uint_as_float(w[k]));
            }
        ask(v);
        publish();                               // for the tensor cores
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full + 8 * ring.slot);
        ring.next();
        return advance(puts);
      };
#pragma unroll
      for (int i = 0; i < HELD; i++) ask(held[i]);
      bool going = find(puts);
      while (going)
#pragma unroll
        for (int i = 0; i < HELD; i++)
          if (going) going = put(held[i]);
    }
  } else {
    if (GROUPS > 1) take_registers<MULTIPLIES>();
    pdl_wait();
    pdl_go();
    if (rows) n = min(n, load_int(rows));
    const Peers peers(empty, along, across);
    Ring ring;
    float acc[TILES][4], total[TILES][4];
    Weights even = {}, odd = {};
    int done = ahead;
    for (int id = begin; id < all.count; id += stride, done = 0) {
      const Tile tile = all.at(id, n);
      if (!tile.live) {
#pragma unroll 1
        for (int i = 0; i < done; i++) { mbarrier_wait(full + 8 * ring.slot, ring.parity); peers.tell(ring.slot); ring.next(); }
        continue;
      }
      const int row_tile = tile.group * BLOCK + warp;
      const bool on = row_tile < tiles;
      u32 last = DEPTH;                          // the slot that products under way read; DEPTH: none
      auto turn = [&](Weights& v) {              // the products under way read the other weights
        mbarrier_wait(full + 8 * ring.slot, ring.parity);
        const u32 at = base + ring.slot * SLOT;
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
      int step = 0;
#pragma unroll 1
      for (int s = 0; s < SEGMENTS; s++) {
        const int end = T * (s + 1) / SEGMENTS;
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
        if (SEGMENTS > 1)
#pragma unroll
          for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[t][i] = s == 0 ? acc[t][i] : add_rn(total[t][i], acc[t][i]);
      }
      const long long y0 = tile.head * y_head;
      void* const y = wide ? (void*)((float*)Y + y0) : (void*)((bf16*)Y + y0);
      const Output out = {y, residual ? residual + y0 : nullptr, y_stride, wide != 0};
      if (on) {
        if (SEGMENTS > 1) store(total, out, row_tile * 16, tile.first, n);
        else store(acc, out, row_tile * 16, tile.first, n);
      }
    }
  }
  cluster_end();
}
