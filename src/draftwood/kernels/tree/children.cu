// The children of every candidate that may become a parent, ranked with the previous-token table: a warp per list.
//
// s(x | a) = log_softmax over the candidates x of the next depth of z(x) + weight * PMI(a, x), best first (ties: the lower id). A
// list belongs to a token of a depth, whatever path leads to it, so all lists are known before a tree grows, and multiprocessors
// share them.
#include "numbers.cuh"

constexpr int TOP = 64, WARPS = 8, CHILDREN_THREADS = 32 * WARPS, SIEVE = 2048;
constexpr int SHORT = 2048;                            // rows of the table up to this length are read, longer ones searched

struct Desk {                                          // where a warp ranks one list
  alignas(16) u64 order[TOP];
  alignas(16) u32 better[32];
  float pmi[TOP];                                      // of each candidate; then the scores of those in `order`
};
struct Depth {                                         // candidates of the children's depth, by id; nothing comes last
  int ids[TOP];
  float z[TOP];
  u32 seen[SIEVE / 32];                                // bit t % SIEVE is set if a candidate t is among them
};

// PMI of each candidate after the token whose row of the table is cols[0..length), vals; of those not listed it is there already.
__device__ __forceinline__ void look_up(const Depth& next, Desk& desk, const int* cols, const float* vals, int length) {
  const int lane = threadIdx.x & 31;
  if (length <= SHORT) {                               // few of its tokens are candidates
#pragma unroll 1
    for (int k = lane; k < length; k += 4 * 32) {
      int token[4];
#pragma unroll
      for (int u = 0; u < 4; u++) token[u] = k + 32 * u < length ? cols[k + 32 * u] : -1;
#pragma unroll 1
      for (int u = 0; u < 4; u++) {
        const int t = u == 0 ? token[0] : u == 1 ? token[1] : u == 2 ? token[2] : token[3];
        if (t < 0 || !(next.seen[t / 32 % (SIEVE / 32)] >> (t & 31) & 1)) continue;
        int at = 0;
#pragma unroll
        for (int step = TOP / 2; step > 0; step >>= 1) if ((u32)next.ids[at + step] <= (u32)t) at += step;
        if (next.ids[at] == t) desk.pmi[at] = vals[k + 32 * u];
      }
    }
    return;
  }
#pragma unroll 1
  for (int c = lane; c < TOP; c += 32) {
    const int token = next.ids[c];
    int at = 0, end = length;
    while (at < end) { const int middle = (at + end) >> 1; if (cols[middle] < token) at = middle + 1; else end = middle; }
    if (token >= 0 && at < length && cols[at] == token) desk.pmi[c] = vals[at];
  }
}

// Scores of the candidates and their ranks; those of rank < most go to scores and places. Ranking is quadratic, so it is of those
// alone that reach a bound: the most-th of the lanes' better ones (24 of 64, or few more, for 16).
__device__ __forceinline__ void rank_list(const Depth& next, Desk& desk, float weight, int most, float* scores,
                                          unsigned char* places) {
  const int lane = threadIdx.x & 31;
  float score[2];
  u64 key[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int c = lane + 32 * i;
    score[i] = add_rn(mul_rn(desk.pmi[c], weight), next.z[c]);
    key[i] = rank_key(score[i], c);                    // places stand in the order of ids
  }
  const u32 better = (u32)(max(key[0], key[1]) >> 32);
  desk.better[lane] = better;
  const float peak = warp_max(fmaxf(score[0], score[1])), start = peak > minus_infinity() ? peak : 0.f;
  float sum = add_rn(exp_of(sub_rn(score[0], start)), exp_of(sub_rn(score[1], start)));
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum = add_rn(sum, __shfl_xor_sync(ALL_LANES, sum, d));
  const float norm = sub_rn(start, minus_log(sum > 0.f ? sum : 1.f));
  __syncwarp();                                        // everybody has read its pmi
  int reach = 0;
#pragma unroll
  for (int o = 0; o < 32; o += 4) {
    const uint4 some = *reinterpret_cast<const uint4*>(desk.better + o);
    reach += (some.x >= better) + (some.y >= better) + (some.z >= better) + (some.w >= better);
  }
  const u32 bound = warp_max_u32(reach >= most ? better : 0);                  // 0: of all, where most is above 32 or few are there
  u32 there[2];
#pragma unroll
  for (int i = 0; i < 2; i++) there[i] = __ballot_sync(ALL_LANES, key[i] && (u32)(key[i] >> 32) >= bound);
  const int first = __popc(there[0]), n = first + __popc(there[1]);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!(there[i] >> lane & 1)) continue;
    const int at = (i ? first : 0) + __popc(there[i] & ((1u << lane) - 1));
    desk.order[at] = key[i];
    desk.pmi[at] = score[i];
  }
  if (lane == 0 && n < TOP) desk.order[n] = 0;         // they are compared by two
  __syncwarp();
