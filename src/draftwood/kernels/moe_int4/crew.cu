// W4A16 experts of scaled weights for many tokens each, by the warp-group products of sm_90: a crew of sixteen warps that multiply
// and one that fetches. A warp that multiplies owns 16 rows x whole K and the ring of its weights, which the copy engine fills; it
// meets the others only at the gates of x (`full`, `empty`), so one group of four warps expands weights while the products of
// another run. Blocks stay: each takes every gridDim.x-th unit (256 rows of a job), and fetches for the next while results leave.
//
// x of gate_up and h come as the slots want them, a step of a job's tokens in a row (arrange.cu, store_hidden), so that the copy
// engine fetches them: 4-byte words are in the weights' order of k, of 32 values 16-byte chunk w holds for q = 0..3 word w of
// values 8 q .. 8 q + 7, what the four lanes of a B fragment read. So both parts of a call are this form's. Four warps that copied
// 16 bytes a lane of rows of x took issue slots from those that multiply.
//
// Shared memory: CHUNKS chunks of x (SPAN slots of TOKENS*8 tokens x 128 B each, see ../warpgroup.cuh), DEPTH chunks of SPAN steps
// of weights and scales for each warp that multiplies, the units of this block, the gates.
#include "moe.cuh"
#include "../warpgroup.cuh"
#include "meet.cuh"

#ifndef SCALED
#error "the scale of an exact sum is applied between the products of two groups"
#endif
#ifndef TOKENS
#define TOKENS 16        // most 8-token tiles of a job
#endif
#ifndef WARPS
#define WARPS 16         // that multiply
#endif
#ifndef DEPTH
#define DEPTH 2          // chunks of weights in a warp's ring
#endif
#ifndef CHUNKS
#define CHUNKS 2         // of x
#endif
constexpr int FETCHERS = 4, THREADS = 32 * (WARPS + FETCHERS), ST = Part<PART>::STEPS, ROW_BLOCKS = Part<PART>::TILES / WARPS;
constexpr int MOST_UNITS = 64;                 // of a block: CREW_UNITS of op.py
constexpr int SPAN = 4, BODY = CHUNKS * SPAN;  // K64 steps of a chunk, of weights and of x, and of all chunks of x
constexpr int CHUNK = SPAN * (TILE_BYTES + SCALE_BYTES), X_SLOT = TOKENS * 1024;
constexpr u32 X_CHUNK = SPAN * X_SLOT, RINGS = CHUNKS * X_CHUNK, JOBS = RINGS + WARPS * DEPTH * CHUNK,
              FULL = JOBS + MOST_UNITS * 16, EMPTY = FULL + CHUNKS * 8, WEIGHTS = EMPTY + CHUNKS * 8;
static_assert(Part<PART>::TILES % WARPS == 0, "a block's rows divide the expert's");
static_assert(ST % BODY == 0, "a unit ends with the last chunk of x");

struct Weights { u32 a[4][4]; };               // A fragments of a step
__device__ __forceinline__ void expand_step(Weights& v, const uint4& w, const uint2& s) {
  const Group first = expand(w.x, w.y, s.x), second = expand(w.z, w.w, s.y);
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int p = 0; p < 4; p++) { v.a[k][p] = first.a[k][p]; v.a[2 + k][p] = second.a[k][p]; }
}

