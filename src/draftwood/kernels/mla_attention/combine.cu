// Fold the partials of each (node, head) in the law's order and divide: out [tokens, heads, LATENT] bf16. Tokens: as many as may live.
// The partials are read once, so what counts is that enough of them are on their way (27 kB a multiprocessor at 4.4 TB/s). Two ways:
//  FOLDED 0            many lines: a warp has a (node, head), AHEAD partials on their way (4 kB; with four there were registers for a
//                    quarter fewer warps, and it took 7.0 us instead of 4.5). Grid ceil(tokens * heads / WARPS).
//  FOLDED 32, 64, 128  few lines, which may have hundreds of partials: a block has so many columns of a (node, head). Teams of FOLDED / 4 lanes
//                    prepare whole groups side by side; the first warp folds these. Grid (tokens * heads, ceil(LATENT / FOLDED)).
#include "layout.cuh"

#ifndef FOLDED
#define FOLDED 0
#endif

// A lane's columns of a partial: four, or four of each 128.
constexpr int VECS = FOLDED ? 1 : (LATENT + 127) / 128;
struct Piece {
  float4 o[VECS];
  float2 ml;
  __device__ __forceinline__ void load(const Partials& from, long long part, int c) {
    ml = from.ml[part];
#pragma unroll
    for (int i = 0; i < VECS; i++)
      if (c + i * 128 < LATENT) o[i] = __ldcs(reinterpret_cast<const float4*>(&from.o[part * LATENT + c + i * 128]));
  }
  __device__ __forceinline__ void join(const Piece& later) {
    float fa, fb;
    ml = fold_sums(ml, later.ml, fa, fb);
#pragma unroll
    for (int i = 0; i < VECS; i++) o[i] = fold4(o[i], later.o[i], fa, fb);
  }
};

// The partials of a (node, head), numbered in the law's order: of spans, then of its own keys.
struct Line {
  Partials shared, own;
  long long first, own_first;
  int step, heads, per, spans, all;      // per: spans of a group
  __device__ __forceinline__ Line(const Node& at, int depth, const Partials& s, const Partials& o, int span, int h, int n_heads)
      : shared(s), own(o), step(at.lines), heads(n_heads), per(span == UNIT ? PER : 1) {
    const int p = at.length + depth, base = base_of(p);
    spans = pieces_before(base, span);
    all = spans + (p + 1 - base > TILE ? 2 : 1);
    first = at.part + h;
    own_first = (long long)at.token * 2 * heads + h;
  }
  __device__ __forceinline__ void load(Piece& to, int i, int c) const {
    if (i < spans) to.load(shared, first + (long long)i * step, c);
    else to.load(own, own_first + (i - spans) * heads, c);
  }
  __device__ __forceinline__ bool begins(int i) const { return i < spans ? (i & (per - 1)) == 0 : i == spans; }   // a group
  __device__ __forceinline__ bool ends(int i) const { return i + 1 == all || begins(i + 1); }
};

// Columns c..c+3 as partials keep them (layout.cuh), divided; whole warps call it, lanes by ascending c.
__device__ __forceinline__ void put(bf16* to, int c, const float4& v, float scale, bool on) {
  if (COLUMNS) {                          // neighbours g and g + 1 exchange, so that each has a pair of columns: of h 0, of h 1
    const bool odd = c >> 2 & 1;
    const float a = __shfl_xor_sync(ALL_LANES, odd ? v.x : v.y, 1), b = __shfl_xor_sync(ALL_LANES, odd ? v.z : v.w, 1);
    to += (c >> 8) * 256 + (c >> 5 & 1) * 128 + (c >> 6 & 3) * 16 + odd * 8 + (c >> 2 & 6);
    if (!on) return;
    reinterpret_cast<u32*>(to)[0] = pack_bf16(__fmul_rn(odd ? a : v.x, scale), __fmul_rn(odd ? v.y : a, scale));
    reinterpret_cast<u32*>(to)[32] = pack_bf16(__fmul_rn(odd ? b : v.z, scale), __fmul_rn(odd ? v.w : b, scale));
  } else if (on) {
    to += (c & ~15) + (c >> 2 & 3) * 2;
    reinterpret_cast<u32*>(to)[0] = pack_bf16(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale));
    reinterpret_cast<u32*>(to)[4] = pack_bf16(__fmul_rn(v.z, scale), __fmul_rn(v.w, scale));
  }
}

#if FOLDED == 0
constexpr int WARPS = 4, THREADS = WARPS * 32, AHEAD = 2, RESIDENT = 4;

__device__ __forceinline__ void fold_line(const Line& line, bf16* to) {
  const int c = (threadIdx.x & 31) * 4;
  Piece ahead[AHEAD], group, sum;
#pragma unroll
  for (int i = 0; i < AHEAD; i++) if (i < line.all) line.load(ahead[i], i, c);
  bool fresh = true;
  for (int i0 = 0; i0 < line.all; i0 += AHEAD)
#pragma unroll
    for (int e = 0; e < AHEAD; e++) {
      const int i = i0 + e;
      if (i >= line.all) continue;
      if (line.begins(i)) group = ahead[e]; else group.join(ahead[e]);
      if (i + AHEAD < line.all) line.load(ahead[e], i + AHEAD, c);
      if (!line.ends(i)) continue;
      if (fresh) sum = group; else sum.join(group);
      fresh = false;
    }
  const float scale = __frcp_rn(sum.ml.y);
#pragma unroll
  for (int i = 0; i < VECS; i++) put(to, c + i * 128, sum.o[i], scale, c + i * 128 < LATENT);
}
#else
constexpr int LANES = FOLDED / 4, THREADS = 256, TEAMS = THREADS / LANES, RESIDENT = 4;
static_assert(LANES >= 8 && LANES <= 32, "teams are parts of a warp, no more of them than it has lanes");