#pragma unroll 1
  for (int e = lane; e < n; e += 32) {
    const u64 mine = desk.order[e];
    int rank = 0;
#pragma unroll 4
    for (int o = 0; o < n; o += 2) {
      alignas(16) u64 pair[2];
      *reinterpret_cast<uint4*>(pair) = *reinterpret_cast<const uint4*>(desk.order + o);
      rank += (pair[0] > mine) + (pair[1] > mine);
    }
    if (rank < most) {
      scores[rank] = sub_rn(desk.pmi[e], norm);
      places[rank] = (unsigned char)choice_id(mine);
    }
  }
  for (int c = n + lane; c < most; c += 32) { scores[c] = minus_infinity(); places[c] = 0; }     // then bound is 0 and n all there are
}

// Grid (8, D - 1, R): parents at 8 of the 64 places of a depth. ids, z, places [R][D][64] as `candidates` leaves them; the table:
// row_ptr [known + 1], cols, vals, base [known]; most: of a list's children that growth may look at. scores, children
// [R][D - 1][64][64]: of parents at depth index 0 by rank, below by place (rank by id); lists of parents that cannot be are left alone.
extern "C" __global__ void __launch_bounds__(CHILDREN_THREADS)
rank_children(const int* ids, const float* z, const int* places, const int* budgets, const float* temperature, const int* rows,
              const int* row_ptr, const int* cols, const float* vals, const float* base, int known, int D, int candidates,
              double alpha, int most, float* scores, unsigned char* children) {
  __shared__ Depth next;
  __shared__ Desk desks[WARPS];
  __shared__ int parents[TOP];                         // ids of the parents' depth, -1: it cannot be one
  const int d = blockIdx.y, r = blockIdx.z, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  pdl_wait();
  pdl_go();
  const int budget = load_int(budgets + r);
  if ((rows && r >= load_int(rows)) || budget < d + 2) return;                 // its children would be at depth d + 2
  const long long at = ((long long)r * D + d) * TOP;
  if (tid < TOP) {
    const int id = ids[at + tid], child = ids[at + TOP + tid], place = places[at + TOP + tid];
    const float value = z[at + TOP + tid];
    parents[d ? places[at + tid] : tid] = tid < (d ? candidates : min(candidates, most)) ? id : -1;
    next.ids[place] = child;
    next.z[place] = tid < candidates ? value : minus_infinity();               // tokens beyond `candidates` count for nothing
    next.seen[tid] = 0;
  }
  static_assert(SIEVE / 32 == TOP, "a thread clears a word");
  __syncthreads();
  if (tid < TOP && next.ids[tid] >= 0) atomicOr(&next.seen[next.ids[tid] / 32 % (SIEVE / 32)], 1u << (next.ids[tid] & 31));
  const int place = blockIdx.x * WARPS + warp, token = parents[place];
  Desk& desk = desks[warp];
  const bool there = token >= 0 && token < known;
  const int low = there ? row_ptr[token] : 0, length = there ? row_ptr[token + 1] - low : 0;
  const float heat = temperature[r];
  desk.pmi[lane] = desk.pmi[lane + 32] = there ? base[token] : 0.f;
  __syncthreads();
  if (token < 0) return;
  look_up(next, desk, cols + low, vals + low, length);
  __syncwarp();
  const float weight = (float)(alpha / (double)(heat > 1e-5f ? heat : 1.f));
  const long long list = (((long long)r * (D - 1) + d) * TOP + place) * TOP;
  rank_list(next, desk, weight, most, scores + list, children + list);
}
