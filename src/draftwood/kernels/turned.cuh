// The order of 4-byte words in which tensor cores read inputs, made by four lanes together.
#pragma once
#include "common.cuh"

// Four lanes that follow each other have 8 values each, of 32; lane q comes out with word q of each of the four in order: the
// transpose of 4 words in 4 lanes. By a whole warp.
__device__ __forceinline__ uint4 turned(const uint4& values) {
  const int q = threadIdx.x & 3;
  u32 w[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int d = 1; d <= 2; d *= 2)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if ((j & d) == 0) {
        const u32 other = __shfl_xor_sync(ALL_LANES, q & d ? w[j] : w[j + d], d);
        if (q & d) w[j] = other; else w[j + d] = other;
      }
  return make_uint4(w[0], w[1], w[2], w[3]);
}
