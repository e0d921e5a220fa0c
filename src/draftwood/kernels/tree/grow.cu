// Best-first growth: one block per row, the trees of ref.grow node for node.
//
// Every node offers one child at a time, its best not yet taken. Warp 0 takes the best offer (key, token, serial), adds it as a
// node, and there are two new offers: the parent's next child and the node's first. This is one warp's latency times the nodes, so: a
// lane keeps the keys of two nodes' offers in registers, the rest lies in shared memory, lists end with a score of -inf instead of a
// test, and what a taken offer leads to is known before it is taken: of each node shared memory holds the two offers that would
// follow. So one load gives the keys for the next search, and what the two new offers lead to is found beside that search, by four
// lanes. Sums of scores are float64, as in the reference (negated: the lowest cost is the best), and every float32 operation stands in
// its order, so equal candidates give equal trees. An offer that the cap refuses waits; when the cap rises it comes back behind
// everything offered before and ahead of everything after, in the order of refusal.
//
// TABLE 1: from depth 2 on the children of a node are those of its token, ranked before by `rank_children` (children.cu).
// SPECIAL 1: with a spine or a correction, or with a table more children of a node than shared memory holds.
#include "numbers.cuh"

#ifndef TABLE
#define TABLE 0
#endif
#ifndef SPECIAL
#define SPECIAL 0
#endif
#ifndef ROOM
#define ROOM 98304     // bytes of a block
#endif
constexpr int TOP = 64, NODES = 65, DEPTHS = 15, GROW_THREADS = TABLE ? 512 : 128;
constexpr int HELD = 16;                               // with a table: ranks of a list in shared memory; SPECIAL reads others where they lie
constexpr u32 FRESH = 1u << 15, EPOCH = 1u << 16;      // serial = epoch, then refused ones in order, then fresh ones in order
constexpr u32 SPINE = 1u << 24, REFUSED = 1u << 25;

// Shared memory of a block, in bytes: nodes; their parent + place << 8; how many nodes; then lists.
// A node: what its offer leads to (offers of its next child and of the offered one's first: key, cost), tag, costs (its own, the offered
// one's), places of the two. A tag: depth + rank << 8 + place << 16 + flags (rank and place: of the offered child), list of the node's
// children, serial (of a refused offer its place among the refused).
constexpr int NEXT = 0, BELOW = 16, TAG = 32, COST = 48, SPOTS = 64, NODE = 80;
constexpr int PARENT = NODE * NODES, COUNT = PARENT + 4 * NODES, BEHIND = COUNT + 12;
static_assert(BEHIND % 16 == 0, "lists are loaded by 16 bytes");
#if TABLE
// ids [DEPTHS][TOP]: depth 1 best first, below by id. Lists: the root's, those of each depth's candidates, an empty one.
constexpr int IDS = BEHIND, LINE = HELD + 1, LISTS = 2 + (DEPTHS - 1) * TOP, EMPTY = LISTS - 1;
constexpr int SCORES = IDS + 4 * DEPTHS * TOP, PLACES = SCORES + 4 * LISTS * LINE, END = PLACES + LISTS * LINE;
#else
constexpr int LINE = TOP + 1, LISTS = DEPTHS + 1, SCORES = BEHIND, END = SCORES + 16 * LISTS * LINE;      // (score float64, id)
#endif
static_assert(END <= ROOM, "what the launcher asks for");

__device__ __forceinline__ u32 shared_load4(u32 a) {
#ifdef EMULATION
  u32 v; memcpy(&v, emulated::place(a, 4), 4);
#else
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a));
#endif
  return v;
}
__device__ __forceinline__ u32 shared_load1(u32 a) {
#ifdef EMULATION
  return *emulated::place(a, 1);
#else
  u32 v;
  asm volatile("ld.shared.u8 %0,[%1];" : "=r"(v) : "r"(a));
  return v;
#endif
}
__device__ __forceinline__ void shared_store4(u32 a, u32 v) {
#ifdef EMULATION
  memcpy(emulated::place(a, 4), &v, 4);
#else
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory");
#endif
}
__device__ __forceinline__ void shared_store1(u32 a, u32 v) {
#ifdef EMULATION
  *emulated::place(a, 1) = (unsigned char)v;
#else
  asm volatile("st.shared.u8 [%0],%1;" ::"r"(a), "r"(v) : "memory");
#endif
}
// Two words as a double, and back.
__device__ __forceinline__ double double_of(u32 low, u32 high) {
#ifdef EMULATION
  const u64 b = (u64)high << 32 | low;
  double v; memcpy(&v, &b, 8);
  return v;
#else
  return __hiloint2double((int)high, (int)low);
#endif
}
__device__ __forceinline__ u64 bits_of(double v) {
#ifdef EMULATION
  u64 b; memcpy(&b, &v, 8);
  return b;
#else
  return (u64)__double_as_longlong(v);
#endif
}
__device__ __forceinline__ double minus(double a, double b) {
#ifdef EMULATION
  return a - b;
#else
  return __dsub_rn(a, b);
#endif
}
// Orders as the double does; there is no -0 among costs.
__device__ __forceinline__ u64 order_of(double v) { const u64 b = bits_of(v); return b >> 63 ? ~b : b | 1ull << 63; }
__device__ __forceinline__ float first_score(float z, float norm) { return sub_rn(z, norm > minus_infinity() ? norm : 0.f); }

