"""Accept kernels: compile limits and refusals without a GPU; on a GPU, the reference to the bit, and the laws."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.accept import op, ref, scenario

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
K26, NANO = 163840, 8192


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[pytest.mark.slow] * (a in ("sm_100a", "sm_103a"))) for a in jit.ARCHS])
def test_all_variants_compile_within_limits(arch: str) -> None:
    for variant in op.variants():
        assert check.check("accept", variant, arch).spill_bytes == 0


def test_unfit_arguments_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="steps of 8"):
        op.allocate(1, 1, 1, 100, "cpu")
    given, (at, counts) = scenario.params(2, 64, "cpu"), scenario.nodes([3, 1], 64, "cpu")
    buffers = scenario.buffers(at, 64)
    x = scenario.logits(4, 64, "cpu")
    with pytest.raises(ValueError, match="float32 or bf16"):
        op.choose(x.half(), at, given, buffers)
    with pytest.raises(ValueError, match="rows must be torch.int64"):
        op.choose(x[:3], at, given, buffers)
    with pytest.raises(ValueError, match="history goes with"):
        op.choose(x, at, dataclasses.replace(given, history=None), buffers)
    with pytest.raises(ValueError, match="do not fit buffers"):
        op.choose(x, at, given, op.allocate(2, 2, 3, 64, "cpu"))
    with pytest.raises(ValueError, match="at least one level"):
        op.choose(x, at, given, buffers, levels=0)
    with pytest.raises(ValueError, match="counts must be"):
        op.walk(at, counts.int(), buffers, op.allocate_path(2, 4, "cpu"))
    with pytest.raises(ValueError, match="trees of 3 nodes"):
        op.walk(at, counts, buffers, op.allocate_path(1, 4, "cpu"))


def test_choices_of_the_scenario_lead_down_the_longest_path() -> None:
    at, counts = scenario.nodes([17, 1, 9], 64, "cpu")
    x, buffers = scenario.logits(27, 64, "cpu"), scenario.buffers(at, 64)
    scenario.lead(x, at, 1.0)
    path = ref.walk(at, counts, x.argmax(-1), buffers.scores, 16)
    assert (path.counts - 1 == at.depths.amax(1)).all() and path.counts.tolist()[1] == 1


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(("vocab", "dtype", "sharpness"), [
        (K26, torch.float32, 2.0), (K26, torch.bfloat16, 2.0), (K26, torch.float32, 1.2), (NANO, torch.float32, 1.5),
        (NANO, torch.bfloat16, 1.0),
    ])  # fmt: skip
    def test_choices_are_the_references_to_the_bit(self, vocab: int, dtype: torch.dtype, sharpness: float) -> None:
        rows = len(scenario.KINDS)
        given, (at, _) = scenario.params(rows, vocab, "cuda"), scenario.nodes([3] * rows, vocab, "cuda")
        x = scenario.logits(len(at.rows), vocab, "cuda", dtype, sharpness)
        buffers = scenario.buffers(at, vocab, 5)
        tokens, scores = op.choose(x, at, given, buffers)
        want = ref.choose(x, at, given)
        m = len(at.rows)
        assert torch.equal(tokens[:m], want[0])
        assert torch.equal(bits(scores[:m]), bits(want[1]))
        assert not buffers.choices[m:].any()
        free = [r for r in range(rows) if scenario.KINDS[r][1:4] == (0, 1.0, 0.0)]
        some, trees, kept = scenario.pick(given, at, torch.tensor(free, device="cuda"))
        alone, _ = op.choose(x[kept].contiguous(), trees, some, scenario.buffers(trees, vocab), filters=False)
        assert torch.equal(alone, want[0][kept])
        places = buffers.where[at.rows, at.nodes]
        assert torch.equal(places, torch.arange(m, dtype=torch.int32, device="cuda"))

    def test_ties_and_hostile_logits_are_the_references_too(self) -> None:
        rows = len(scenario.KINDS)
        given, (at, _) = scenario.params(rows, K26, "cuda"), scenario.nodes([3] * rows, K26, "cuda")
        x = scenario.logits(len(at.rows), K26, "cuda", sharpness=1.3)
        x[::3] = x[::3].round()
        x[1::3, ::2] = float("nan")
        x[1::3, 1::4] = -torch.inf
        x[2], x[5], x[8] = 1.5, -torch.inf, float("nan")
        tokens, scores = op.choose(x, at, given, scenario.buffers(at, K26))
        want = ref.choose(x, at, given)
        assert torch.equal(tokens, want[0])
        assert torch.equal(bits(scores.nan_to_num(3.0)), bits(want[1].nan_to_num(3.0)))

    @pytest.mark.parametrize(("vocab", "dtype"), [(K26, torch.float32), (NANO, torch.bfloat16)])
    def test_masks_and_floors_are_the_references_to_the_bit(self, vocab: int, dtype: torch.dtype) -> None:
        rows = len(scenario.KINDS)
        given, (at, _) = scenario.params(rows, vocab, "cuda"), scenario.nodes([3] * rows, vocab, "cuda")
        x = scenario.logits(len(at.rows), vocab, "cuda", dtype, 1.5)
        free = op.choose(x, at, given, scenario.buffers(at, vocab))[0].clone()
        given, at = scenario.held_back(given, at, vocab)
        tokens, scores = op.choose(x, at, given, scenario.buffers(at, vocab))
        want = ref.choose(x, at, given)
        assert torch.equal(tokens, want[0]) and torch.equal(bits(scores), bits(want[1]))
        assert not torch.equal(tokens, free)
        some, trees, kept = scenario.pick(given, at, torch.tensor([7, 2], device="cuda"))
        part = op.choose(x[kept].contiguous(), trees, some, scenario.buffers(trees, vocab))[0]
        assert torch.equal(part, tokens[kept])

    @pytest.mark.parametrize("sharpness", [2.0, 1.3])
    def test_a_row_does_not_depend_on_the_others(self, sharpness: float) -> None:
        rows = 66
        given, (at, _) = scenario.params(rows, NANO, "cuda"), scenario.nodes([1 + r % 5 for r in range(rows)], NANO, "cuda")
        x = scenario.logits(len(at.rows), NANO, "cuda", sharpness=sharpness)
        whole = op.choose(x, at, given, scenario.buffers(at, NANO))
        for n in EDGES:
            index = torch.randperm(rows, generator=torch.Generator().manual_seed(n)).cuda()[:n]
            some, trees, kept = scenario.pick(given, at, index)
            tokens, scores = op.choose(x[kept].contiguous(), trees, some, scenario.buffers(trees, NANO))
            assert torch.equal(tokens, whole[0][kept]) and torch.equal(bits(scores), bits(whole[1][kept])), n

    def test_a_node_chooses_as_its_path_decoded_plainly(self) -> None:
        """A node's token is that of a tree of one node at its position with its path in the history."""
        rows = len(scenario.KINDS)
        given, (at, _) = scenario.params(rows, NANO, "cuda"), scenario.nodes([9] * rows, NANO, "cuda")
        x = scenario.logits(len(at.rows), NANO, "cuda", sharpness=1.5)
        whole, _ = op.choose(x, at, given, scenario.buffers(at, NANO))
        assert given.history is not None and given.history_rows is not None
        for m in range(0, len(at.rows), 7):
            r, n = int(at.rows[m]), int(at.nodes[m])
            words, line = given.history.clone(), int(given.history_rows[r])
            node = n
            while node > 0:
                words[max(line, 0), at.tokens[r, node]] += 2
                node = int(at.parents[r, node])
            some, _, _ = scenario.pick(dataclasses.replace(given, history=words), at, torch.tensor([r], device="cuda"))
            zero = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
            length = at.lengths[r : r + 1] + at.depths[r, n]
            alone = ref.Nodes(at.tokens[r : r + 1, n : n + 1].contiguous(), zero - 1, zero, length, zero[0], zero[0])
            token, _ = op.choose(x[m : m + 1], alone, some, scenario.buffers(alone, NANO))
            assert int(token[0]) == int(whole[m])

    def test_nodes_beyond_the_count_are_neither_read_nor_written(self) -> None:
        given, (at, _) = scenario.params(9, NANO, "cuda"), scenario.nodes([4] * 9, NANO, "cuda")
        x = scenario.logits(36, NANO, "cuda", sharpness=1.3)
        want = op.choose(x, at, given, scenario.buffers(at, NANO))
        for n in (0, 1, 17, 35):
            poisoned, rows, nodes = x.clone(), at.rows.clone(), at.nodes.clone()
            poisoned[n:], rows[n:], nodes[n:] = float("nan"), 1 << 40, 1 << 40
            buffers = scenario.buffers(at, NANO)
            buffers.choices.fill_(-7)
            live = torch.tensor([n], dtype=torch.int32, device="cuda")
            tokens, scores = op.choose(poisoned, dataclasses.replace(at, rows=rows, nodes=nodes), given, buffers, live)
            assert torch.equal(tokens[:n], want[0][:n]) and torch.equal(bits(scores[:n]), bits(want[1][:n]))
            assert bool((tokens[n:] == -7).all())

    @pytest.mark.parametrize(("vocab", "rows", "sharpness"), [(K26, 5, 1.3), (NANO, 128, 1.5), (NANO, 600, 2.0)])
    def test_only_nodes_of_a_walk_are_read_and_walks_are_the_same(self, vocab: int, rows: int, sharpness: float) -> None:
        """More rows than blocks share them, and than a block looks at in one go."""
        forced = [r % 9 == 4 for r in range(rows)]
        given = scenario.params(rows, vocab, "cuda")
        at, counts = scenario.nodes([1 + r * 5 % 17 for r in range(rows)], vocab, "cuda", forced=forced)
        x = scenario.logits(len(at.rows), vocab, "cuda", sharpness=sharpness)
        scenario.lead(x, at, 0.8)
        whole, part = scenario.buffers(at, vocab), scenario.buffers(at, vocab)
        op.choose(x, at, given, whole)
        want = op.walk(at, counts, whole, op.allocate_path(rows, 8, "cuda"))
        met = torch.zeros(len(x), dtype=torch.bool, device="cuda")
        met[want.chosen[want.chosen >= 0]] = True
        x[~met] = float("nan")
        op.choose(x, at, given, part, levels=8, few_nodes=0)
        got = op.walk(at, counts, part, op.allocate_path(rows, 8, "cuda"))
        for field in dataclasses.fields(want):
            assert torch.equal(bits(getattr(got, field.name)), bits(getattr(want, field.name))), field.name
        assert not part.choices[: len(x)][~met].any() and int(want.counts.max()) >= 4

    @pytest.mark.parametrize("rows", [1, 33, 128])
    def test_walks_are_the_references(self, rows: int) -> None:
        counts = [1 + (r * 37) % 65 for r in range(rows)]
        at, live = scenario.nodes(counts, 50, "cuda", forced=[r % 11 == 5 for r in range(rows)], width=65)
        m = len(at.rows)
        buffers = op.allocate(m, rows, 65, 8, "cuda")
        made = torch.Generator(device="cuda").manual_seed(0)
        choices = torch.randint(0, 50, (m,), device="cuda", generator=made)
        for i in range(0, m, 2):  # every other choice is a child's token where there is a child
            r, n = int(at.rows[i]), int(at.nodes[i])
            children = (at.parents[r] == n).nonzero()[:, 0].tolist()
            if children:
                choices[i] = at.tokens[r, children[-1]]
        buffers.choices.copy_(choices)
        buffers.scores.normal_(generator=made)
        buffers.where.fill_(1 << 30)
        buffers.where[at.rows, at.nodes] = torch.arange(m, dtype=torch.int32, device="cuda")
        for width in (65, 16, 1):
            out = op.allocate_path(rows + 2, width, "cuda")
            out.nodes.fill_(7)
            got = op.walk(at, live, buffers, out, torch.tensor([rows], dtype=torch.int32, device="cuda"))
            cpu = ref.Nodes(*(None if t is None else t.cpu() for t in vars(at).values()))
            want = ref.walk(cpu, live.cpu(), choices.cpu(), buffers.scores.cpu(), width)
            for name in ("nodes", "counts", "tokens", "emitted", "final", "logprobs", "chosen"):
                assert torch.equal(getattr(got, name)[:rows].cpu(), getattr(want, name)), (name, width)
            assert bool((got.nodes[rows:] == 7).all())

    def test_offsets_past_two_to_the_31(self) -> None:
        given, (at, _) = scenario.params(2, K26, "cuda", kinds=(2, 8)), scenario.nodes([1, 1], K26, "cuda")
        x = scenario.logits(2, K26, "cuda", sharpness=1.3)
        stride = (1 << 31) + 64
        store = torch.empty(stride + K26, dtype=torch.float32, device="cuda")
        far = store.as_strided(x.shape, (stride, 1))
        far.copy_(x)
        want = op.choose(x, at, given, scenario.buffers(at, K26))
        got = op.choose(far, at, given, scenario.buffers(at, K26))
        assert torch.equal(got[0], want[0]) and torch.equal(bits(got[1]), bits(want[1]))

    def test_a_thousand_replays_are_bitwise_equal(self) -> None:
        rows = 33
        given, (at, counts) = scenario.params(rows, NANO, "cuda"), scenario.nodes([9] * rows, NANO, "cuda")
        x = scenario.logits(len(at.rows), NANO, "cuda", sharpness=1.5)
        buffers, out = scenario.buffers(at, NANO), op.allocate_path(rows, 16, "cuda")

        def step() -> None:
            op.choose(x, at, given, buffers)
            op.walk(at, counts, buffers, out)

        step()
        torch.cuda.synchronize()
        want = [t.clone() for t in (buffers.choices, buffers.scores, *vars(out).values())]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                step()
        for _ in range(5):
            for t in (*vars(buffers).values(), *vars(out).values()):
                t.zero_()
            for _ in range(50):
                graph.replay()
            for a, b in zip((buffers.choices, buffers.scores, *vars(out).values()), want, strict=True):
                assert torch.equal(bits(a), bits(b))
