// Where results of fed.cu go, from a group's accumulators: d[t] of lane (g, q) is rows g, g + 8 of the warp's 16 and tokens 8t + 2q
// and 8t + 2q + 1. No branches: the chains of all tiles may run side by side.
#pragma once

// silu(g) = g / (1 + exp(-g)) with the division's bits, but without its slow path, a branch for each value that kept them one after
// another (4,160 clocks a tile of 144 tokens; others' stores took 2,000): a reciprocal made exact, a quotient and what it leaves.
// Tests compare all 2^32 values with silu's.
__device__ __forceinline__ float silu_at_once(float g) {
  float d = 1.f + exponential(-g);
  const bool large = g < -64.f;                  // else the reciprocal of d would be no normal number
  if (large) d *= 0x1p-64f;
  const float about = reciprocal(d), r = fma_rn(fma_rn(-d, about, 1.f), about, about);
  const float q = g * r, rest = fma_rn(-d, q, g);
  float v = fma_rn(rest, r, q);
  if (rest != rest) v = g * about;               // g or d is infinite
  if (large) v *= 0x1p-64f;
  if (fabsf(g) < 0x1p-40f) v = g * .5f;          // d is 2; the rest could be no normal number
  return v;
}

// Of a SwiGLU (rows g are gates, rows g + 8 their ups) and in fp32: by each warp from its registers. row0: the warp's first row.
__device__ __forceinline__ void store(const float (&d)[TILES][4], const Output& out, int row0, int first, int n) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const long long stride = out.stride;
  if (GLU) {
    bf16* y = (bf16*)out.y + (first + g) * stride + row0 / 2 + 2 * q;
#pragma unroll
    for (int t = 0; t < TILES; t++, y += 8 * stride)
      store4_if(t * 8 + g < n - first, y, transposed(pack_bf16(silu_at_once(d[t][0]) * d[t][2], silu_at_once(d[t][1]) * d[t][3])));
  } else {
    float* y = (float*)out.y + (first + 2 * q) * stride + row0 + g;
#pragma unroll
    for (int t = 0; t < TILES; t++, y += 8 * stride)
#pragma unroll
      for (int i = 0; i < 4; i++)
        store4_if(t * 8 + 2 * q + (i & 1) < n - first, y + (i & 1) * stride + (i >> 1) * 8, __float_as_uint(d[t][i]));
  }
}

// In bf16, by the four warps of a group by way of shared memory, half of the tokens at a time: a token's 64 results are 128 bytes
// in a row there, so that a warp stores whole lines (pieces of 32 bytes cost a store eight lines) and reads the residual so. Chunk
// c of token t lies at place c ^ (t & 7). stage: the group's RESULTS bytes; row_tile: the group's first; row_tiles: that there
// are. Shapes whose rows do not start on 16 bytes take other kernels.
constexpr int HALF = (TILES + 1) / 2, RESULTS = HALF * 1024;
__device__ __forceinline__ void store_lines(const float (&d)[TILES][4], const Output& out, u32 stage, int row_tile, int row_tiles,
                                            int first, int n) {
  constexpr int ROUNDS = (HALF + 1) / 2;         // of 16 tokens
  const int thread = thread_here(), lane = thread & 31, warp = thread >> 5 & 3, chunk = thread & 7, token = thread >> 3 & 15;
  const u32 put = stage + (lane & 7) * 128 + ((2 * warp + (lane >> 3 & 1)) ^ (lane & 7)) * 16;
  const u32 get = stage + token * 128 + (chunk ^ (token & 7)) * 16;
  const long long at = (first + token) * out.stride + row_tile * 16 + chunk * 8;
  const bool there = row_tile + chunk / 2 < row_tiles, adds = out.residual != nullptr;
#pragma unroll
  for (int begin = 0; begin < TILES; begin += HALF) {
    group_meets(thread >> 7);                    // all have read what was there
#pragma unroll
    for (int t = begin; t < begin + HALF && t < TILES; t++)
      store_turned(put + (t - begin) * 1024, pack_bf16(d[t][0], d[t][1]), pack_bf16(d[t][2], d[t][3]));
    group_meets(thread >> 7);
    const int left = there ? min(n - first, min(TILES, begin + HALF) * 8) - begin * 8 - token : 0;
    const long long from = at + begin * 8 * out.stride;
    uint4 r[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) r[i] = load16_if(adds && i * 16 < left, out.residual + from + i * 16 * out.stride);
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      uint4 v = i * 16 < left ? shared_load16(get + i * 2048) : make_uint4(0, 0, 0, 0);
      if (adds) v = make_uint4(add_pair(v.x, r[i].x), add_pair(v.y, r[i].y), add_pair(v.z, r[i].z), add_pair(v.w, r[i].w));
      store16_if(i * 16 < left, (bf16*)out.y + from + i * 16 * out.stride, v);
    }
  }
}
