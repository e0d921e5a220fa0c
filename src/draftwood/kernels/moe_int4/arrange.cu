// Rows of x with their 4-byte words in the order in which INT4 weights have their inputs: of each 32 values, 16-byte chunk w holds
// word w of values 8 q .. 8 q + 7 for q = 0..3 (moe.cuh, WEIGHTS). crew.cu then copies 16 bytes a lane where it would need four
// copies. Grid: rows, of a thread for every 32 values.
#include "../common.cuh"

extern "C" __global__ void arrange(const bf16* __restrict__ x, bf16* __restrict__ out) {
  pdl_wait();
  pdl_go();                                    // go after wait: the next kernel reads lists ahead of its own
  if (threadIdx.x >= HIDDEN / 32) return;
  const long long at = (long long)blockIdx.x * HIDDEN + threadIdx.x * 32;
  const uint4 a = load16(x + at), b = load16(x + at + 8), c = load16(x + at + 16), d = load16(x + at + 24);
  store16(out + at, uint4{a.x, b.x, c.x, d.x});
  store16(out + at + 8, uint4{a.y, b.y, c.y, d.y});
  store16(out + at + 16, uint4{a.z, b.z, c.z, d.z});
  store16(out + at + 24, uint4{a.w, b.w, c.w, d.w});
}