// The units of this block: number i is row block `part` of the job.
struct Unit {
  int expert, first, count, part;
  __device__ __forceinline__ int tiles() const { return (count + 7) >> 3; }
};
__device__ __forceinline__ Unit unit_at(u32 sm, int i) {
  const uint4 v = shared_load16(sm + JOBS + i * 16);
  return {(int)v.x, (int)v.y, (int)v.z, (int)v.w};
}
// Lists this block's units and returns how many there are; the caller's barrier ends it. Jobs are ordered by width, widest first,
// and their units dealt to and fro, so that blocks with equally many units end together (dealt in the order of experts, the last
// of 132 blocks ended a tenth later). Four threads find a job's place.
__device__ __forceinline__ int list_units(u32 sm, const int4* jobs, const int* njobs) {
  const int n = load_new(njobs), all = n * ROW_BLOCKS, grid = gridDim.x, block = blockIdx.x;
  auto unit = [&](int i) { return i * grid + (i & 1 ? grid - 1 - block : block); };
  for (int j = threadIdx.x; j < n; j += THREADS) shared_store4(sm + j * 4, (u32)load_new(&jobs[j].z) + 7 >> 3);
  __syncthreads();
  for (int first = 0; first < n; first += THREADS / 4) {
    const int j = first + threadIdx.x / 4;
    const u32 mine = j < n ? shared_load4(sm + j * 4) : 0;                // beyond n places are written
    int rank = 0;
    for (int k = threadIdx.x % 4; k < n; k += 4) {
      const u32 other = shared_load4(sm + k * 4);
      rank += other > mine || (other == mine && k < j);
    }
    rank += __shfl_xor_sync(ALL_LANES, rank, 1);
    rank += __shfl_xor_sync(ALL_LANES, rank, 2);
    if (j < n && threadIdx.x % 4 == 0) shared_store4(sm + (n + rank) * 4, j);
  }
  __syncthreads();
  int units = all / grid;
  if (unit(units) < all) units++;
  for (int i = threadIdx.x; i < units; i += THREADS) {
    uint4 job = load16_new(jobs + shared_load4(sm + (n + unit(i) / ROW_BLOCKS) * 4));
    job.w = unit(i) % ROW_BLOCKS;
    shared_store16(sm + JOBS + i * 16, job);
  }
  return units;
}

// ---------------------------------------------------------------- fetching x
struct Place {                                 // of a chunk of x
  u32 at, parity;
  __device__ __forceinline__ void next() { if (++at == CHUNKS) { at = 0; parity ^= 1; } }
};
// x or h lies as the slots want it: an elected lane asks the copy engine for a step's tokens at once.
__device__ __forceinline__ void fetch(u32 sm, const bf16* x, int units) {
  Place place = {0, 1};
  for (int i = 0; i < units; i++) {
    const Unit u = unit_at(sm, i);
    const bf16* from = x + (long long)u.first * Part<PART>::K;
    for (int chunk = 0; chunk < ST / SPAN; chunk++) {
      mbarrier_wait(sm + EMPTY + place.at * 8, place.parity);
      mbarrier_expect(sm + FULL + place.at * 8, SPAN * u.count * 128);
#pragma unroll
      for (int s = 0; s < SPAN; s++, from += u.count * 64)
        bulk_copy(sm + place.at * X_CHUNK + s * X_SLOT, from, u.count * 128, sm + FULL + place.at * 8);
      place.next();
    }
  }
}

// ---------------------------------------------------------------- multiplying
// The ring of a warp's weights: chunks of SPAN steps, of all units one after the other.
struct Ring {
  const char *w, *s;                           // the next chunk to ask for
  int left, unit;                              // chunks of this unit still to be asked for; its number
  u32 at, chunk, parity;                       // the chunk that is used now
};
__device__ __forceinline__ void aim(Ring& r, u32 sm, const uint4* W, const uint2* S, int units) {
  r.left = 0;
  if (r.unit >= units) return;
  const Unit u = unit_at(sm, r.unit);
  const long long first = ((long long)u.expert * Part<PART>::TILES + u.part * WARPS + (threadIdx.x >> 5)) * ST;
  r.w = (const char*)W + first * TILE_BYTES;
  r.s = (const char*)S + first * SCALE_BYTES;
  r.left = ST / SPAN;
}
// Asks for the next chunk, in the place of one that all lanes have read.
__device__ __forceinline__ void refill(Ring& r, u32 to, u32 gate, u32 sm, const uint4* W, const uint2* S, int units) {
  __syncwarp();
  if (r.left == 0) return;
  bulk_copies(to, r.w, SPAN * TILE_BYTES, to + SPAN * TILE_BYTES, r.s, SPAN * SCALE_BYTES, gate);
  r.w += SPAN * TILE_BYTES; r.s += SPAN * SCALE_BYTES;
  if (--r.left == 0) { r.unit++; aim(r, sm, W, S, units); }
}

