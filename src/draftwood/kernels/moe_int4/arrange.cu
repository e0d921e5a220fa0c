// x of every pair of the lists as the slots of crew.cu want it: [job][K64 step][token of the job][128 B], jobs in the order of
// `pairs`, so that the copy engine brings a step of a job at once. 4-byte words are in the order in which INT4 weights have their
// inputs: of 32 values, 16-byte chunk w holds word w of values 8 q .. 8 q + 7 for q = 0..3 (moe.cuh, WEIGHTS); chunk c of token t
// lies at place c ^ (t & 7). Pairs of no job are left out.
#include "../turned.cuh"
constexpr int PAIRS = 4, STEPS = HIDDEN / 64;  // pairs of a block: eight lanes each
constexpr int AT_ONCE = 8;                     // steps that a warp asks for before it waits for the first

// Grid: ceil(all / PAIRS), any number of warps. all, most: pairs and jobs that the lists have room for. beside: it runs beside the
// kernel before by rule (d) of common.cuh: x and the lists are older than that one, which does not touch `out`.
extern "C" __global__ void
arrange(const bf16* x, const int4* jobs, const int* njobs, const int* pairs, bf16* out, int all, int most, int beside) {
  __shared__ int2 jobs_of[PAIRS];              // first pair and pairs of the job
  const int tid = threadIdx.x, lane = tid & 31, chunk = lane & 7, begin = blockIdx.x * PAIRS, mine = begin + (lane >> 3);
  const int threads = blockDim.x, warps = threads >> 5;
  if (tid < PAIRS) jobs_of[tid] = make_int2(0, 0);
  if (beside) pdl_go_early();
  else {
    pdl_wait();
    pdl_go();                                  // go after wait: the next kernel reads lists ahead of its own
  }
  const int n = load_new(njobs), pair = load_new(pairs + min(mine, all - 1));
  __syncthreads();
  for (int j = tid; j < most; j += 4 * threads) {
    uint4 job[4];
#pragma unroll
    for (int u = 0; u < 4; u++) job[u] = load16_new(jobs + min(j + u * threads, most - 1));
#pragma unroll
    for (int u = 0; u < 4; u++)
      for (int k = 0; k < PAIRS; k++)
        if (j + u * threads < n && (u32)(begin + k - (int)job[u].y) < job[u].z)
          jobs_of[k] = make_int2((int)job[u].y, (int)job[u].z);
  }
  __syncthreads();
  const int first = jobs_of[lane >> 3].x, count = jobs_of[lane >> 3].y, token = mine - first;
  const bf16* from = x + (long long)(pair / TOPK) * HIDDEN + chunk * 8;
  bf16* to = out + (long long)first * HIDDEN + token * 64 + ((chunk ^ (token & 7)) << 3);
#pragma unroll 1
  for (int begun = tid >> 5; begun < STEPS; begun += warps * AT_ONCE) {
    uint4 v[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++)
      if (count && begun + u * warps < STEPS) v[u] = load16_new(from + (begun + u * warps) * 64);
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const uint4 w = turned(v[u]);
      if (count && begun + u * warps < STEPS) store16(to + (long long)(begun + u * warps) * count * 64, w);
    }
  }
  if (beside) pdl_wait();
}
