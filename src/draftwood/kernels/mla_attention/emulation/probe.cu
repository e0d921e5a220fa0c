// What warpgroup.cuh's pieces do, each by itself: the same text runs on a GPU and on a CPU, so a test can hold the emulation of operands
// against the hardware. One block of 128 threads.
//  a [64, 64], b [72, 64] bf16: along [64, 72] = a b^T by operands along rows; across [64, 72] = a^T b^T with a across rows.
//  turned [16, 64] bf16: 8x8 tiles that warp w stored turned, element (line, key) = 64 line + key, lines 0..15, keys 16w..16w + 15.
#include "../layout.cuh"
#include "../warpgroup.cuh"

constexpr int COLUMNS_OF_B = 72, A = 0, B = 64 * 128, T = B + COLUMNS_OF_B * 128;

// Rows of 64 values into a piece.
__device__ __forceinline__ void put(int at, const bf16* from, int rows) {
  for (int x = threadIdx.x; x < rows * 8; x += 128) {
    const int r = x / 8, c = x % 8;
    shared_store16(shared_address(raw) + at + r * 128 + ((c ^ (r & 7)) << 4), load16(from + r * 64 + c * 8));
  }
}

template <bool ACROSS> __device__ __forceinline__ void multiply(float* out) {
  const int w = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7, q = threadIdx.x & 3;
  const u64 a = operand(shared_address(raw) + A), b = operand(shared_address(raw) + B);
  float d[36];
#pragma unroll
  for (int x = 0; x < 36; x++) d[x] = 0.f;
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; k++) product<9, ACROSS>(d, further(a, ACROSS ? k * 2 * UNIT_ROWS : k * 32), further(b, k * 32), k > 0);
  products_commit();
  products_wait<0>();
  settle(d);
#pragma unroll
  for (int x = 0; x < 36; x++) out[(16 * w + g + (x & 2) * 4) * COLUMNS_OF_B + x / 4 * 8 + 2 * q + (x & 1)] = d[x];
}

extern "C" __global__ void __launch_bounds__(128) probe(const bf16* a, const bf16* b, float* along, float* across, bf16* turned) {
  const int w = threadIdx.x >> 5, L = threadIdx.x & 31, g = L >> 2, q = L & 3;
  put(A, a, 64);
  put(B, b, COLUMNS_OF_B);
  u32 p[2][2];
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int line = 8 * j + 2 * q, key = 16 * w + 8 * h + g;
      p[j][h] = pack_bf16((float)(64 * line + key), (float)(64 * (line + 1) + key));
    }
  const u32 to = shared_address(raw) + T + (L >> 4) * UNIT_ROWS + (L & 7) * 128 + ((w * 2 + (L >> 3 & 1)) << 4);
  stmatrix4_trans(to, p[0][0], p[0][1], p[1][0], p[1][1]);
  show_to_products();
  bar_sync<0, 128>();
  multiply<false>(along);
  multiply<true>(across);
  for (int x = threadIdx.x; x < 16 * 64; x += 128) turned[x] = reinterpret_cast<const bf16*>(raw + T)[x];
}

#ifdef EMULATION
int main(int, char** argv) {                                   // a and b from a file; the three results to another
  std::vector<bf16> a(64 * 64), b(72 * 64), turned(16 * 64);
  std::vector<float> along(64 * 72), across(64 * 72);
  FILE* file = fopen(argv[1], "rb");
  if (fread(a.data(), 2, a.size(), file) != a.size() || fread(b.data(), 2, b.size(), file) != b.size()) return 3;
  fclose(file);
  run_grid({1, 1, 1}, {128, 1, 1}, [&] { probe(a.data(), b.data(), along.data(), across.data(), turned.data()); });
  file = fopen(argv[2], "wb");
  fwrite(along.data(), 4, along.size(), file);
  fwrite(across.data(), 4, across.size(), file);
  fwrite(turned.data(), 2, turned.size(), file);
  fclose(file);
}
#endif