// h of a job: [K64 step of down][token][128 bytes with the chunks where a slot of x has them]; jobs in the order of `pairs`.
template <int NT> __device__ __forceinline__ void store_hidden(const float (&acc)[NT][4], const Unit& u, int tile, bf16* h) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, i = 2 * q + (g & 1);      // even g store the even tokens
  const int chunk = (tile & 4) + (g >> 1);
  h += (long long)u.first * WIDTH + (tile >> 3) * (u.count * 64) + i * 64 + (chunk ^ i) * 8 + (tile & 3) * 2;
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const float even = swiglu(finish(acc[t][0]), finish(acc[t][2])), odd = swiglu(finish(acc[t][1]), finish(acc[t][3]));
    const float other = __shfl_xor_sync(ALL_LANES, g & 1 ? even : odd, 4);
    const u32 both = g & 1 ? pack_bf16(other, odd) : pack_bf16(even, other);
    if (t * 8 + i < u.count) *reinterpret_cast<u32*>(h + t * 512) = both;
  }
}
template <int NT>
__device__ __forceinline__ void store_sums(const float (&acc)[NT][4], const Unit& u, int tile, const int* pairs, float* y) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  y += tile * 16 + g;
#pragma unroll
  for (int first = 0; first < NT; first += 4) {        // eight places are looked up at a time
    int pair[4][2];
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (first + t < NT) pair[t][e] = load_new(pairs + u.first + min((first + t) * 8 + 2 * q + e, u.count - 1));
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (first + t < NT && (first + t) * 8 + 2 * q + e < u.count) {
          float* at = y + (long long)pair[t][e] * HIDDEN;
          at[0] = finish(acc[first + t][e]); at[8] = finish(acc[first + t][2 + e]);
        }
  }
}

// A product whose columns are named by the low word of their descriptor (see ../warpgroup.cuh), which grows by NEXT_K16: that takes
// two instructions a product where an address takes five.
#ifdef EMULATION
constexpr u32 NEXT_K16 = 32, BYTES = 1;
inline u32 columns_at(u32 b) { return b; }
template <int T> inline void product(float (&d)[T][4], const u32 (&a)[4], u32 columns) { warpgroup_mma<T>(d, a, columns); }
#else
constexpr u32 NEXT_K16 = 2, BYTES = 16;
__device__ __forceinline__ u32 columns_at(u32 b) { return b / 16 | 1u << 16; }
template <int T> __device__ __forceinline__ void product(float (&d)[T][4], const u32 (&a)[4], u32 columns);
#define PRODUCT(T, N, A0, A1, A2, A3, B)                                                                      \
  template <> __device__ __forceinline__ void product<T>(float (&d)[T][4], const u32 (&a)[4], u32 columns) {  \
    asm volatile("{ .reg .b64 b; mov.b64 b,{%" #B ",0x40000040};"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WG_S##T "},"                     \
                 "{%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "},b,1,1,1,0; }"                                          \
                 : WG_D##T : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(columns));                        \
  }
PRODUCT(1, 8, 4, 5, 6, 7, 8)
PRODUCT(2, 16, 8, 9, 10, 11, 12)
PRODUCT(3, 24, 12, 13, 14, 15, 16)
PRODUCT(4, 32, 16, 17, 18, 19, 20)
PRODUCT(5, 40, 20, 21, 22, 23, 24)
PRODUCT(6, 48, 24, 25, 26, 27, 28)
PRODUCT(7, 56, 28, 29, 30, 31, 32)
PRODUCT(8, 64, 32, 33, 34, 35, 36)
PRODUCT(9, 72, 36, 37, 38, 39, 40)
PRODUCT(10, 80, 40, 41, 42, 43, 44)
PRODUCT(11, 88, 44, 45, 46, 47, 48)
PRODUCT(12, 96, 48, 49, 50, 51, 52)
PRODUCT(13, 104, 52, 53, 54, 55, 56)
PRODUCT(14, 112, 56, 57, 58, 59, 60)
PRODUCT(15, 120, 60, 61, 62, 63, 64)
PRODUCT(16, 128, 64, 65, 66, 67, 68)
#endif

template <int NT>
__device__ __forceinline__ void multiply(u32 sm, Ring& r, u32& parity, const uint4* W, const uint2* S, int units, const int* pairs,
                                         const Unit& u, Out* out) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 ring = sm + RINGS + warp * (DEPTH * CHUNK), gates = sm + WEIGHTS + warp * (DEPTH * 8);
  float acc[NT][4];
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[t][i] = 0.f;
  Weights v;
  uint4 w;
  uint2 s;
  auto look = [&](int i) {                     // at the packed weights of step i of the chunk, a step ahead
    w = shared_load16(ring + r.at + i * TILE_BYTES + lane * 16);
    s = shared_load8(ring + r.at + SPAN * TILE_BYTES + i * SCALE_BYTES + (lane >> 2) * 8);
  };
  mbarrier_wait(gates + r.chunk, r.parity);
  look(0);
