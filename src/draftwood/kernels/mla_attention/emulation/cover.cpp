// Plans of random steps, held against what they must be: `cover SEED TRIALS`. Prints what is wrong and returns 1.
// Every block of lines has each shared key in one job, jobs are whole spans with partials where combine looks for them, every node
// has its own keys' jobs, and is listed as live once.
#include <random>
#include <set>

#include "../layout.cuh"
namespace planning {
#include "../plan.cu"
}

struct Step {
  int heads, lines, span, blocks;
  std::vector<int> lengths, counts, starts;
};
static Step random_step(std::mt19937& random) {
  Step s{8 << random() % 4, (int[]){8, 16, 32, 64, 72}[random() % 5], random() % 2 ? UNIT : GROUP, (int[]){7, 132, 188}[random() % 3]};
  const int rows = 1 + random() % (int[]){1, 1, 3, 20}[random() % 4];   // one long row is cut in most ways
  for (int r = 0, token = 0; r < rows; r++) {
    s.lengths.push_back(random() % (int[]){200, 5000, 140000, 140000}[random() % 4]);
    s.counts.push_back(random() % 8 ? 1 + random() % 65 : 0);
    s.starts.push_back(token);
    token += s.counts[r] + random() % 3;
  }
  return s;
}

struct Planned { Head head; std::vector<Job> jobs; std::vector<Node> live; };
static Planned plan(const Step& s) {
  const int rows = s.lengths.size();
  Planned p{{}, std::vector<Job>(1 << 20), std::vector<Node>(s.starts.back() + 68)};
  run_grid({2, 1, 1}, {planning::THREADS, 1, 1}, [&] {
    planning::mla_plan(s.lengths.data(), 1, s.counts.data(), 1, s.starts.data(), 1, rows, s.heads, s.lines, s.span, s.blocks, 1ll << 40, 1 << 20,
                       p.jobs.data(), &p.head, p.live.data());
  });
  p.jobs.resize(p.head.jobs);
  return p;
}

// What is wrong, or nullptr.
static const char* fault(const Step& s, const Planned& p) {
  std::map<std::pair<int, int>, std::map<int, int>> runs;       // of (row, first line): begin -> end
  std::map<int, int> own;                                       // of a token: heads that have jobs
  std::map<int, long long> part;                                // of a row: its first partial
  std::set<std::pair<int, int>> live;
  for (int i = 0; i < p.head.live; i++) {
    const Node& at = p.live[i];
    const int node = at.token - s.starts[at.row];
    if (at.length != s.lengths[at.row] || at.lines != s.counts[at.row] * s.heads) return "a live node of another row";
    if (part.emplace(at.row, at.part - (long long)node * s.heads).first->second != at.part - (long long)node * s.heads) return "a node's partials elsewhere";
    live.insert({at.row, node});
  }
  for (const Job& j : p.jobs) {
    if (j.kind == OWN_KEYS) { own[j.token] += j.live; continue; }
    if (j.begin >= j.end || j.begin != round_up(j.begin, s.span)) return "a run that is empty or begins within a span";
    if (j.part != part[j.row] + (long long)pieces_before(j.begin, s.span) * j.step + j.first) return "a partial elsewhere";
    if (!runs[{j.row, j.first}].emplace(j.begin, j.end).second) return "two runs from one key";
  }
  size_t nodes = 0, blocks = 0;
  for (size_t r = 0; r < s.lengths.size(); r++) {
    const int count = s.counts[r], top = count ? base_of(s.lengths[r] + count - 1) : 0;
    nodes += count;
    for (int n = 0; n < count; n++) {
      if (own[s.starts[r] + n] != 2 * s.heads) return "a node without both tiles of its own keys";
      if (!live.count({(int)r, n})) return "a node that is not live";
    }
    for (int first = 0; top > 0 && first < count * s.heads; first += s.lines, blocks++) {
      int at = 0;
      for (const auto& [begin, end] : runs[{(int)r, first}]) {
        if (begin != at) return "a gap";
        at = end;
      }
      if (at != top) return "keys left";
    }
  }
  return live.size() != nodes || p.head.live != (int)nodes ? "live nodes that are none" : runs.size() != blocks ? "lines that are none" : nullptr;
}

int main(int, char** argv) {
  std::mt19937 random(atoi(argv[1]));
  for (int i = 0; i < atoi(argv[2]); i++) {
    const Step step = random_step(random);
    if (const char* what = fault(step, plan(step))) { printf("plan %d: %s\n", i, what); return 1; }
  }
}
