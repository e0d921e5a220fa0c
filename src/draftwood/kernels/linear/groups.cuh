// What the kernels of warp-group products share: a warp's weights as A fragments, and x's way to where the tensor cores read it.
// Included after fold.cuh and warpgroup.cuh.
#pragma once

struct Weights { u32 a[4][4]; };                 // of a warp: a K64 step of 16 rows
__device__ __forceinline__ void fetch(Weights& w, u32 from) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint4 v = shared_load16(from + k * 512);
    w.a[k][0] = v.x; w.a[k][1] = v.y; w.a[k][2] = v.z; w.a[k][3] = v.w;
  }
}

// x of COLUMNS tokens, K64 steps one after another, copied by WARPS warps: warp w takes tokens w, w + WARPS, ... of the block, a lane
// two values of each. A token's 128 bytes of a step: chunk c = 4b + w holds, for q = 0..3, word w of x[32b + 8q .. +7]: what the
// four lanes of a B fragment read, in the order of k that the weights have. Copies of 4 bytes a lane put it there.
template <int COLUMNS, int WARPS> struct Tokens {
  const bf16 *from, *any;
  long long pass;                                // elements from one of a warp's tokens to the next
  int live, left, chunk, warp;                   // live: tokens from the warp's first one on; left: values of K from the lane's on
  u32 put;
  // first: x of the block's first token at its first step; tokens: how many are there, the others are not copied; values: of K.
  __device__ __forceinline__ Tokens(const bf16* first, long long stride, int tokens, int values, u32 to) {
    const int lane = threadIdx.x & 31;
    warp = threadIdx.x >> 5;
    any = first;
    from = first + warp * stride + lane * 2;
    pass = WARPS * stride;
    live = min(tokens, COLUMNS) - warp;
    left = values - lane * 2;
    chunk = lane >> 4 << 2 | (lane & 3);
    put = to + warp * 128 + (lane >> 2 & 3) * 4;
  }
  // The next step, to its slot `o` bytes from the first one, or nothing.
  __device__ __forceinline__ void load(bool on, u32 o) {
    if (on) {
      const bf16* x = from;
#pragma unroll
      for (int p = 0; p < (COLUMNS + WARPS - 1) / WARPS; p++) {
        const u32 to = put + o + p * (WARPS * 128) + ((chunk ^ (warp + p * WARPS & 7)) << 4);
        if (TAIL) { if (p * WARPS < live) copy4_or_zero(left > 0, to, left > 0 ? x : any); }
        else copy4_if(p * WARPS < live, to, x);
        x += pass;
      }
    }
    from += 64; left -= 64;
  }
};