// What growth reads of one row: shared memory from `base` on, and with a table what lies beyond HELD ranks.
struct Source {
  u32 base;
  const float *z, *norm, *scores;
  const unsigned char* places;
};
// Options that are the same for all nodes. correction: null or [2][depths][ranks]; width: children of a node at most.
struct Growth {
  const float* correction;
  int depths, ranks, spine, width, D;
};
struct Child { double score; u32 place; };             // of rank `rank`, or a score of -inf

__device__ __forceinline__ Child child_of(const Source& from, const Growth& how, int list, int rank) {
#if TABLE
#if SPECIAL
  if (rank >= HELD) {
    if (rank >= how.width || list == EMPTY) return {(double)minus_infinity(), 0};
    if (list == 0) return {(double)first_score(from.z[rank], from.norm[0]), (u32)rank};
    return {(double)from.scores[(list - 1) * TOP + rank], from.places[(list - 1) * TOP + rank] & (TOP - 1u)};
  }
#endif
  const u32 at = list * LINE + rank;
  const u32 score = shared_load4(from.base + SCORES + 4 * at), place = shared_load1(from.base + PLACES + at);
  return {(double)__uint_as_float(score), place};
#else
  const uint2 score = shared_load8(from.base + SCORES + 16 * (list * LINE + rank));
  return {double_of(score.x, score.y), (u32)rank};
#endif
}
// List of the children of a node at this depth whose token is the candidate `place` of its depth index.
__device__ __forceinline__ int list_of(const Growth& how, int depth, int place) {
#if TABLE
  return depth < how.D ? 1 + (depth - 1) * TOP + place : EMPTY;
#else
  return min(depth, how.D);
#endif
}
__device__ __forceinline__ u32 id_of(u32 base, int depth, int place) {       // of a candidate of this depth index
#if TABLE
  return shared_load4(base + IDS + 4 * (depth * TOP + place));
#else
  return shared_load4(base + SCORES + 16 * (depth * LINE + place) + 8);
#endif
}

// A node and the child that it offers.
struct Spot {
  double cost, offered;
  int depth, rank, list, place;                        // rank and place: of the offered one
  bool spine;                                          // the node is the root, or the best child of such a node
};
struct Offer { u64 key; double cost; };                // key ~0: nothing
__device__ __forceinline__ Offer offer_of(const Growth& how, const Child& child, int depth, int rank, double cost, bool spine) {
  Offer o = {~0ull, minus(cost, child.score)};
#if SPECIAL
  if (how.correction) {
    const int at = (spine ? how.depths : 0) + min(depth, how.depths - 1);
    o.cost = minus(o.cost, (double)how.correction[at * how.ranks + min(rank, how.ranks - 1)]);
  }
  const u64 key = order_of(how.spine && spine && rank == 0 ? depth - 1e9 : o.cost);
#else
  const u64 key = order_of(o.cost);
#endif
  if ((u32)(bits_of(child.score) >> 32) != 0xfff00000u) o.key = key;
  return o;
}
// When x's offer is taken: x's next child; or, `below`, the first child of the taken one.
__device__ __forceinline__ Child follower(const Source& from, const Growth& how, const Spot& x, bool below) {
  return child_of(from, how, below ? list_of(how, x.depth + 1, x.place) : x.list, below ? 0 : x.rank + 1);
}
__device__ __forceinline__ Offer follow(const Growth& how, const Spot& x, bool below, const Child& child) {
  return offer_of(how, child, x.depth + below, below ? 0 : x.rank + 1, below ? x.offered : x.cost, x.spine && !(below && x.rank));
}
// Lanes that are not `below` store x's tag, the others its costs.
__device__ __forceinline__ void keep_spot(u32 at, const Spot& x, bool below, u32 flags, u32 serial) {
  const u64 cost = bits_of(x.cost), offered = bits_of(x.offered);
  const uint4 tag = make_uint4(x.depth | x.rank << 8 | x.place << 16 | flags | (x.spine ? SPINE : 0), x.list, serial, 0);
  const uint4 costs = make_uint4((u32)cost, (u32)(cost >> 32), (u32)offered, (u32)(offered >> 32));
  shared_store16(at + (below ? COST : TAG), below ? costs : tag);
}
__device__ __forceinline__ void keep_offer(u32 at, bool below, const Offer& o, u32 place) {
  const u64 cost = bits_of(o.cost);
  shared_store16(at + (below ? BELOW : NEXT), make_uint4((u32)o.key, (u32)(o.key >> 32), (u32)cost, (u32)(cost >> 32)));
  shared_store4(at + SPOTS + (below ? 4 : 0), place);
}

