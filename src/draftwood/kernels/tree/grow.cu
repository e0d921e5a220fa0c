// Best-first growth: one block per row, the trees of ref.grow node for node.
//
// Every node offers one child at a time, its best not yet taken. Warp 0 takes the best offer (key, token, serial), adds it as a
// node, and there are two new offers: the parent's next child and the node's first. One warp has no other to hide behind: an
// instruction takes it two cycles and more, so nodes cost what they have instructions. A lane keeps the keys of two nodes' offers
// in registers; the rest lies in shared memory. What a taken offer leads to is known before it is taken: of each node there lie the
// two offers that would follow, and how the four are found that would follow these, so four lanes find them with one list of
// instructions, beside the search for the next best. Lists end with a score of -inf instead of a test. Sums of scores are float64,
// as in the reference (negated: the lowest cost is the best), and every float32 operation stands in its order, so equal candidates
// give equal trees. An offer that the cap refuses waits; when the cap rises it comes back behind everything offered before and
// ahead of everything after, in the order of refusal.
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
constexpr int HELD = 16;                               // with a table: ranks of a list at hand; SPECIAL reads on
constexpr u32 FRESH = 1u << 15, EPOCH = 1u << 16;      // serial = epoch, then refused ones in order, then fresh ones in order
// An offer in a word: place of the child | rank << 8 | depth << 16 (of the node that offers: the child's depth index) | flags.
constexpr u32 RANK = 1u << 8, DEPTH = 1u << 16, SPINE = 1u << 24, REFUSED = 1u << 25;
__device__ __forceinline__ int place_in(u32 offer) { return offer & 255; }
__device__ __forceinline__ int rank_in(u32 offer) { return offer >> 8 & 255; }
__device__ __forceinline__ int depth_in(u32 offer) { return offer >> 16 & 31; }

// Shared memory of a block, in bytes: nodes; links (parent, offer that was taken, cost as float64); how many nodes; then lists.
// A node: for each of the two offers that follow its own (of its next child, of its child's first child) two recipes of what
// follows (the next one, the first below), key and word; then its own offer's word and serial (of a refused one its place among the
// refused).
constexpr int FOLLOW = 32, SLOT = 48, OFFER = 2 * SLOT, NODE = 112;
constexpr int LINKS = NODE * NODES, COUNT = LINKS + 16 * NODES, BEHIND = COUNT + 16;
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
__device__ __forceinline__ void shared_store8(u32 a, u32 v, u32 w) {
#ifdef EMULATION
  memcpy(emulated::place(a, 8), &v, 4);
  memcpy(emulated::place(a, 8) + 4, &w, 4);
#else
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(a), "r"(v), "r"(w) : "memory");
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
struct Child { double score; u32 place; };             // of a list, or a score of -inf

// The child at place `at` of all lists, list * LINE + rank.
__device__ __forceinline__ Child child_at(const Source& from, const Growth& how, int at, u32 offer) {
#if TABLE
#if SPECIAL
  const int rank = rank_in(offer);
  if (rank >= HELD) {
    const int list = (at - rank) / LINE;
    if (rank >= how.width || list == EMPTY) return {(double)minus_infinity(), 0};
    if (list == 0) return {(double)first_score(from.z[rank], from.norm[0]), (u32)rank};
    return {(double)from.scores[(list - 1) * TOP + rank], from.places[(list - 1) * TOP + rank] & (TOP - 1u)};
  }
#endif
  const u32 score = shared_load4(from.base + SCORES + 4 * at), place = shared_load1(from.base + PLACES + at);
  return {(double)__uint_as_float(score), place};
#else
  const uint2 score = shared_load8(from.base + SCORES + 16 * at);
  return {double_of(score.x, score.y), (u32)rank_in(offer)};
#endif
}
// Where the list of the offered child's own children begins.
__device__ __forceinline__ int list_below(const Growth& how, u32 offer) {
  const int depth = depth_in(offer) + 1;
#if TABLE
  return (depth < how.D ? 1 + depth_in(offer) * TOP + place_in(offer) : EMPTY) * LINE;
#else
  return min(depth, how.D) * LINE;
#endif
}
__device__ __forceinline__ u32 id_of(u32 base, int depth, int place) {       // of a candidate of this depth index
#if TABLE
  return shared_load4(base + IDS + 4 * (depth * TOP + place));
#else
  return shared_load4(base + SCORES + 16 * (depth * LINE + place) + 8);
#endif
}

