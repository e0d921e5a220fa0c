// Products with their operands turned round, A for B: the bits of a sum must not depend on it, for heads.cu has lines as rows where
// nodes.cu and columns.cu have them as columns. One block of 128 threads; the same text runs on a GPU and on a CPU.
//  x [64, 576] lines, y [64, 576] keys, bf16. Results float32, each as [64 lines, ..]:
//  columns [64] and rows [64]: scores x y^T, one chain of 36 steps, with lines as columns and as rows.
//  tall [128] and wide [128]: values. Four tiles one after another: tile i has columns 64i.. of x as weights of 64 keys, and
//  columns 128i.. of y as 128 values of a key; with lines as columns, and as rows.
#include "../layout.cuh"
#include "../warpgroup.cuh"

constexpr int PIECES = 9, PIECE = 64 * 128, X = 0, Y = PIECES * PIECE;

// Rows of 576 values into pieces of 64.
__device__ __forceinline__ void put(int at, const bf16* from) {
  for (int i = threadIdx.x; i < 64 * 72; i += 128) {
    const int r = i / 72, c = i % 72;
    shared_store16(shared_address(raw) + at + c / 8 * PIECE + r * 128 + ((c % 8 ^ (r & 7)) << 4), load16(from + r * 576 + c * 8));
  }
}
__device__ __forceinline__ u64 piece(int at, int i) { return operand(shared_address(raw) + at + i * PIECE); }

// The value in d[e] of this lane: its row and column.
__device__ __forceinline__ int row_of(int e) { return 16 * (threadIdx.x >> 5) + (threadIdx.x >> 2 & 7) + (e & 2) * 4; }
__device__ __forceinline__ int column_of(int e) { return e / 4 * 8 + (threadIdx.x & 3) * 2 + (e & 1); }

// Lines 32i.. as columns, to `out` [64, width].
__device__ __forceinline__ void lines_as_columns(int i, float* columns, float* tall) {
  float s[16], v[2][16];
  for (int e = 0; e < 16; e++) s[e] = v[0][e] = v[1][e] = 0.f;
  products_begin();
#pragma unroll
  for (int k = 0; k < PIECES * 4; k++)
    product<4, false>(s, further(piece(Y, k / 4), k % 4 * 32), further(piece(X, k / 4), i * 4 * UNIT_ROWS + k % 4 * 32), k > 0);
#pragma unroll
  for (int k = 0; k < 16; k++)
#pragma unroll
    for (int t = 0; t < 2; t++)
      product<4, true>(v[t], further(piece(Y, k / 4 * 2 + t), k % 4 * 2 * UNIT_ROWS),
                       further(piece(X, k / 4), i * 4 * UNIT_ROWS + k % 4 * 32), k > 0);
  products_commit();
  products_wait<0>();
  settle(s), settle(v[0]), settle(v[1]);
#pragma unroll
  for (int e = 0; e < 16; e++) {
    const int line = i * 32 + column_of(e);
    columns[line * 64 + row_of(e)] = s[e];
    tall[line * 128 + row_of(e)] = v[0][e], tall[line * 128 + 64 + row_of(e)] = v[1][e];
  }
}

__device__ __forceinline__ void lines_as_rows(float* rows, float* wide) {
  float s[32], v[2][32];
  for (int e = 0; e < 32; e++) s[e] = v[0][e] = v[1][e] = 0.f;
  products_begin();
#pragma unroll
  for (int k = 0; k < PIECES * 4; k++)
    product_turned<false>(s, further(piece(X, k / 4), k % 4 * 32), further(piece(Y, k / 4), k % 4 * 32), k > 0);
#pragma unroll
  for (int k = 0; k < 16; k++)
#pragma unroll
    for (int t = 0; t < 2; t++)
      product_turned<true>(v[t], further(piece(X, k / 4), k % 4 * 32), further(piece(Y, k / 4 * 2 + t), k % 4 * 2 * UNIT_ROWS),
                           k > 0);
  products_commit();
  products_wait<0>();
  settle(s), settle(v[0]), settle(v[1]);
#pragma unroll
  for (int e = 0; e < 32; e++) {
    rows[row_of(e) * 64 + column_of(e)] = s[e];
    wide[row_of(e) * 128 + column_of(e)] = v[0][e], wide[row_of(e) * 128 + 64 + column_of(e)] = v[1][e];
  }
}

extern "C" __global__ void __launch_bounds__(128) turned(const bf16* x, const bf16* y, float* columns, float* rows, float* tall,
                                                         float* wide) {
  put(X, x);
  put(Y, y);
  show_to_products();
  bar_sync<0, 128>();
  lines_as_columns(0, columns, tall);
  lines_as_columns(1, columns, tall);
  lines_as_rows(rows, wide);
}

#ifdef EMULATION
int main(int, char** argv) {                                   // x and y from a file; the four results to another
  std::vector<bf16> x(64 * 576), y(64 * 576);
  std::vector<float> out[4];
  for (int i = 0; i < 4; i++) out[i].resize(i < 2 ? 64 * 64 : 64 * 128);
  FILE* file = fopen(argv[1], "rb");
  if (fread(x.data(), 2, x.size(), file) != x.size() || fread(y.data(), 2, y.size(), file) != y.size()) return 3;
  fclose(file);
  run_grid({1, 1, 1}, {128, 1, 1}, [&] { turned(x.data(), y.data(), out[0].data(), out[1].data(), out[2].data(), out[3].data()); });
  file = fopen(argv[2], "wb");
  for (const auto& one : out) fwrite(one.data(), 4, one.size(), file);
  fclose(file);
}
#endif
