// x that comes as rows: a producer's warps bring it and put it in the order in which the tensor cores read it (arrange.cu), on its
// way through shared memory. (Held in registers it would not do: all loads of a loop share a scoreboard, so whoever waits for a
// step waits for everything that was asked for after it.)
#pragma once

// A step of a tile of the block, from one with something to do to the next.
struct Place {
  int id, step, steps, done;
  Tile tile;
  __device__ __forceinline__ bool find(const Block& block) {       // from this tile on, one with something to do
    for (; id < block.all.count; id += block.stride, done = 0) {
      tile = block.all.at(id, block.n);
      steps = tile.live ? block.T : done;
      if (steps > 0) return true;
    }
    return false;
  }
  __device__ __forceinline__ bool advance(const Block& block) {    // to the next step; whether there is one
    if (++step < steps) return true;
    step = 0; id += block.stride; done = 0;
    return find(block);
  }
};

// How a warp asks for its tiles of 8 tokens, every fourth of the block's: four whole lines at a time, HELD steps ahead, into MINE
// * 1024 bytes a step of its own, where 16-byte chunk c of a token's step is at place c ^ 4 (token & 1). Tokens that are not there
// are zeros.
struct Asks {
  const Block& block;
  const bf16 *X, *from = nullptr;
  long long x_stride, x_head;
  int K, part, left = 0;                         // left: tokens from the lane's first one
  Place at;
  bool more;
  __device__ __forceinline__ Asks(const Block& block, const bf16* X, int K, long long x_stride, long long x_head, int part)
      : block(block), X(X), x_stride(x_stride), x_head(x_head), K(K), part(part), at{block.begin, 0, 0, block.ahead} {
    more = at.find(block);
  }
  __device__ __forceinline__ void next(u32 to) {
    const int line = threadIdx.x >> 3 & 3, chunk = threadIdx.x & 7;
    if (more) {
      if (at.step == 0) {
        const int token = at.tile.first + part * 8 + line;
        from = X + at.tile.head * x_head + token * x_stride + chunk * 8;
        left = block.n - token;
      }
      const bf16* x = from + at.step * 64;
      const bool inside = !TAIL || at.step * 64 + chunk * 8 < K;
      to += line * 128 + (chunk ^ (line & 1) * 4) * 16;
#pragma unroll
      for (int i = 0; i < MINE; i++, x += (COPIERS * 8) * x_stride)
#pragma unroll
        for (int h = 0; h < 2; h++)
          copy16_or_zero(inside && i * (COPIERS * 8) + h * 4 < left, to + (2 * i + h) * 512, x + h * 4 * x_stride);
      more = at.advance(block);
    }
    copy_commit();
  }
};

// From there to a slot of the ring: lane (g, q) takes 16 bytes of token g twice, and four lanes together put down chunks.
__device__ __forceinline__ void put_in_order(u32 from, u32 to, int part) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  from += g * 128 + (q ^ (g & 1) * 4) * 16;
#pragma unroll
  for (int two = 0; two < MINE; two += 2) {      // at once: more have no registers
    uint4 v[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < 2; b++)
        if (two + i < MINE) v[i][b] = shared_load16((from ^ b * 64) + (two + i) * 1024);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < 2; b++)
        if ((two + i) * COPIERS + part < TILES)
          store_chunks(to + ((two + i) * COPIERS + part) * 1024 + (lane & 7) * 128 + ((4 * b + g / 2) ^ (lane & 7)) * 16, v[i][b]);
  }
}

// The producer's warps, where x comes as rows: copies weights, and brings x. held: HELD * HELD_STEP bytes, on 128.
__device__ __forceinline__ void feed_rows(const Block& block, const Weighs& weights, const bf16* X, int K, long long x_stride,
                                          long long x_head, u32 held) {
  const int part = weights.part;
  held += part * (MINE * 1024);
  Ring ring;
  Asks asks(block, X, K, x_stride, x_head, part);
  Place puts = {block.begin, 0, 0, block.ahead};
#pragma unroll 1
  for (int i = 0; i < HELD; i++) asks.next(held + i * HELD_STEP);
  u32 at = 0;
#pragma unroll 1
  for (bool going = puts.find(block); going; going = puts.advance(block)) {
    if (puts.step >= puts.done) {
      mbarrier_wait(block.empty + 8 * ring.slot, ring.parity ^ 1);
      if (elected()) weights.ask(weights.of(puts.tile) + puts.step * 2048, block.rows_of(puts.tile), ring.slot);
    }
    copy_wait<HELD - 1>();
    __syncwarp();                                // others' copies
    put_in_order(held + at, block.base + ring.slot * SLOT, part);
    publish();                                   // for the tensor cores
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(block.full + 8 * ring.slot);
    asks.next(held + at);
    ring.next();
    at = at == (HELD - 1) * HELD_STEP ? 0 : at + HELD_STEP;
  }
}