// How an offer is found: the child at `at`, of a node with this cost; `offer` lacks the child's place.
struct Recipe { double cost; u32 at, offer; };
struct Offer { u64 key; double cost; };                // key ~0: nothing
__device__ __forceinline__ Offer offer_of(const Growth& how, const Child& child, const Recipe& by) {
  Offer o = {~0ull, minus(by.cost, child.score)};
#if SPECIAL
  const bool spine = by.offer & SPINE;
  const int depth = depth_in(by.offer), rank = rank_in(by.offer);
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
// The first child of the one that this offer is about.
__device__ __forceinline__ u32 word_below(u32 offer) {
  return (offer & 31 * DEPTH) + DEPTH + (SPECIAL && (offer & (SPINE | 255 * RANK)) == SPINE ? SPINE : 0);
}
// Keeps an offer that follows a node's own, and the recipes of what follows that.
__device__ __forceinline__ void keep(const Growth& how, u32 slot, const Recipe& by, const Child& child) {
  const Offer o = offer_of(how, child, by);
  const u32 word = by.offer | child.place;
  const u64 cost = bits_of(by.cost), offered = bits_of(o.cost);
  shared_store16(slot, make_uint4((u32)cost, (u32)(cost >> 32), by.at + 1, by.offer + RANK));
  shared_store16(slot + 16, make_uint4((u32)offered, (u32)(offered >> 32), list_below(how, word), word_below(word)));
  shared_store16(slot + FOLLOW, make_uint4((u32)o.key, (u32)(o.key >> 32), word, 0));
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
      const u32 offer = shared_load4(base + NODE * (lane + 32 * i) + OFFER);
      token[i] = id_of(base, depth_in(offer), place_in(offer));
    }
  const u32 lowest = warp_min_u32(min(token[0], token[1]));
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (key[i] == best && token[i] == lowest) {
      const u32 mine = shared_load4(base + NODE * (lane + 32 * i) + OFFER + 4);
      if (mine < serial) { serial = mine; found = lane + 32 * i; }
    }
  const u32 earliest = warp_min_u32(serial);
  return (int)warp_min_u32(serial == earliest ? found : ~0u);
}
// The best offer's node, or -1. All lanes of warp 0.
__device__ __forceinline__ int best_offer(const Source& from, const u64 (&key)[2]) {
  const u32 a = (u32)(key[0] >> 32), b = (u32)(key[1] >> 32), high = warp_min_u32(min(a, b));
  const u32 first = __ballot_sync(ALL_LANES, a == high), second = __ballot_sync(ALL_LANES, b == high), all = first | second;
  if ((all & (all - 1)) | (first & second)) return high == ~0u ? -1 : best_of_equals(from.base, key[0], key[1], high);
  return 31 - leading_zeros(all) + (second ? 32 : 0);  // nearly always
}

// The cap has risen: offer again what it refuses no longer; what still is refused keeps its place among the refused.
__device__ __forceinline__ void offer_again(const Source& from, u64 (&key)[2], int n, int cap, u32 epoch) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int node = (threadIdx.x & 31) + 32 * i;
    const u32 at = from.base + NODE * node;
    const uint2 offer = shared_load8(at + OFFER);
    if (node >= n || !(offer.x & REFUSED) || rank_in(offer.x) >= cap) continue;
    const uint2 offered = shared_load8(at + SLOT);     // the cost from which its children go on
    key[i] = order_of(double_of(offered.x, offered.y));
    shared_store8(at + OFFER, offer.x & ~REFUSED, offer.y + epoch);
  }
}

