// One lane of a warp, for what a single thread asks for.
#pragma once

// By a whole warp: true in one lane, always the same one, and the compiler knows that it is one. By a comparison of lanes it makes
// each copy of the copy engine, and whatever else takes one operand a warp, a loop over lanes (130 to 440 clocks; q_a at 288 rows
// 28.9 us instead of 25.3).
#ifdef EMULATION
inline bool elected() { return (threadIdx.x & 31) == 0; }
#else
__device__ __forceinline__ bool elected() {
  int yes;
  asm volatile("{ .reg .pred p; elect.sync _|p,0xffffffff; selp.b32 %0,1,0,p; }" : "=r"(yes));
  return yes;
}
#endif
