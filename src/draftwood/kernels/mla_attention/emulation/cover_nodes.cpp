// Plans of nodes.cu for random steps, held against what they must be: `cover_nodes SEED TRIALS`. Says what is wrong and returns 1.
// Every node's heads have each key in one job; runs are whole units with partials where combine looks for them, and such nodes are
// listed once; others have one job; there is room for all.
#include <random>
#include <set>

#include "../layout.cuh"
namespace planning {
#include "../nodes_plan.cu"
}

struct Step {
  int heads, lines, blocks, most_jobs;
  long long parts;
  std::vector<int> lengths, counts, starts;
};
static Step random_step(std::mt19937& random) {
  const int lines = 16 << random() % 3;
  Step s{64 << random() % 2, lines, (int[]){8, 66, 120, 132}[random() % 4], 0, (long long[]){0, 5000, 1 << 17}[random() % 3]};
  const int rows = 1 + random() % (int[]){1, 3, 20, 256}[random() % 4], most = (int[]){1, 9, 65}[random() % 3];
  int token = 0;
  for (int r = 0; r < rows; r++) {
    s.lengths.push_back(random() % (int[]){200, 5000, 140000}[random() % 3]);
    s.counts.push_back(random() % 8 ? 1 + random() % most : 0);
    s.starts.push_back(token);
    token += s.counts[r] + random() % 3;
  }
  s.most_jobs = (token + 1) * (s.heads / lines) + 4096;
  return s;
}

struct Planned { Head head; std::vector<Job> jobs; std::vector<Node> live; };
static Planned plan(const Step& s) {
  Planned p{{}, std::vector<Job>(s.most_jobs), std::vector<Node>(s.starts.back() + 68)};
  run_grid({2, 1, 1}, {planning::THREADS, 1, 1}, [&] {
    planning::mla_plan_nodes(s.lengths.data(), 1, s.counts.data(), 1, s.starts.data(), 1, s.lengths.size(), s.heads, s.lines,
                             s.blocks, s.parts, s.most_jobs, p.jobs.data(), &p.head, p.live.data());
  });
  p.jobs.resize(std::min(p.head.jobs, s.most_jobs));
  return p;
}

// What is wrong, or nullptr.
static const char* fault(const Step& s, const Planned& p) {
  if (p.head.jobs > s.most_jobs) return "more jobs than there is room for";
  std::map<int, const Node*> cut;                               // by token
  std::map<std::pair<int, int>, std::map<int, int>> runs;       // of (token, first head): begin -> end
  std::set<std::pair<int, int>> own;                            // (token, first head) whose own keys have a job
  for (int i = 0; i < p.head.live; i++)
    if (!cut.emplace(p.live[i].token, &p.live[i]).second) return "a node that is listed twice";
  for (const Job& j : p.jobs) {
    const int node = j.token - s.starts[j.row];
    if (node < 0 || node >= s.counts[j.row] || j.length != s.lengths[j.row]) return "a job of no node";
    if (j.live != s.lines || j.first % s.lines) return "a job of no heads";
    if ((j.kind & WHOLE_ROW) && (j.begin || j.end != WHOLE || !(j.kind & WITH_OWN))) return "a whole row that is none";
    if (bool(j.kind & WHOLE_ROW) == bool(cut.count(j.token))) return "a node both whole and cut, or neither";
    if ((j.kind & WITH_OWN) && !own.insert({j.token, j.first}).second) return "own keys twice";
    if (j.begin == j.end) { if (!(j.kind & WITH_OWN)) return "a job of nothing"; else continue; }
    if (!runs[{j.token, j.first}].emplace(j.begin, j.end).second) return "two runs from one key";
    if (j.kind & WHOLE_ROW) continue;
    const Node& at = *cut[j.token];
    if (j.begin != round_up(j.begin, UNIT) || j.step != at.lines) return "a run that begins within a unit";
    if (j.part != at.part + j.first + (long long)pieces_before(j.begin, UNIT) * j.step) return "a partial elsewhere";
  }
  std::set<long long> places;                                   // partials of all nodes' first heads
  for (size_t r = 0; r < s.lengths.size(); r++)
    for (int n = 0; n < s.counts[r]; n++) {
      const int token = s.starts[r] + n, top = base_of(s.lengths[r] + s.counts[r] - 1), units = pieces_before(top, UNIT);
      for (int first = 0; first < s.heads; first += s.lines) {
        if (!own.count({token, first})) return "own keys without a job";
        int at = 0;
        for (const auto& [begin, end] : runs[{token, first}]) {
          if (begin != at) return "a gap";
          at = end;
        }
        if (at != WHOLE && (at < top || top == 0)) return "keys left";
      }
      for (int u = 0; cut.count(token) && u < units; u++) {
        const long long place = cut[token]->part + (long long)u * cut[token]->lines;
        if (place < 0 || place + s.heads > s.parts) return "a partial beyond the room";
        for (int h = 0; h < s.heads; h++) if (!places.insert(place + h).second) return "a partial twice";
      }
    }
  return nullptr;
}

int main(int, char** argv) {
  std::mt19937 random(atoi(argv[1]));
  int cut = 0;
  for (int i = 0; i < atoi(argv[2]); i++) {
    const Step step = random_step(random);
    const Planned planned = plan(step);
    cut += planned.head.live > 0;
    if (const char* what = fault(step, planned)) { printf("plan %d: %s\n", i, what); return 1; }
  }
  if (cut == 0) { printf("no row was cut\n"); return 1; }
}