// Take offers until the tree is full or nothing is offered. Warp 0.
__device__ __forceinline__ void grow_tree(const Source& from, const Growth& how, int budget, const int* caps, int steps) {
  const int lane = threadIdx.x & 31;
  const bool young = lane & 1, below = lane & 2;       // what this lane finds: of the new node; what is below, not next
  u32 recipe_at = (young ? SLOT : 0) + (below ? 16 : 0), slot_at = below ? SLOT : 0;
#ifndef EMULATION
  asm volatile("mov.u32 %0,%0;\nmov.u32 %1,%1;" : "+r"(recipe_at), "+r"(slot_at));               // kept, not found for every node
#endif
  int n = 1, step = 0, until = caps[0], cap = caps[1], e;
  u32 epoch = 0, refusals = 0, fresh = FRESH + 1;      // alike in all lanes
  u64 key[2] = {~0ull, ~0ull};                         // of the offers of nodes `lane` and `lane + 32`
  {
    const Recipe first = {0.0, 0, SPECIAL ? SPINE : 0};
    const Child child = child_at(from, how, 0, first.offer);
    const Offer o = offer_of(how, child, first);
    const u32 word = first.offer | child.place;
    const Recipe by = below ? Recipe{o.cost, (u32)list_below(how, word), word_below(word)} : Recipe{0.0, 1, first.offer + RANK};
    const Child next = child_at(from, how, by.at, by.offer);
    if (lane == 0) {
      key[0] = o.key;
      shared_store8(from.base + OFFER, word, FRESH);
    }
    if (!(lane & ~2)) keep(how, from.base + slot_at, by, next);
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
    const uint4 next = shared_load16(old + FOLLOW), first = shared_load16(old + SLOT + FOLLOW);
    const uint4 recipe = shared_load16(old + recipe_at);
    const u32 taken = shared_load4(old + OFFER);
    // Lane 1 has the recipe of the new node's next children: its cost.
    if (lane < 2) shared_store8(from.base + LINKS + 16 * n + 8 * lane, lane ? recipe.x : e, lane ? recipe.y : taken);
    if (n == budget) { n++; break; }
    const bool refused = rank_in(next.z) >= cap && (next.x & next.y) != ~0u;   // a first child never is
    const u64 again = refused ? ~0ull : (u64)next.y << 32 | next.x, child = (u64)first.y << 32 | first.x;
    key[0] = lane == e ? again : lane == n ? child : key[0];
    key[1] = lane + 32 == e ? again : lane + 32 == n ? child : key[1];
    const Recipe by = {double_of(recipe.x, recipe.y), recipe.z, recipe.w};
    const u32 node = young ? added : old;
    __syncwarp();                                      // everybody has read what lay there
    if (lane < 2)
      shared_store8(node + OFFER, young ? first.z : next.z | (refused ? REFUSED : 0),
                    young ? fresh + 1 : refused ? refusals : fresh);
    refusals += refused;
    n++;
    fresh += 2;
    __syncwarp();
    const Child found = child_at(from, how, by.at, by.offer);                  // travels while the best is found
    e = best_offer(from, key);
    if (lane < 4) keep(how, node + slot_at, by, found);
    __syncwarp();
  }
  if (lane == 0) shared_store4(from.base + COUNT, n);
}

// caps [steps][2]: while a tree has up to caps[i][0] nodes beyond the root, children have rank < caps[i][1] (<= width).
// Grid (R). ids, z, places [R][D][64] and norm [R][D] as `candidates` leaves them; with a table, scores and children
// [R][D - 1][64][64] as rank_children does. Outputs: tokens, parents, depths, positions [R][65] int64, counts [R] int64, logprob
// [R][65], ancestors [R][65][2].
extern "C" __global__ void __launch_bounds__(GROW_THREADS, 1)
grow(const int* ids, const float* z, const int* places, const float* norm, const long long* roots, const long long* lengths,
     const int* budgets, const int* rows, const float* scores, const unsigned char* children, const float* correction,
     int correction_depths, int correction_ranks, int D, int width, int spine, const int* caps, int steps, long long* tokens, long
     long* parents, long long* depths, long long* positions, long long* counts, float* logprob, u64* ancestors) {
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
      const uint4 link = shared_load16(base + LINKS + 16 * i);
      depth = depth_in(link.y) + 1;
      parent = link.x;
      token = (int)id_of(base, depth - 1, place_in(link.y));
      score = (float)minus(0.0, double_of(link.z, link.w));
      for (int a = i; a > 0; a = shared_load4(base + LINKS + 16 * a)) {
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
