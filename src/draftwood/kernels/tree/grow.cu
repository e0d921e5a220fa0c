// Best-first growth: one block per row, the trees of ref.grow node for node.
//
// Every node offers one child at a time, its best not yet taken. Warp 0 takes the best offer (key, token, serial), adds it as a
// node, and makes two new offers: the parent's next child and the node's first. Sums of scores are float64, as in the reference,
// and every float32 operation stands in its order, so equal candidates give equal trees. An offer that the cap refuses waits; when
// the cap rises it comes back behind everything offered before and ahead of everything after, in the order of refusal.
//
// TABLE 1: from depth 2 on a node's children are ranked with the previous-token table. Before growth the block's warps rank the
// children of each depth's first candidates (LIKELY), which is most of the parents there will be; warp 0 ranks those of any other
// parent when it meets them. Which it was changes no bit. Nodes of one depth that hold one token share their list.
#include "numbers.cuh"

#ifndef TABLE
#define TABLE 0
#endif
#ifndef ROOM
#define ROOM 98304     // bytes of a block
#endif
#ifndef LIKELY
#define LIKELY 16        // candidates of each depth whose children are ranked beforehand; with DEPTHS - 1 depths at most MOST_LIKELY lists
#endif
constexpr int TOP = 64, NODES = 65, DEPTHS = 15, GROW_THREADS = TABLE ? 512 : 128, MOST_LIKELY = 6 * LIKELY;
constexpr int LISTS = NODES + MOST_LIKELY, SIEVE = 2048;
constexpr u32 FRESH = 1u << 15, EPOCH = 1u << 16;      // serial = epoch, then refused ones in order, then fresh ones in order


// One row's tree in the making; a block has one.
struct alignas(16) Row {
  double total[NODES], offer_total[NODES];
  u64 key[96];                                         // of each node's offer, the lowest is the best; ~0: no offer
  u64 mask[NODES][2];
  int token[NODES], parent[NODES], depth[NODES];
  int offer_token[96];
  u32 serial[96];                                      // of an offer; of a refused one: its place among the refused
  int rank[NODES], list[NODES];
  bool spine[NODES], refused[96];
  int ids[DEPTHS][TOP];                                // depth 1: best first; below: the same, or by id with a table
  float score[DEPTHS][TOP];                            // the candidate's s, or with a table below depth 1 its z
#if TABLE
  int low[DEPTHS][TOP], length[DEPTHS][TOP];           // the table's row of each candidate
  float base[DEPTHS][TOP];
  short list_of[DEPTHS][TOP];                          // a candidate's list of children, -1: not ranked yet
  u32 seen[DEPTHS][SIEVE / 32];                        // bit t % SIEVE is set if a candidate t is among those of the depth
  float child_score[LISTS][TOP];
  unsigned char child[LISTS][TOP];                     // place in ids[depth]
#endif
  int nodes;
};
struct Desk {                                          // where a warp ranks one list
  alignas(16) u64 order[TOP];
  float pmi[TOP];
};

static_assert(sizeof(Row) + (TABLE ? GROW_THREADS / 32 : 0) * sizeof(Desk) <= ROOM, "what the launcher asks for");

__device__ __forceinline__ u64 order_of(double v) {    // orders as the double does; -0 + 0 = +0
#ifdef EMULATION
  u64 b; v += 0.0; memcpy(&b, &v, 8);
#else
  const u64 b = (u64)__double_as_longlong(__dadd_rn(v, 0.0));
#endif
  return b >> 63 ? ~b : b | 1ull << 63;
}
__device__ __forceinline__ double add_double(double a, double b) {
#ifdef EMULATION
  return a + b;
#else
  return __dadd_rn(a, b);
#endif
}

// Options of growth that are the same for all rows. correction: null or [2][depths][ranks].
struct Growth {
  const float* correction;
  int depths, ranks, spine;
};

// What node e offers: its child of some rank.
struct Offer {
  int e, rank, depth, list;
  double total;                                        // of the node
  bool spine;
};
// Make the offer, or note that the cap refuses it and return true; its place among the refused is the caller's. serial: if it is made.
__device__ __forceinline__ bool offer(Row& row, const Growth& how, const Offer& o, int cap, u32 serial, int count) {
  row.key[o.e] = ~0ull;
  row.refused[o.e] = false;
  if (o.rank >= count) return false;
  float score;
  int place = o.rank;
#if TABLE
  if (o.depth > 0) { score = row.child_score[o.list][o.rank]; place = row.child[o.list][o.rank]; }
  else
#endif
  score = row.score[o.depth][o.rank];
  if (!(score > minus_infinity())) return false;
  row.offer_token[o.e] = row.ids[o.depth][place];
  if (o.rank >= cap) {
    row.refused[o.e] = true;
    return true;
  }
  double add = 0.0;
  if (how.correction)
    add = how.correction[((o.spine ? how.depths : 0) + min(o.depth, how.depths - 1)) * how.ranks + min(o.rank, how.ranks - 1)];
  const double total = add_double(add_double(o.total, (double)score), add);
  row.offer_total[o.e] = total;
  row.key[o.e] = order_of(how.spine && o.spine && o.rank == 0 ? o.depth - 1e9 : -total);
  row.serial[o.e] = serial;
  return false;
}