// Of offers that share the first half of the lowest key: the lowest key, token and serial.
__device__ __noinline__ int best_of_equals(u32 base, u64 first, u64 second, u32 high) {
  const int lane = threadIdx.x & 31;
  const u64 key[2] = {first, second};
  u32 low = ~0u, token[2] = {~0u, ~0u}, serial = ~0u, found = ~0u;
#pragma unroll
  for (int i = 0; i < 2; i++) if ((u32)(key[i] >> 32) == high) low = min(low, (u32)key[i]);
  const u64 best = (u64)high << 32 | warp_min_u32(low);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (key[i] == best) {
      const u32 tag = shared_load4(base + NODE * (lane + 32 * i) + TAG);
      token[i] = id_of(base, tag & 255, tag >> 16 & 255);
    }
  const u32 lowest = warp_min_u32(min(token[0], token[1]));
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (key[i] == best && token[i] == lowest) {
      const u32 mine = shared_load4(base + NODE * (lane + 32 * i) + TAG + 8);
      if (mine < serial) { serial = mine; found = lane + 32 * i; }
    }
  const u32 earliest = warp_min_u32(serial);
  return (int)warp_min_u32(serial == earliest ? found : ~0u);
}
// The best offer's node, or -1. All lanes of warp 0.
__device__ __forceinline__ int best_offer(const Source& from, const u64 (&key)[2]) {
  const u32 a = (u32)(key[0] >> 32), b = (u32)(key[1] >> 32), high = warp_min_u32(min(a, b));
  if (high == ~0u) return -1;
  const u32 first = __ballot_sync(ALL_LANES, a == high), second = __ballot_sync(ALL_LANES, b == high);
  if ((first & (first - 1)) | (second & (second - 1)) | (first && second)) return best_of_equals(from.base, key[0], key[1], high);
  const int low = 31 - leading_zeros(first), up = 63 - leading_zeros(second);  // nearly always
  return first ? low : up;
}

// The cap has risen: offer again what it refuses no longer; what still is refused keeps its place among the refused.
__device__ __forceinline__ void offer_again(const Source& from, u64 (&key)[2], int n, int cap, u32 epoch) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int node = (threadIdx.x & 31) + 32 * i;
    const u32 at = from.base + NODE * node;
    uint4 tag = shared_load16(at + TAG);
    if (node >= n || !(tag.x & REFUSED) || (int)(tag.x >> 8 & 255) >= cap) continue;
    const uint4 cost = shared_load16(at + COST);
    key[i] = order_of(double_of(cost.z, cost.w));
    tag.x &= ~REFUSED;
    tag.z += epoch;
    shared_store16(at + TAG, tag);
  }
}

