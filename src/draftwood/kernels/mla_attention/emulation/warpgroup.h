// warpgroup.cuh for a CPU. Products happen as they are issued or, with DEFER in the environment, as late as they may: when they are
// waited for. Each thread forms its own part; what an operand is, is read from its description as the hardware reads it.
#pragma once

struct Product { float* d; int eights; bool across, across_b, add; u64 a, b; };
static std::deque<std::vector<Product>> products[1024];       // of each thread: groups, the last one still open

inline float operand_value(u64 of, int row, int k, bool across) {
  const u32 start = (u32)(of & 0x3fff) << 4, apart = (u32)(of >> 32 & 0x3fff) << 4;
  if (of >> 62 != 1) { fprintf(stderr, "operand without the 128-byte swizzle\n"); abort(); }
  // Bytes from the start: along rows, 8 rows are a unit; across rows, 8 of the summed index are.
  const u32 far = across ? k / 8 * apart + k % 8 * 128 + row * 2 : row / 8 * apart + row % 8 * 128 + k * 2;
  const u32 at = start + far, turned = at ^ (at >> 7 & 7) << 4;                // the swizzle is a function of the address
  if (turned + 2 > SHARED_LIMIT) { fprintf(stderr, "operand outside shared memory\n"); abort(); }
  uint16_t v;
  memcpy(&v, raw + turned, 2);
  return widen(v);
}
inline void perform(const Product& p) {
  const int l = current & 31, w = current / 32 % 4, g = l / 4, q = l % 4;
  float a[2][16];
  for (int h = 0; h < 2; h++) for (int k = 0; k < 16; k++) a[h][k] = operand_value(p.a, 16 * w + g + 8 * h, k, p.across);
  for (int j = 0; j < p.eights; j++)
    for (int c = 0; c < 2; c++) {
      double sum[2] = {};
      for (int k = 0; k < 16; k++) {
        const double b = operand_value(p.b, 8 * j + 2 * q + c, k, p.across_b);
        for (int h = 0; h < 2; h++) sum[h] += a[h][k] * b;
      }
      for (int h = 0; h < 2; h++) {
        float& d = p.d[4 * j + 2 * h + c];
        d = (float)((p.add ? d : 0.f) + sum[h]);
      }
    }
}
inline void products_begin() { if (products[current].empty()) products[current].emplace_back(); }
inline void products_commit() { products[current].emplace_back(); }
template <int N> void products_wait() {
  auto& groups = products[current];
  while ((int)groups.size() - 1 > N) {
    for (const Product& p : groups.front()) perform(p);
    groups.pop_front();
  }
}
inline void begin_product(const Product& p) { if (defer_copies) products[current].back().push_back(p); else perform(p); }
template <int E, bool ACROSS> void product(float (&d)[E * 4], u64 a, u64 b, bool add) { begin_product({d, E, ACROSS, false, add, a, b}); }
template <bool ACROSS> void product_turned(float (&d)[32], u64 a, u64 b, bool add) { begin_product({d, 8, false, ACROSS, add, a, b}); }
template <int N> void settle(float (&)[N]) {}
inline void show_to_products() {}
inline void mbarrier_arrive(u32 at) { arrive({at, nullptr, 3, block_of_crew()}); }
inline u32 max_bf16_pair(u32 a, u32 b) {
  auto larger = [](u32 x, u32 y) { return widen((uint16_t)x) >= widen((uint16_t)y) ? x & 0xffff : y & 0xffff; };
  return larger(a, b) | larger(a >> 16, b >> 16) << 16;
}
inline void stmatrix(u32 at, const u32* tiles, int count, bool trans) {
  const int l = current & 31;
  box_of_warp()[l][0] = at;
  __syncwarp();
  for (int m = 0; m < count; m++)
    for (int e = 0; e < 2; e++) {                                              // element (row l/4, column l%4*2 + e) of the tile
      const u32 to = (u32)box_of_warp()[m * 8 + (trans ? l % 4 * 2 + e : l / 4)][0];
      if (to % 16) { fprintf(stderr, "stmatrix: address not a multiple of 16\n"); abort(); }
      const uint16_t v = (uint16_t)(tiles[m] >> (16 * e));
      memcpy(raw + to + (trans ? l / 4 : l % 4 * 2 + e) * 2, &v, 2);
    }
  __syncwarp();
}
inline void stmatrix4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) { const u32 t[4] = {a, b, c, d}; stmatrix(at, t, 4, true); }
inline void stmatrix4(u32 at, u32 a, u32 b, u32 c, u32 d) { const u32 t[4] = {a, b, c, d}; stmatrix(at, t, 4, false); }
inline void stmatrix2_trans(u32 at, u32 a, u32 b) { const u32 t[2] = {a, b}; stmatrix(at, t, 2, true); }
