// The fourth role of nodes.cu and heads.cu: it fetches keys and queries of job after job and tells the others of each. They define
// Slots (which pieces of a tile the block takes, their places, until when these are not free, and what is told of them) and how many
// warps ask for pages; those after them fetch queries, or all if there is one.
#pragma once

// Sixteen rows at once, eight threads a row.
struct Copier {
  static constexpr int FIRST = ASKERS > 1 ? ASKERS * 32 : 0, ROWS = (ROLE - FIRST) / 8;      // of queries: thread; rows at once
  const Inputs& in;
  int row, chunk, rank;
  u32 turned;                                                   // this thread's place in its row of any piece, and its row
  __device__ __forceinline__ explicit Copier(const Inputs& i) : in(i) {
    const int v = __shfl_sync(ALL_LANES, (int)threadIdx.x, threadIdx.x & 31) - 3 * ROLE;
    row = v / 8;
    chunk = v % 8;
    rank = block_of_cluster();
    turned = row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  // The block's n-th tile. This thread's keys are row, row + 16, ... of it.
  __device__ __forceinline__ void tile(int n, const bf16* const (&keys)[4]) const {
    const Slots slots(n, rank);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      if (!slots.takes(c)) continue;
      slots.wait(c);
#pragma unroll
      for (int x = 0; x < 4; x++) copy16(slots.at(c) + x * 16 * 128 + turned, keys[x] + c * 64 + chunk * 8);
      if (slots.ends(c)) copy_arrive(slots.tell(false, c));
    }
  }
  __device__ __forceinline__ void queries(long long line) const {
    const u32 at = shared_address(raw) + Place::q - FIRST / 8 * 128;
#pragma unroll
    for (int r = 0; r < LINES_OF_JOB; r += ROWS)
#pragma unroll
      for (int c = 0; c < PIECES; c++) {
        const long long x = line + r + row - FIRST / 8;
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
  }
  const int v = copier.row * 8 + copier.chunk;
  int i = Slots::first_page(v / 32, past, copier.rank);
  auto ask = [&](int end) {
    if (v / 32 >= ASKERS || !elected()) return;
    int page = i == 0 && at.shared > 0 ? known.page : i < at.pages ? table[at.page(i)] : 0;
    for (; i < end; i += ASKERS) {
      const int now = page;
      if (i + ASKERS < at.pages) page = table[at.page(i + ASKERS)];
      Slots(past + i, copier.rank).ask(map, now * TILE);
    }
  };
  auto queries = [&]() {
    if (v < Copier::FIRST) return;
    if (number > 0) mbarrier_wait(answered(), (number - 1) & 1);
    copier.queries(line);
  };
  if (at.pages > 0) {
    ask(ASKERS > 1 ? at.pages : 1);                             // if one thread asks for all it begins with one
    queries();
    ask(at.pages);
  }
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

// `mine` jobs from `begin` on, every `step`-th; the first one has been read.
__device__ __forceinline__ void copy_role(const Job* jobs, const Job& first, int begin, int step, int mine, const Inputs& in,
                                          const void* map) {
  if (mine == 0) return;
  Known known(first, in);
  pdl_wait();
  pdl_go();
  for (int number = 0, past = 0;;) {
    past = copy_job(known, in, map, number, past);
    if (++number >= mine) break;
    known = Known(load_all_new(&jobs[begin + number * step]), in);
  }
  copy_commit();
  copy_wait<0>();
}