// Group g of the line: its spans, or the node's own keys.
__device__ __forceinline__ Piece fold_group(const Line& line, int g, int groups, int c) {
  const int from = g == groups ? line.spans : g * line.per, to = g == groups ? line.all : min(from + line.per, line.spans);
  constexpr int MOST = PER > 2 ? PER : 2;
  Piece some[MOST];
#pragma unroll
  for (int i = 0; i < MOST; i++) if (from + i < to) line.load(some[i], from + i, c);
#pragma unroll
  for (int i = 1; i < MOST; i++) if (from + i < to) some[0].join(some[i]);
  return some[0];
}

// Lane i has (m, l) of the i-th of n groups. Each gets the factors of its fold: the running maximum is that of a fold one by one, because a
// maximum is exact. m: of all before, -inf if there are none; becomes that of all.
__device__ __forceinline__ void factors(float2 ml, int n, float& m, float& fa, float& fb) {
  const int lane = threadIdx.x & 31;
  float top = fmaxf(lane < n ? ml.x : minus_infinity(), m);
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const float o = __shfl_up_sync(ALL_LANES, top, d); if (lane >= d) top = fmaxf(top, o); }
  float under = __shfl_up_sync(ALL_LANES, top, 1);
  if (lane == 0) under = m;
  fold_scales(under, ml.x, top, fa, fb);
  m = __shfl_sync(ALL_LANES, top, n - 1);
}

__device__ __forceinline__ void fold_line(const Line& line, bf16* to) {
  __shared__ float4 box[TEAMS][LANES], steps[TEAMS];            // a step: both factors, l
  __shared__ float2 sums[TEAMS];
  const int team = threadIdx.x / LANES, lane = threadIdx.x % LANES, c = blockIdx.y * FOLDED + lane * 4;
  const int groups = (line.spans + line.per - 1) / line.per;
  float m = minus_infinity(), l = 0.f;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int g0 = 0; g0 <= groups; g0 += TEAMS) {
    if (g0 > 0) __syncthreads();                               // the first warp has folded the last ones
    if (g0 + team <= groups) {
      const Piece one = fold_group(line, g0 + team, groups, c);
      box[team][lane] = one.o[0];
      if (lane == 0) sums[team] = one.ml;
    }
    __syncthreads();
    if (threadIdx.x >= 32) continue;
    const int n = min(TEAMS, groups + 1 - g0);
    const float2 mine = (int)threadIdx.x < n ? sums[threadIdx.x] : make_float2(0.f, 0.f);
    float fa, fb;
    factors(mine, n, m, fa, fb);
    if ((int)threadIdx.x < n) steps[threadIdx.x] = make_float4(fa, fb, mine.y, 0.f);
    __syncwarp();
    int i = 0;
    if (g0 == 0) sum = box[0][lane], l = steps[0].z, i = 1;
#pragma unroll 4
    for (; i < n; i++) {
      const float4 f = steps[i];
      sum = fold4(sum, box[i][lane], f.x, f.y);
      l = fold(l, f.z, f.x, f.y);
    }
  }
  if (threadIdx.x < 32) put(to, c, sum, __frcp_rn(l), (int)threadIdx.x < LANES && c < LATENT);
}
#endif

// The node of the at-th line, if there is one. L1 is not asked: it may hold an older step's.
struct Known {
  Node node;
  int depth = -1, span;
  bool on;
  __device__ __forceinline__ Known(int at, const Head* head, const Node* live, int tokens, const u64* masks, int words, int heads) {
    const int n = at / heads, nodes = load_new(&head->live);
    span = load_new(&head->span);
    on = n < tokens;
    if (on) node = load_all_new(&live[n]);                     // there is room for it, whether or not it is one
    on = on && n < nodes;
    if (on) for (int w = 0; w < words; w++) depth += __popcll(load_new(&masks[(size_t)node.token * words + w]));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) mla_combine(
    const Head* head, const Node* live, int tokens, const u64* masks, int words, int heads, float* o, float2* ml, float* own_o,
    float2* own_ml, bf16* out) {
  int at = FOLDED ? blockIdx.x : blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
#if COLUMNS
  // Ahead of the wait: the plan and masks are older than attention, which waits and then goes (rule (c) of common.cuh).
  Known known(at, head, live, tokens, masks, words, heads);
  pdl_wait();
  pdl_go();
  while (known.on) {
    const Line line(known.node, known.depth, {o, ml}, {own_o, own_ml}, known.span, at % heads, heads);
    fold_line(line, &out[((size_t)known.node.token * heads + at % heads) * LATENT]);
    if (FOLDED) return;                                        // the grid has a block for each line
    at += gridDim.x * (THREADS / 32);
    known = Known(at, head, live, tokens, masks, words, heads);
  }
#else
  const int n = at / heads, h = at % heads;
  pdl_wait();
  pdl_go();
  if (n >= tokens) return;
  const Node node = live[n];                                   // there is room for it, whether or not it is one
  if (n >= head->live) return;
  const Line line(node, depth_of(masks, words, node.token), {o, ml}, {own_o, own_ml}, head->span, h, heads);
  fold_line(line, &out[((size_t)node.token * heads + h) * LATENT]);
#endif
}