#pragma unroll 1
  for (int st = 0; st < ST; st += BODY) {
#pragma unroll
    for (int i = 0; i < BODY; i++) {
      const int chunk = i / SPAN;              // of x
      warpgroup_wait<0>();
      if (i % SPAN == 0 && (st || i)) warp_arrives(sm + EMPTY + (chunk + CHUNKS - 1) % CHUNKS * 8);
      expand_step(v, w, s);
      if ((i + 1) % SPAN) look((i + 1) % SPAN);
      if (i % SPAN == 0) mbarrier_wait(sm + FULL + chunk * 8, parity);
      warpgroup_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) product<NT>(acc, v.a[k], columns_at(sm) + i * (X_SLOT / BYTES) + k * NEXT_K16);
      warpgroup_commit();
      if ((i + 1) % SPAN == 0) {
        refill(r, ring + r.at, gates + r.chunk, sm, W, S, units);
        r.at += CHUNK; r.chunk += 8;
        if (r.chunk == DEPTH * 8) { r.at = 0; r.chunk = 0; r.parity ^= 1; }
        if (i < BODY - 1 || st + BODY < ST) { mbarrier_wait(gates + r.chunk, r.parity); look(0); }
      }
    }
    parity ^= 1;
  }
  warpgroup_wait<0>();
  warp_arrives(sm + EMPTY + (CHUNKS - 1) * 8);
#ifdef GATE_UP
  store_hidden(acc, u, u.part * WARPS + warp, out);
#else
  store_sums(acc, u, u.part * WARPS + warp, pairs, out);
#endif
}

#ifdef GATE_UP
#define ENTRY gate_up_crew
#else
#define ENTRY down_crew
#endif
// Grid: any number of blocks that gives none more than MOST_UNITS; best as many as are resident. early: see moe.cuh.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
ENTRY(const uint4* __restrict__ W, const uint2* __restrict__ S, const bf16* __restrict__ x, const int4* __restrict__ jobs,
      const int* __restrict__ njobs, const int* __restrict__ pairs, Out* __restrict__ out, int early) {
  DYNAMIC_SHARED(unsigned char, smem);
  const u32 sm = shared_address(smem);
  const int warp = threadIdx.x >> 5;
  if (!early) pdl_wait();
  const int units = list_units(sm, jobs, njobs);
  if (threadIdx.x == 0) {
    for (int i = 0; i < CHUNKS; i++) {
      mbarrier_begin(sm + FULL + i * 8, 1);
      mbarrier_begin(sm + EMPTY + i * 8, WARPS);
    }
    for (int i = 0; i < WARPS * DEPTH; i++) mbarrier_begin(sm + WEIGHTS + i * 8, 1);
    mbarriers_begun();
  }
  publish();                                   // list_units worked where the copy engine puts x
  __syncthreads();
  if (warp >= WARPS) {
    give_registers<32>();                      // a group of warps hands them over: a 17th warp alone would leave each 96
    pdl_wait();                                // x and h are the kernel before's
    if (warp == WARPS && elected()) fetch(sm, x, units);
    return;
  }
  take_registers<112>();
  Ring r = {nullptr, nullptr, 0, 0, 0, 0, 0};
  aim(r, sm, W, S, units);
#pragma unroll 1
  for (int i = 0; i < DEPTH; i++)
    refill(r, sm + RINGS + (warp * DEPTH + i) * CHUNK, sm + WEIGHTS + (warp * DEPTH + i) * 8, sm, W, S, units);
  pdl_wait();
  pdl_go();                                    // go after wait: `down` reads the lists ahead of its own
  u32 parity = 0;                              // of the chunks of x
  // Units come by width: ptxas runs all products of a loop in sequence that holds those of several widths. The first one's loop is
  // jumped to: to pass ten others took 10,000 clocks of waiting for instructions.
  int i = 0;
#define RUN(N) \
  case N: \
    if constexpr (N <= TOKENS) { \
      _Pragma("unroll 1") for (Unit u; i < units && (u = unit_at(sm, i)).tiles() == N; i++) \
        multiply<N>(sm, r, parity, W, S, units, pairs, u, out); \
    }
  switch (units ? unit_at(sm, 0).tiles() : 0) {
    RUN(16) RUN(15) RUN(14) RUN(13) RUN(12) RUN(11) RUN(10) RUN(9) RUN(8) RUN(7) RUN(6) RUN(5) RUN(4) RUN(3) RUN(2) RUN(1)
    default:;
  }
#undef RUN
}