// The best offer's node, or -1. All lanes of warp 0.
__device__ __forceinline__ int best_offer(const Row& row) {
  const int lane = threadIdx.x & 31;
  u64 key[3];
#pragma unroll
  for (int i = 0; i < 3; i++) key[i] = row.key[lane + 32 * i];
  const u64 mine = min(key[0], min(key[1], key[2]));
  const u32 high = warp_min_u32((u32)(mine >> 32));
  const u32 low = warp_min_u32((u32)(mine >> 32) == high ? (u32)mine : ~0u);
  const u64 best = (u64)high << 32 | low;
  if (best == ~0ull) return -1;
  u32 equal[3];
#pragma unroll
  for (int i = 0; i < 3; i++) equal[i] = __ballot_sync(ALL_LANES, key[i] == best);
  if (__popc(equal[0]) + __popc(equal[1]) + __popc(equal[2]) == 1)             // nearly always
    return equal[0] ? __popc(equal[0] - 1) : equal[1] ? 32 + __popc(equal[1] - 1) : 64 + __popc(equal[2] - 1);
  u32 token = ~0u, serial = ~0u, found = ~0u;
#pragma unroll
  for (int i = 0; i < 3; i++) if (key[i] == best) token = min(token, (u32)row.offer_token[lane + 32 * i]);
  token = warp_min_u32(token);
#pragma unroll
  for (int i = 0; i < 3; i++)
    if (key[i] == best && (u32)row.offer_token[lane + 32 * i] == token) serial = min(serial, row.serial[lane + 32 * i]);
  serial = warp_min_u32(serial);
#pragma unroll
  for (int i = 0; i < 3; i++)
    if (key[i] == best && (u32)row.offer_token[lane + 32 * i] == token && row.serial[lane + 32 * i] == serial) found = lane + 32 * i;
  return (int)warp_min_u32(found);
}

#if TABLE
// Rank the children of the candidate at `place` of depth index `from` into `list`: one warp. weight: of the PMI.
__device__ __forceinline__ void rank_children(Row& row, Desk& desk, int from, int place, int list, float weight, const int* cols,
                                              const float* vals) {
  const int lane = threadIdx.x & 31, low = row.low[from][place], length = row.length[from][place], depth = from + 1;
  const int* ids = row.ids[depth];                     // ascending
  desk.pmi[lane] = desk.pmi[lane + 32] = row.base[from][place];
  __syncwarp();
  if (length <= 2048) {                                // read the table's row; few of its tokens are candidates
    for (int k = lane; k < length; k += 4 * 32) {
      int token[4];
#pragma unroll
      for (int u = 0; u < 4; u++) token[u] = k + 32 * u < length ? cols[low + k + 32 * u] : -1;
#pragma unroll
      for (int u = 0; u < 4; u++) {
        if (token[u] < 0 || !(row.seen[depth][token[u] / 32 % (SIEVE / 32)] >> (token[u] & 31) & 1)) continue;
        int at = 0;
#pragma unroll
        for (int step = TOP / 2; step > 0; step >>= 1) if ((u32)ids[at + step] <= (u32)token[u]) at += step;
        if (ids[at] == token[u]) desk.pmi[at] = vals[low + k + 32 * u];
      }
    }
  } else {                                             // search it
#pragma unroll
    for (int c = lane; c < TOP; c += 32) {
      const int token = ids[c];
      int at = 0, end = length;
      while (at < end) { const int middle = (at + end) >> 1; if (cols[low + middle] < token) at = middle + 1; else end = middle; }
      if (token >= 0 && at < length && cols[low + at] == token) desk.pmi[c] = vals[low + at];
    }
  }
  __syncwarp();
  float score[2];
  u64 key[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int c = lane + 32 * i;
    score[i] = add_rn(mul_rn(desk.pmi[c], weight), row.score[depth][c]);
    key[i] = rank_key(score[i], c);                    // places stand in the order of ids
    desk.order[c] = key[i];
  }
  const float peak = warp_max(fmaxf(score[0], score[1])), start = peak > minus_infinity() ? peak : 0.f;
  float sum = add_rn(exp_of(sub_rn(score[0], start)), exp_of(sub_rn(score[1], start)));
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum = add_rn(sum, __shfl_xor_sync(ALL_LANES, sum, d));
  const float norm = sub_rn(start, minus_log(sum > 0.f ? sum : 1.f));
  row.child_score[list][lane] = row.child_score[list][lane + 32] = minus_infinity();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!key[i]) continue;
    int rank = 0;
