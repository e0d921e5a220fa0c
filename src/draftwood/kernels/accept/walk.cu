// Where walks begin (`start`), and the walk: a warp per row. From the root, follow the child that holds the chosen token; the first
// choice without a child is last. Chains of known tokens (forced rows) keep every node and emit the last node's choice.
#include "../rounded.cuh"

__device__ __forceinline__ int lowest(u32 bits) { return __popc((bits & (0u - bits)) - 1); }   // place of the lowest bit

// One block. where[r][n] = m of every verified node; front[r]: m of the node where row r begins, its root or of a chain of known tokens
// the one that is verified, -1: none.
extern "C" __global__ void __launch_bounds__(1024)
start(const long long* rows, const long long* nodes, const unsigned char* forced, const int* live, int M, int R, int N, int* where,
      int* front) {
  pdl_wait();
  pdl_go();
  for (int r = threadIdx.x; r < R; r += 1024) front[r] = -1;
  const int m = live ? min(M, load_int(live)) : M;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < m; i += 1024) {
    const int r = (int)load_long(rows + i), n = (int)load_long(nodes + i);
    where[(long long)r * N + n] = i;
    if (n == 0 || (forced && forced[r])) front[r] = i;
  }
}

// Grid (R), 32 threads. tokens, parents [R][N], counts [R]; where [R][N] -> m, choices and scores [M] as `decide` leaves them. Outputs padded with -1 (scores
// 0): path [R][P], accepted [R], emitted_tokens [R][P], emitted [R], final [R], logprobs [R][P], chosen [R][P] (m of each emitted token).
// A walk ends after P nodes at the latest: what it commits is a choice all the same.
extern "C" __global__ void __launch_bounds__(32)
walk(const long long* tokens, const long long* parents, const long long* counts, const unsigned char* forced, const int* rows,
     const int* where, const long long* choices, const float* scores, int N, int P, long long* path, long long* accepted,
     long long* emitted_tokens, long long* emitted, long long* final, float* logprobs, long long* chosen) {
  const int r = blockIdx.x, lane = threadIdx.x;
  pdl_wait();
  pdl_go();
  if (rows && r >= load_int(rows)) return;
  const long long at = (long long)r * N, to = (long long)r * P;
  const int n = (int)load_long(counts + r);
  int length = 0, steps = 0, last = 0;
  if (forced && forced[r]) {
    length = n;
    last = where[at + n - 1];
    for (int i = lane; i < min(n, P); i += 32) path[to + i] = i;
    if (lane == 0) {
      emitted_tokens[to] = choices[last];
      logprobs[to] = scores ? scores[last] : 0.f;
      chosen[to] = last;
    }
    steps = 1;
  } else {
    constexpr int HELD = 3;                            // nodes of a lane: lane, lane + 32, lane + 64
    const bool held = n <= 32 * HELD;                  // a tree always is
    long long token[HELD], choice[HELD];
    int parent[HELD], place[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int i = lane + 32 * k;
      const bool live = held && i < n;
      token[k] = live ? tokens[at + i] : -1;
      parent[k] = live ? (int)parents[at + i] : -1;
      place[k] = live ? where[at + i] : 0;
      choice[k] = live ? choices[place[k]] : 0;
    }
    int node = 0;
    while (true) {
      long long chosen_token = 0;
      if (held) {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
          const long long here = __shfl_sync(ALL_LANES, choice[k], node & 31);
          const int m = __shfl_sync(ALL_LANES, place[k], node & 31);
          if (node >> 5 == k) { chosen_token = here; last = m; }
        }
      } else {
        last = where[at + node];
        chosen_token = choices[last];
      }
      if (lane == 0) {
        path[to + length] = node;
        emitted_tokens[to + length] = chosen_token;
        logprobs[to + length] = scores ? scores[last] : 0.f;
        chosen[to + length] = last;
      }
      length++;
      if (length == P) break;
      int next = 0;                                    // children stand behind their parent; the first one counts
      if (held) {
#pragma unroll
        for (int k = HELD - 1; k >= 0; k--) {
          const bool match = lane + 32 * k > node && parent[k] == node && token[k] == chosen_token;
          const u32 all = __ballot_sync(ALL_LANES, match);
          if (all) next = 32 * k + lowest(all);
        }
      } else {
        for (int i = node + 1; i < n && !next; i += 32) {
          const bool match = i + lane < n && parents[at + i + lane] == node && tokens[at + i + lane] == chosen_token;
          const u32 all = __ballot_sync(ALL_LANES, match);
          if (all) next = i + lowest(all);
        }
      }
      if (!next) break;
      node = next;
    }
    steps = length;
  }
  for (int i = lane; i < P; i += 32) {
    if (i >= length) path[to + i] = -1;
    if (i >= steps) { emitted_tokens[to + i] = -1; logprobs[to + i] = 0.f; chosen[to + i] = -1; }
  }
  if (lane == 0) { accepted[r] = length; emitted[r] = steps; final[r] = choices[last]; }
}
