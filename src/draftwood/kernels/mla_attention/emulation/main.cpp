// Runs plan, attend and combine of this folder on arrays read from a file and writes what they give: `main IN OUT`.
// Compiled by the test with EMULATION and the macros of a variant.
#include "../layout.cuh"
namespace planning {
#if NODES
#include "../nodes_plan.cu"
#else
#include "../plan.cu"
#endif
}
namespace attending {
#if HEADS
#include "../heads.cu"
#elif NODES
#include "../nodes.cu"
#elif COLUMNS
#include "../columns.cu"
#else
#include "../attend.cu"
#endif
}
namespace combining {
#include "../combine.cu"
}

static FILE* file;
template <class T> std::vector<T> take() {   // a count, then so many elements
  int64_t n = 0;
  if (fread(&n, 8, 1, file) != 1) exit(3);
  std::vector<T> v(n);
  if (n && fread(v.data(), sizeof(T), n, file) != (size_t)n) exit(3);
  return v;
}

int main(int, char** argv) {
  file = fopen(argv[1], "rb");
  const auto sizes = take<int>();            // rows, nodes, heads, pages, words, tokens, partials, jobs, blocks
  const int rows = sizes[0], nodes = sizes[1], heads = sizes[2], pages = sizes[3], words = sizes[4], tokens = sizes[5];
  const int parts = sizes[6], jobs = sizes[7], blocks = sizes[8];
  const auto scale = take<float>();
  const auto lengths = take<int>(), counts = take<int>(), starts = take<int>(), table = take<int>();
  const auto masks = take<u64>();
  const auto q = take<bf16>(), q_pe = take<bf16>(), cache = take<bf16>();
  fclose(file);
  std::vector<Job> list(jobs);
  std::vector<Node> live(tokens, Node{-1, -1});
  Head head{};
  std::vector<float> o((size_t)parts * LATENT, NAN), own_o((size_t)tokens * 2 * heads * LATENT, NAN);
  std::vector<float2> ml(parts, {NAN, NAN}), own_ml((size_t)tokens * 2 * heads, {NAN, NAN});
  std::vector<bf16> out((size_t)tokens * heads * LATENT, bf16{0x7fff});
#if NODES
  run_grid({2, 1, 1}, {planning::THREADS, 1, 1}, [&] {
    planning::mla_plan_nodes(lengths.data(), 1, counts.data(), 1, starts.data(), 1, rows, heads, LINES, blocks, parts, jobs, list.data(), &head, live.data());
  });
  const int crew = HEADS ? 2 : 1;
  std::vector<float> spare((size_t)blocks * LINES * LATENT, NAN);
  attending::Map map{{(u64)cache.data()}};
  run_grid({min(blocks, head.jobs) * crew, 1, 1}, {attending::THREADS, 1, 1}, [&] {
    attending::mla_attend(map, q.data(), q_pe.data(), ROPE, cache.data(), table.data(), pages, masks.data(), words, heads, scale[0], list.data(), &head,
                          spare.data(), o.data(), ml.data(), own_o.data(), own_ml.data(), out.data());
  }, TOGETHER);
  run_grid({4, 1, 1}, {combining::THREADS, 1, 1}, [&] {
    combining::mla_combine(&head, live.data(), tokens, masks.data(), words, heads, o.data(), ml.data(), own_o.data(), own_ml.data(), out.data());
  });
  if (getenv("TELL")) fprintf(stderr, "jobs %d, folded nodes %d of %d\n", head.jobs, head.live, tokens);
#else
  run_grid({2, 1, 1}, {planning::THREADS, 1, 1}, [&] {
    planning::mla_plan(lengths.data(), 1, counts.data(), 1, starts.data(), 1, rows, heads, LINES, SPAN, blocks, parts,
                       jobs, list.data(), &head, live.data());
  });
  if (head.jobs > jobs) return 4;
  run_grid({min(blocks, head.jobs), 1, 1}, {attending::THREADS, 1, 1}, [&] {
    attending::mla_attend(q.data(), q_pe.data(), ROPE, cache.data(), table.data(), pages, masks.data(), words, heads, scale[0], list.data(), &head,
                          o.data(), ml.data(), own_o.data(), own_ml.data());
  });
  const int lines = tokens * heads;
  const dim3 grid = FOLDED ? dim3{lines, (LATENT + FOLDED - 1) / max(FOLDED, 1), 1} : dim3{(lines * 32 + combining::THREADS - 1) / combining::THREADS, 1, 1};
  run_grid(grid, {combining::THREADS, 1, 1}, [&] {
    combining::mla_combine(&head, live.data(), tokens, masks.data(), words, heads, o.data(), ml.data(), own_o.data(), own_ml.data(), out.data());
  });
#endif
  file = fopen(argv[2], "wb");
  fwrite(out.data(), sizeof(bf16), out.size(), file);
  fclose(file);
  return head.span == WHOLE ? 10 : 0;        // told apart: whether blocks walked whole rows
}