// Take offers until the tree is full or nothing is offered. Warp 0.
__device__ __forceinline__ void grow_tree(const Source& from, const Growth& how, int budget, const int* caps, int steps) {
  const int lane = threadIdx.x & 31;
  const bool below = lane & 2;                         // what this lane finds of what follows, of the new node if lane & 1
  int n = 1, step = 0, until = caps[0], cap = caps[1], e;
  u32 epoch = 0, refusals = 0, fresh = FRESH + 1;      // alike in all lanes
  u64 key[2] = {~0ull, ~0ull};                         // of the offers of nodes `lane` and `lane + 32`
  {
    const Child child = child_of(from, how, 0, 0);
    const Offer o = offer_of(how, child, 0, 0, 0.0, true);
    const Spot root = {0.0, o.cost, 0, 0, 0, (int)child.place, true};
    const Child next = follower(from, how, root, below);
    if (lane == 0) key[0] = o.key;
    if (!(lane & ~2)) {
      keep_spot(from.base, root, below, 0, FRESH);
      keep_offer(from.base, below, follow(how, root, below, next), next.place);
    }
  }
  __syncwarp();
  e = best_offer(from, key);
#pragma unroll 1
  while (true) {
#pragma unroll 1
    while ((e < 0 || n > until) && step + 1 < steps) {
      step++;
      until = caps[2 * step]; cap = caps[2 * step + 1];
      epoch += EPOCH;
      fresh += EPOCH;
      offer_again(from, key, n, cap, epoch);
      __syncwarp();
      e = best_offer(from, key);
    }
    if (e < 0) break;
    const u32 old = from.base + NODE * e, added = from.base + NODE * n;
    const uint4 next = shared_load16(old + NEXT), first = shared_load16(old + BELOW);
    const uint4 tag = shared_load16(old + TAG), cost = shared_load16(old + COST);
    const uint2 places = shared_load8(old + SPOTS);
    const int depth = tag.x & 255, rank = (tag.x >> 8 & 255) + 1, place = tag.x >> 16 & 255;
    if (lane == 0) shared_store4(from.base + PARENT + 4 * n, e | place << 8);
    if (n == budget) {
      if (lane == 0) {
        shared_store4(added + TAG, depth + 1);
        shared_store16(added + COST, make_uint4(cost.z, cost.w, 0, 0));
      }
      n++;
      break;
    }
    const bool refused = rank >= cap && (next.x & next.y) != ~0u;              // a first child never is
    const u64 again = refused ? ~0ull : (u64)next.y << 32 | next.x, child = (u64)first.y << 32 | first.x;
    key[0] = lane == e ? again : lane == n ? child : key[0];
    key[1] = lane + 32 == e ? again : lane + 32 == n ? child : key[1];
    Spot x = {double_of(cost.x, cost.y), double_of(next.z, next.w), depth, rank, (int)tag.y, (int)places.x, (tag.x & SPINE) != 0};
    if (lane & 1) {
      x = {double_of(cost.z, cost.w), double_of(first.z, first.w), depth + 1, 0, list_of(how, depth + 1, place), (int)places.y,
           x.spine && rank == 1};
    }
    const u32 at = lane & 1 ? added : old;
    const Child follows = follower(from, how, x, below);
    __syncwarp();                                      // everybody has read what lay there
    if (lane < 4) {
      const bool held = refused && !(lane & 1);
      keep_spot(at, x, below, held ? REFUSED : 0, held ? refusals : fresh + (lane & 1));
    }
    refusals += refused;
    n++;
    fresh += 2;
    __syncwarp();
    e = best_offer(from, key);
    if (lane < 4) keep_offer(at, below, follow(how, x, below, follows), follows.place);
    __syncwarp();
  }
  if (lane == 0) shared_store4(from.base + COUNT, n);
}