#pragma unroll 8
    for (int o = 0; o < TOP; o += 2) {                 // two in one load
      alignas(16) u64 pair[2];
      *reinterpret_cast<uint4*>(pair) = *reinterpret_cast<const uint4*>(desk.order + o);
      rank += (pair[0] > key[i]) + (pair[1] > key[i]);
    }
    row.child_score[list][rank] = sub_rn(score[i], norm);
    row.child[list][rank] = (unsigned char)(lane + 32 * i);
  }
  __syncwarp();
}
#endif

// caps [steps][2]: while a tree has up to caps[i][0] nodes beyond the root, children have rank < caps[i][1].
// Grid (R). ids, z, places [R][D][64] and norm [R][D] as merge leaves them; with a table, row_ptr [known + 1], cols, vals, base [known].
// Outputs: tokens, parents, depths, positions [R][65] int64, counts [R] int64, logprob [R][65], ancestors [R][65][2].
extern "C" __global__ void __launch_bounds__(GROW_THREADS)
grow(const int* ids, const float* z, const int* places, const float* norm, const long long* roots, const long long* lengths, const int* budgets,
     const float* temperature, const int* rows, const int* row_ptr, const int* cols, const float* vals, const float* base, int known,
     const float* correction, int correction_depths, int correction_ranks, int D, int candidates, int spine, double alpha,
     const int* caps, int steps, long long* tokens, long long* parents, long long* depths, long long* positions, long long* counts,
     float* logprob, u64* ancestors) {
  DYNAMIC_SHARED(unsigned char, memory);
  static_assert(sizeof(Row) % 16 == 0, "desks stand behind it");
  Row& row = *reinterpret_cast<Row*>(memory);
  const int r = blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  pdl_wait();
  pdl_go();
  if (rows && r >= load_int(rows)) return;
  const int budget = min(load_int(budgets + r), NODES - 1);
  for (int i = tid; i < 96; i += GROW_THREADS) { row.key[i] = ~0ull; row.refused[i] = false; }
  if (tid == 0) {
    row.total[0] = 0.0; row.token[0] = (int)roots[r]; row.parent[0] = -1; row.depth[0] = 0; row.rank[0] = 0;
    row.list[0] = 0; row.spine[0] = true; row.mask[0][0] = 1; row.mask[0][1] = 0;
    row.nodes = 1;
  }
  if (budget > 0) {
    const int width = TABLE ? candidates : TOP;        // tokens of a depth that take part
    for (int i = tid; i < D * TOP; i += GROW_THREADS) {
      const int d = i / TOP, c = i % TOP;
      const long long at = ((long long)r * D + d) * TOP;
      const int id = ids[at + c];
      const float value = z[at + c];
#if TABLE
      if (d > 0) {                                     // by id; nothing comes last, and tokens beyond `candidates` count for nothing
        const int place = places[at + c];
        row.ids[d][place] = id;
        row.score[d][place] = c < candidates ? value : minus_infinity();
        continue;
      }
#endif
      const float from = norm[(long long)r * D + d];
      row.ids[d][c] = id;
      row.score[d][c] = id >= 0 ? sub_rn(value, from > minus_infinity() ? from : 0.f) : minus_infinity();
    }
    __syncthreads();
#if TABLE
    for (int i = tid; i < (D - 1) * (SIEVE / 32); i += GROW_THREADS) {
      const int d = 1 + i / (SIEVE / 32), word = i % (SIEVE / 32);
      u32 bits = 0;
#pragma unroll 16
      for (int c = 0; c < TOP; c++) {
        const int id = row.ids[d][c];
        bits |= id >= 0 && id / 32 % (SIEVE / 32) == word ? 1u << (id & 31) : 0;
      }
      row.seen[d][word] = bits;
    }
    for (int i = tid; i < (D - 1) * TOP; i += GROW_THREADS) {
      const int d = i / TOP, c = i % TOP, place = d ? places[((long long)r * D + d) * TOP + c] : c, id = row.ids[d][place];
      const bool there = id >= 0 && id < known;
      const int low = there ? row_ptr[id] : 0, length = there ? row_ptr[id + 1] - low : 0;
      row.low[d][place] = low;
      row.length[d][place] = length;
      row.base[d][place] = there ? base[id] : 0.f;
      row.list_of[d][place] = -1;
    }
    const float heat = temperature[r];
    const float weight = (float)(alpha / (double)(heat > 1e-5f ? heat : 1.f));
    Desk& desk = reinterpret_cast<Desk*>(memory + sizeof(Row))[warp];
    __syncthreads();
    const int wanted = min(LIKELY, max(4, budget / 2));                        // a small tree has few parents
    const int likely = D > 1 ? min(min(wanted, width), MOST_LIKELY / (D - 1)) : 0;
    int lists = likely * (D - 1);
    for (int t = warp; t < lists; t += GROW_THREADS / 32) {
      const int d = t / likely, c = t % likely, place = d ? places[((long long)r * D + d) * TOP + c] : c;
      rank_children(row, desk, d, place, t, weight, cols, vals);
      if (lane == 0) row.list_of[d][place] = (short)t;
    }
    __syncthreads();
#endif
    const Growth how = {correction, correction_depths, correction_ranks, spine};
    if (warp == 0) {
      int n = 1, step = 0, until = caps[0], cap = caps[1];
      u32 epoch = 0, refusals = 0, fresh = 1;          // alike in all lanes
      if (lane == 0 && offer(row, how, {0, 0, 0, 0, 0.0, true}, cap, FRESH, width)) row.serial[0] = 0;
      __syncwarp();
      refusals = row.refused[0];
      while (n <= budget) {
        int e = best_offer(row);
        while ((e < 0 || n > until) && step + 1 < steps) {
          step++;
          until = caps[2 * step]; cap = caps[2 * step + 1];
          epoch += EPOCH;
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 3; i++) {                // what still is refused keeps its place among the refused
            const int o = lane + 32 * i;
            if (o < n && row.refused[o] && row.rank[o] < cap)
              offer(row, how, {o, row.rank[o], row.depth[o], row.list[o], row.total[o], row.spine[o]}, cap, epoch + row.serial[o], width);
          }
          __syncwarp();
          e = best_offer(row);
        }
        if (e < 0) break;
        const int rank = row.rank[e], from = row.depth[e], depth = from + 1, above = row.list[e], token = row.offer_token[e];
        const double total = row.total[e], sum = row.offer_total[e];
        const bool line = row.spine[e], more = n < budget;
        const u64 low_mask = row.mask[e][0], high_mask = row.mask[e][1];
        int list = 0;
#if TABLE
        const int place = depth == 1 ? rank : row.child[above][rank];
        if (more && depth < D) {                       // it may have children
          list = row.list_of[from][place];
          if (list < 0) {
            list = lists++;
            rank_children(row, desk, from, place, list, weight, cols, vals);
          }
        }
#endif
        __syncwarp();
        bool refused = false;
        if (lane == 0) {
          row.token[n] = token; row.parent[n] = e; row.mask[n][0] = low_mask | (n < 64 ? 1ull << n : 0);
          row.mask[n][1] = high_mask | (n < 64 ? 0 : 1);
          row.rank[e] = rank + 1;
#if TABLE
          if (list) row.list_of[from][place] = (short)list;
#endif
          if (more) refused = offer(row, how, {e, rank + 1, from, above, total, line}, cap, epoch + FRESH + fresh, width);
        } else if (lane == 1) {                        // side by side with the parent's next offer
          row.total[n] = sum; row.depth[n] = depth; row.rank[n] = 0; row.list[n] = list; row.spine[n] = line && rank == 0;
          if (more && depth < D)
            refused = offer(row, how, {n, 0, depth, list, sum, line && rank == 0}, cap, epoch + FRESH + fresh + 1, width);
        }
        const u32 both = __ballot_sync(ALL_LANES, refused);
        if (refused) row.serial[lane ? n : e] = refusals + (lane ? both & 1 : 0);     // the parent's comes first
        refusals += __popc(both);
        n++;
        fresh += 2;
        __syncwarp();
      }
      if (lane == 0) row.nodes = n;
    }
  }
  __syncthreads();
  const int n = row.nodes;
  const long long length = lengths[r];
  for (int i = tid; i < NODES; i += GROW_THREADS) {
    const long long at = (long long)r * NODES + i;
    const bool live = i < n;
    const int depth = live ? row.depth[i] : 0;
    tokens[at] = live ? row.token[i] : 0;
    parents[at] = live ? row.parent[i] : -1;
    depths[at] = depth;
    positions[at] = length + depth;
    logprob[at] = live ? (float)row.total[i] : 0.f;
    ancestors[2 * at] = live ? row.mask[i][0] : 0;
    ancestors[2 * at + 1] = live ? row.mask[i][1] : 0;
  }
  if (tid == 0) counts[r] = n;
}
