// The fourth role of nodes.cu and heads.cu: it fetches keys and queries of job after job and tells the others of each. They define
// Slots (places of a tile's pieces, until when they are not free, and how many tiles are announced in turn) and what arrives where.
#pragma once

// Sixteen rows at once, eight threads a row.
struct Copier {
  const Inputs& in;
  int row, chunk;
  u32 turned;                                                   // this thread's place in its row of any piece, and its row
  __device__ __forceinline__ explicit Copier(const Inputs& i) : in(i) {
    const int v = threadIdx.x - 3 * ROLE;
    row = v / 8;
    chunk = v % 8;
    turned = row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  // The block's n-th tile. This thread's keys are row, row + 16, ... of it.
  __device__ __forceinline__ void tile(int n, const bf16* const (&keys)[4]) const {
    const Slots slots(n);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      slots.wait(c);
#pragma unroll
      for (int x = 0; x < 4; x++) copy16(slots.at(c) + x * 16 * 128 + turned, keys[x] + c * 64 + chunk * 8);
      if (c % PER_PART == PER_PART - 1) copy_arrive(full(false, n % Slots::TURNS, c / PER_PART));
    }
  }
  // The same of a page, by one thread.
  __device__ __forceinline__ void page(int n, const void* map, int page) const {
    const Slots slots(n);
    const int rank = block_of_cluster();
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      slots.wait(c);
      const u32 tell = full(true, n % Slots::TURNS, c / PER_PART);
      if (c % PER_PART == 0) mbarrier_expect(tell, PER_PART * PIECE);
      if ((c + n) % TOGETHER == rank) box_to_all(slots.at(c), map, c * 64, page * TILE, tell);
    }
  }
  __device__ __forceinline__ void queries(long long line) const {
    const u32 at = shared_address(raw) + Place::q;
#pragma unroll
    for (int r = 0; r < LINES_OF_JOB; r += 16)
#pragma unroll
      for (int c = 0; c < PIECES; c++) {
        const long long x = line + r + row;
        const bf16* from = c < PIECES - 1 ? in.q + x * LATENT + c * 64 : in.q_pe + x * in.pe_stride;
        copy16(at + c * LINES_OF_JOB * 128 + r * 128 + turned, from + chunk * 8);
      }
    copy_arrive(asked());
  }
};

// Returns the tiles that the block has had so far.
__device__ __forceinline__ int copy_job(const Known& known, const Inputs& in, const void* map, int number, int past) {
  const Copier copier(in);
  const Job& job = known.job;
  const int* table = in.table + (size_t)job.row * in.pages;
  const bool first = threadIdx.x == 3 * ROLE;
  const Extent at(job, known.depth);
  const long long line = (long long)job.token * in.heads + job.first;
  if (first) {
    shared_at<Task>(Place::tasks)[number % TASKS] = Task{
        at.tiles, at.shared, at.last(), at.pages, at.begin, job.step, (job.kind & WHOLE_ROW) != 0, line, job.part,
        line + (long long)job.token * in.heads};
    mbarrier_arrive(told(number));
    if (at.pages > 0) copier.page(past, map, at.shared > 0 ? known.page : table[at.page(0)]);
  }
  auto queries = [&]() {
    if (number > 0) mbarrier_wait(answered(), (number - 1) & 1);
    copier.queries(line);
  };
  if (at.pages > 0) queries();
  if (first)
    for (int i = 1; i < at.pages; i++) copier.page(past + i, map, table[at.page(i)]);
  int* slots = shared_at<int>(Place::slots);
  if (at.pages < at.tiles) own_slots(job, in, table, at.base, at.own, slots);
  bar_sync<COPIES, ROLE>();                                     // also: places of tiles are as far as the first thread knows
  for (int i = at.pages; i < at.tiles; i++) {
    const bf16* keys[4];
#pragma unroll
    for (int x = 0; x < 4; x++) keys[x] = in.cache + (size_t)slots[(i - at.shared) * TILE + copier.row + x * 16] * WIDTH;
    copier.tile(past + i, keys);
    if (i == 0) queries();
  }
  bar_sync<COPIES, ROLE>();                                     // all have read the slots of own keys
  return past + at.tiles;
}

// `mine` jobs from `begin` on, every `step`-th.
__device__ __forceinline__ void copy_role(const Job* jobs, int begin, int step, int mine, const Inputs& in, const void* map) {
  if (mine == 0) return;
  Known known(&jobs[begin], in);
  pdl_wait();
  pdl_go();
  for (int number = 0, past = 0;;) {
    past = copy_job(known, in, map, number, past);
    if (++number >= mine) break;
    known = Known(&jobs[begin + number * step], in);
  }
  copy_commit();
  copy_wait<0>();
}