// caps [steps][2]: while a tree has up to caps[i][0] nodes beyond the root, children have rank < caps[i][1] (<= width).
// Grid (R). ids, z, places [R][D][64] and norm [R][D] as merge leaves them; with a table, scores and children [R][D - 1][64][64] as
// rank_children does. Outputs: tokens, parents, depths, positions [R][65] int64, counts [R] int64, logprob [R][65], ancestors [R][65][2].
extern "C" __global__ void __launch_bounds__(GROW_THREADS, 1)
grow(const int* ids, const float* z, const int* places, const float* norm, const long long* roots, const long long* lengths, const int* budgets,
     const int* rows, const float* scores, const unsigned char* children, const float* correction, int correction_depths,
     int correction_ranks, int D, int width, int spine, const int* caps, int steps, long long* tokens, long long* parents,
     long long* depths, long long* positions, long long* counts, float* logprob, u64* ancestors) {
  DYNAMIC_SHARED(unsigned char, memory);
  const int r = blockIdx.x, tid = threadIdx.x;
  u32 base = shared_address(memory);
#ifndef EMULATION
  asm volatile("mov.u32 %0,%0;" : "+r"(base));         // kept, instead of found again at every use
#endif
  pdl_wait();
  pdl_go();
  const int asked = load_int(budgets + r);
  if (rows && r >= load_int(rows)) return;
  const int budget = min(asked, NODES - 1);
  const long long at = (long long)r * D * TOP, lists = (long long)r * (D - 1) * TOP * TOP;
  const Source from = {base, z + at, norm + (long long)r * D, scores + lists, children + lists};
  if (tid == 0) shared_store4(base + COUNT, 1);
  const u32 nothing = __float_as_uint(minus_infinity());
  if (budget > 0) {
#if TABLE
    for (int i = tid; i < D * TOP; i += GROW_THREADS)
      shared_store4(base + IDS + 4 * (i < TOP ? i : i / TOP * TOP + places[at + i]), ids[at + i]);
    if (tid <= HELD) {
      const bool there = tid < min(HELD, width) && ids[at + tid] >= 0;
      shared_store4(base + SCORES + 4 * tid, there ? __float_as_uint(first_score(from.z[tid], from.norm[0])) : nothing);
      shared_store1(base + PLACES + tid, tid);
    }
    if (tid == 0) {
      shared_store4(base + SCORES + 4 * EMPTY * LINE, nothing);
      shared_store1(base + PLACES + EMPTY * LINE, 0);
    }
    constexpr int LOADS = 4;                           // at once: enough for 9 depths
#pragma unroll 1
    for (int start = tid; start < (D - 1) * TOP * (HELD / 4); start += LOADS * GROW_THREADS) {
      uint4 score[LOADS];                              // also of lists that nobody ranked: their nodes are never taken
      u32 place[LOADS];
#pragma unroll
      for (int u = 0; u < LOADS; u++) {
        const int i = start + u * GROW_THREADS, list = i / (HELD / 4), rank = i % (HELD / 4) * 4;
        if (i >= (D - 1) * TOP * (HELD / 4)) continue;
        score[u] = load16(from.scores + list * TOP + rank);
        place[u] = *reinterpret_cast<const u32*>(from.places + list * TOP + rank);
      }
#pragma unroll
      for (int u = 0; u < LOADS; u++) {
        const int i = start + u * GROW_THREADS, list = i / (HELD / 4), rank = i % (HELD / 4) * 4, to = (1 + list) * LINE + rank;
        if (i >= (D - 1) * TOP * (HELD / 4)) continue;
        const u32 word[4] = {score[u].x, score[u].y, score[u].z, score[u].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          shared_store4(base + SCORES + 4 * (to + k), rank + k < width ? word[k] : nothing);
          shared_store1(base + PLACES + to + k, place[u] >> (8 * k) & (TOP - 1));
        }
        if (rank == 0) {
          shared_store4(base + SCORES + 4 * (to + HELD), nothing);
          shared_store1(base + PLACES + to + HELD, 0);
        }
      }
    }
#else
    for (int i = tid; i < (D + 1) * LINE; i += GROW_THREADS) {                 // behind the last depth, and the last rank: nothing
      const int d = i / LINE, rank = i % LINE;
      const bool there = d < D && rank < width;
      const int id = there ? ids[at + d * TOP + rank] : -1;
      const u64 score = bits_of((double)(id >= 0 ? first_score(from.z[d * TOP + rank], from.norm[d]) : minus_infinity()));
      shared_store16(base + SCORES + 16 * i, make_uint4((u32)score, (u32)(score >> 32), id, 0));
    }
#endif
    __syncthreads();
    const Growth how = {correction, correction_depths, correction_ranks, spine, width, D};
    if (tid < 32) grow_tree(from, how, budget, caps, steps);
  }
  __syncthreads();
  const int n = shared_load4(base + COUNT);
  const long long length = lengths[r], root = roots[r];
  for (int i = tid; i < NODES; i += GROW_THREADS) {
    const long long to = (long long)r * NODES + i;
    const bool live = i < n;
    int depth = 0, parent = -1;
    long long token = live ? root : 0;
    float score = 0.f;
    u64 low = 0, high = 0;
    if (live && i) {
      depth = shared_load4(base + NODE * i + TAG) & 255;
      const u32 word = shared_load4(base + PARENT + 4 * i);
      parent = word & 255;
      token = (int)id_of(base, depth - 1, word >> 8);
      const uint2 cost = shared_load8(base + NODE * i + COST);
      score = (float)minus(0.0, double_of(cost.x, cost.y));
      for (int a = i; a > 0; a = shared_load4(base + PARENT + 4 * a) & 255) {
        if (a < 64) low |= 1ull << a; else high |= 1ull << (a - 64);
      }
    }
    tokens[to] = token;
    parents[to] = parent;
    depths[to] = depth;
    positions[to] = length + depth;
    logprob[to] = score;
    ancestors[2 * to] = live ? low | 1 : 0;
    ancestors[2 * to + 1] = high;
  }
  if (tid == 0) counts[r] = n;
}
