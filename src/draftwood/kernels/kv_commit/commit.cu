// Moves the latents of accepted nodes to the places of the first nodes, in place, in all layers.
//
// Node i of row r lies in slot slots[r][i]; path[r][0..counts[r]) are the accepted nodes, root first, ascending, so path[i] >= i. Place i takes the bytes of node path[i]. A thread owns one 16-byte column of one row and goes
// through the path in order: what it writes, place i, is no later source, since path[k] >= k > i. Nothing else is written.
#include "../rounded.cuh"

#ifndef LONGEST
#define LONGEST 65       // places of a path that can move
#endif
constexpr int THREADS = 256, AHEAD = 4;

// Grid (ceil(layers * columns / 256), R). data: layer l, slot s at l * layer_bytes + s * slot_bytes; columns = 16-byte pieces of a slot.
extern "C" __global__ void __launch_bounds__(THREADS)
compact(unsigned char* data, const long long* slots, const long long* path, const long long* counts, const int* rows,
        int nodes, int path_width, int layers, int columns, long long layer_bytes, long long slot_bytes) {
  __shared__ long long from[LONGEST], to[LONGEST];
  __shared__ int moves;
  const int r = blockIdx.y, tid = threadIdx.x;
  pdl_wait();
  pdl_go();
  if (rows && r >= load_int(rows)) return;
  const long long* mine = path + (long long)r * path_width;
  const long long* slot = slots + (long long)r * nodes;
  const int n = (int)min((long long)path_width, load_long(counts + r));
  if (n < 1 || load_long(mine + n - 1) == n - 1) return;               // ascending from 0: every node is in its place
  if (tid == 0) moves = 0;
  __syncthreads();
  if (tid < 32) {                                                      // the moves, in order
    int found = 0;
    for (int i = tid; i < ((n + 31) & ~31); i += 32) {
      const long long node = i < n ? load_long(mine + i) : 0;
      const bool moved = i < n && node > i && node < nodes;
      const u32 all = __ballot_sync(ALL_LANES, moved);
      const int at = found + __popc(all & ((1u << tid) - 1));
      if (moved && at < LONGEST) {
        from[at] = slot[node] * slot_bytes;
        to[at] = slot[i] * slot_bytes;
      }
      found += __popc(all);
    }
    if (tid == 0) moves = min(found, LONGEST);
  }
  __syncthreads();
  const long long item = (long long)blockIdx.x * THREADS + tid;
  if (item >= (long long)layers * columns) return;
  unsigned char* base = data + item / columns * layer_bytes + item % columns * 16;
  const int count = moves;
  for (int i = 0; i < count; i += AHEAD) {                             // AHEAD loads travel together: none reads a place written here
    uint4 v[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) if (i + k < count) v[k] = load16(base + from[i + k]);
#pragma unroll
    for (int k = 0; k < AHEAD; k++) if (i + k < count) store16(base + to[i + k], v[k]);
  }
}
