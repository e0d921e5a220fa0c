// out[t] = sum over slots 0..TOPK-1, in order, of weights[t][slot] * y[t*TOPK+slot], then + shared[t]: the chain of
// down_stream. A slot of weight 0 (an expert of another rank) is not read. Grid (rows, ceil(HIDDEN/1024)), 256 threads; rows
// from *live on are left alone.
#include "../common.cuh"

extern "C" __global__ void __launch_bounds__(256)
combine(const float* __restrict__ y, const float* __restrict__ weights, const bf16* __restrict__ shared,
        const int* __restrict__ live, bf16* __restrict__ out) {
  pdl_wait();
  pdl_go();
  const int t = blockIdx.x, r = (blockIdx.y * 256 + threadIdx.x) * 4;
  if (t >= *live || r >= HIDDEN) return;
  float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int k = 0; k < TOPK; k++) {
    const float c = weights[t * TOPK + k];
    if (c != 0.f) {
      const float4 a = *reinterpret_cast<const float4*>(y + (long long)(t * TOPK + k) * HIDDEN + r);
      v[0] = fmaf(c, a.x, v[0]); v[1] = fmaf(c, a.y, v[1]); v[2] = fmaf(c, a.z, v[2]); v[3] = fmaf(c, a.w, v[3]);
    }
  }
  const long long at = (long long)t * HIDDEN + r;
  if (shared) {
    const uint2 a = *reinterpret_cast<const uint2*>(shared + at);
    v[0] += low_float(a.x); v[1] += high_float(a.x); v[2] += low_float(a.y); v[3] += high_float(a.y);
  }
  *reinterpret_cast<uint2*>(out + at) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}
