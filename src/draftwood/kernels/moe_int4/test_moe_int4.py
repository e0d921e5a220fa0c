"""Experts: fragment order against dense products, choice of kernels, compiled limits; on a GPU, the laws."""

import functools
import itertools

import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.moe_int4 import op, ref, repack, sweep
from draftwood.kernels.moe_int4.sizes import BROAD_ROWS, SLICE, few_rows, launches
from draftwood.kernels.moe_route import ref as route_ref
from draftwood.kernels.moe_route.op import MOST_ROWS_TO_FEW, Lists, most_jobs

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
K26, TP8, NANO = op.shape_of(7168, 2048, 8, 384), op.shape_of(7168, 256, 8, 384), op.shape_of(384, 128, 4, 16)
EP8 = op.shape_of(7168, 2048, 8, 48)
SHAPES = op.shapes()
CASES = ((1, 1), (1, 0), (4, 4), (9, 9), (33, 33), (65, 40), (128, 128), (512, 512))
"""(rows, live rows) at which candidates are compared."""
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)


def _checkpoint(rows: int, inputs: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed, scale, dense float64), packed by the format's words: code of input 8 i + n at bits 4 n of word i."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (experts, rows, inputs), generator=make)
    words = (codes.view(experts, rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    scale = (torch.rand(experts, rows, inputs // 32, generator=make) * 0.1).to(torch.bfloat16)
    return words.to(torch.int32), scale, (codes - 8).double() * scale.double().repeat_interleave(32, -1)


def _experts(hidden: int, width: int, count: int) -> tuple[repack.Packed, list[torch.Tensor]]:
    parts = [_checkpoint(r, k, count, i) for i, (r, k) in enumerate(((width, hidden), (width, hidden), (hidden, width)))]
    return repack.repack(*itertools.chain.from_iterable(p[:2] for p in parts)), [p[2] for p in parts]


@pytest.mark.parametrize("width", [128, 96, 256])
def test_repacking_keeps_every_weight_and_pads_with_nothing(width: int) -> None:
    weights, (gate, up, down) = _experts(256, width, 2)
    assert weights.width % 128 == 0 and weights.hidden == 256 and weights.experts == 2
    for e in range(2):
        got = repack.expert(weights, e)
        assert torch.equal(got[0][:width], gate[e]) and torch.equal(got[1][:width], up[e])
        assert torch.equal(got[2][:, :width], down[e])
        assert not got[0][width:].any() and not got[1][width:].any() and not got[2][:, width:].any()


def _fragments(packed: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One 16-row tile [S, 32, 4], [S, 8, 4] times x [8, 64 S], as the warps do it: -> [16, 8] float32.

    Registers as moe.cuh's header says (nibble p of word 2 h + s is A register p), lanes as the mma instruction says.
    """
    acc = torch.zeros(16, 8)
    lane = torch.arange(32)
    g, q = lane // 4, lane % 4
    for step, h in itertools.product(range(packed.shape[0]), range(2)):
        group = torch.zeros(16, 8)
        chunk = x.view(8, -1, 2, 4, 8)[g, step, h, q]                    # a lane's 16 bytes: 8 values of token g
        for s in range(2):
            a, b = torch.zeros(16, 16), torch.zeros(16, 8)
            word = packed[step, :, 2 * h + s].long()
            for p, half in itertools.product(range(4), range(2)):
                a[g + 8 * (p % 2), 2 * q + 8 * (p // 2) + half] = (((word >> (4 * p + 16 * half)) & 15) - 8).float()
            for register, half in itertools.product(range(2), range(2)):
                b[2 * q + 8 * register + half, g] = chunk[lane, 4 * s + 2 * register + half]
            group += a @ b
        rows = scale[step].float().view(8, 2, 2)                         # g, group, half
        acc += torch.cat((rows[:, h, 0], rows[:, h, 1]))[:, None] * group
    return acc


def test_fragment_order_and_chain_give_the_dense_product() -> None:
    weights, (gate, up, down) = _experts(256, 128, 1)
    x = torch.randn(8, 256).to(torch.bfloat16).float()
    for tile in (0, 3, 15):
        acc = _fragments(weights.gate_up[0, tile], weights.gate_up_scale[0, tile], x)
        rows = slice(8 * tile, 8 * tile + 8)
        want = torch.cat((gate[0][rows], up[0][rows])) @ x.double().T
        assert (acc - want).abs().max() < 1e-4
    h = torch.randn(8, 128).to(torch.bfloat16).float()
    acc = _fragments(weights.down[0, 5], weights.down_scale[0, 5], h)
    assert (acc - down[0][80:96] @ h.double().T).abs().max() < 1e-4


def test_reference_is_the_sum_over_held_experts_by_weight() -> None:
    torch.manual_seed(0)
    dense = [(torch.randn(4, 6).double(), torch.randn(4, 6).double(), torch.randn(6, 4).double()) for _ in range(3)]
    x, shared = torch.randn(2, 6).double(), torch.randn(2, 6).double()
    chosen, weights = torch.tensor([[0, 4], [3, 2]]), torch.rand(2, 2)
    got = ref.experts(x, lambda e: dense[e], chosen, weights, 2, 3, shared)
    for t, slots in enumerate([[(1, 2)], [(0, 1), (1, 0)]]):
        want = shared[t].clone()
        for slot, e in slots:
            gate, up, down = dense[e]
            a = gate @ x[t]
            want += weights[t, slot].double() * (down @ (a / (1 + torch.exp(-a)) * (up @ x[t])).to(torch.bfloat16).double())
        assert torch.allclose(got[t], want)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_bucket_has_forms_that_fit(shape: op.Shape) -> None:
    for experts, rows in itertools.product((16, 48, 384), (*EDGES, 128, 288, 512, 1024, 2304)):
        plan = op.choose(shape, rows, experts)
        for part, name in (("gate_up", plan.gate_up), ("down", plan.down)):
            assert all(forms[name].fits(shape, part) for forms in op.FORMS.values())
        assert plan.tile % 8 == 0
        assert rows <= (op.HOPPER[plan.down].rows or rows) and plan.whole
        assert (rows <= few_rows(shape.width)) == op.HOPPER[plan.down].sums
        for arch, forms in op.FORMS.items():  # what is counted without torch is what runs
            held, file = 48 if shape.scaled else 384, forms[plan.gate_up].file
            taken = 2 + (not forms[plan.down].sums) + (file == "crew") - (file == "joined")
            assert launches(rows, shape.width, shape.topk, held, experts, arch) == taken, (rows, experts, arch)


def test_forms_of_every_architecture_take_the_same_jobs() -> None:
    for forms in op.FORMS.values():
        assert {n: (f.tokens, f.rows, f.sums) for n, f in forms.items()} == {
            n: (f.tokens, f.rows, f.sums) for n, f in op.HOPPER.items()
        }


def test_blocks_of_a_crew_have_room_for_their_units() -> None:
    """The constant is written twice; with tiles of 16 tokens or more no call makes more jobs than a block lists."""
    source = (op.FOLDER / "crew.cu").read_text()
    assert f"MOST_UNITS = {op.CREW_UNITS};" in source
    for form in (f for f in (*op.HOPPER.values(), *sweep.FORMS.values()) if f.file == "crew"):
        jobs = most_jobs(MOST_ROWS_TO_FEW if form.tokens == 16 else BROAD_ROWS * 6, 8, 48, 8 * form.tokens)
        assert 2 * 4 * jobs <= 4096 * form.stages * form.tokens and jobs * 28 <= op.CREW_UNITS * 132


def test_counters_of_one_launch_for_both_parts_hold_its_units_and_blocks() -> None:
    """Jobs have a word each for them: 8 bits of warps, 15 of units, of which every block takes one too many, 9 of blocks."""
    source = (op.FOLDER / "joined.cu").read_text()
    assert "TAKEN = 1u << 8, LEFT = 1u << 23;" in source
    assert op.JOINED_UNITS + op.JOINED_BLOCKS < 2**15 and op.JOINED_BLOCKS < 2**9
    form = op.HOPPER["joined"]
    assert EP8.rows("gate_up") // 32 < 2**8
    assert op._joined_units(EP8, form, most_jobs(1024, 8, 48, 8 * form.tokens)) <= op.JOINED_UNITS
    assert form.blocks * op.MULTIPROCESSORS["sm_90a"] <= op.JOINED_BLOCKS


def test_bad_shapes_are_one_line() -> None:
    with pytest.raises(ValueError, match="hidden 7000 and width 2048"):
        op.Shape(7000, 2048, 8)
    with pytest.raises(ValueError, match="hidden size 200"):
        repack.empty(1, 200, 128, "cpu")


@pytest.mark.parametrize("name", sweep.FORMS)
def test_candidates_stay_within_limits(name: str) -> None:
    form = sweep.FORMS[name]
    for shape, _, _, pairs in sweep.CASES:
        for part in {part for pair in pairs for part, own in zip(op.PARTS, pair.split(), strict=True) if own == name}:
            assert form.fits(shape, part)
            source = jit.Source(op.FOLDER / f"{form.file}.cu", f"{part}_{form.file}", form.macros(shape, part))
            variant = check.Variant(source, form.threads, form.shared(shape, part), form.blocks, form.spill, archs=("sm_90a",))
            check.check("moe_int4", variant, "sm_90a")
            assert (form.shared(shape, part) + 1024) * form.blocks <= 233_472


def test_blocks_of_both_parts_fit_a_multiprocessor_for_one_row() -> None:
    up, down = op.HOPPER["split"], op.HOPPER["one"]
    shared = 2 * (up.shared(TP8, "gate_up") + 1024) + 4 * (down.shared(TP8, "down") + 1024)
    assert shared <= 233_472
    registers = [
        jit.build(jit.Source(op.FOLDER / f"{f.file}.cu", f"{part}_{f.file}", f.macros(TP8, part)), "sm_90a").registers
        for f, part in ((up, "gate_up"), (down, "down"))
    ]
    per_warp = [-(-r // 8) * 8 * 32 for r in registers]
    assert 2 * 9 * per_warp[0] + 4 * 4 * per_warp[1] <= 65_536, registers


@pytest.mark.parametrize("arch", jit.ARCHS)
@pytest.mark.parametrize("shape", [*SHAPES[:1], *SHAPES[3:]], ids=["k2.6", "k2.6 slice of 8", "k2.6 48 experts", "nano"])
def test_all_variants_compile_within_limits(arch: str, shape: op.Shape) -> None:
    for variant in op.variants([shape]):
        if arch in variant.archs:
            check.check("moe_int4", variant, arch)


# ---------------------------------------------------------------- on a GPU

NAN = float("nan")


def random_experts(shape: op.Shape, count: int, seed: int = 0) -> repack.Packed:
    """Random codes and scales straight in fragment order, on the device."""
    weights = repack.empty(count, shape.hidden, shape.width, "cuda")
    make = torch.Generator("cuda").manual_seed(seed)
    for codes, scales in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale)):
        for e in range(count):
            codes[e].random_(-(2**31), 2**31 - 1, generator=make)
            scales[e].copy_(torch.rand(scales[e].shape, device="cuda", generator=make) * 0.01)
    return weights


def held_of(shape: op.Shape) -> int:
    """How many experts a rank of this shape may hold."""
    return 48 if shape.scaled else 112 if shape.width > SLICE else 16 if shape == NANO else 48


def host_lists(chosen: torch.Tensor, weights: torch.Tensor, first: int, held: int, tile: int) -> Lists:
    """Lists as the router would write them, built on the host; capacity filled with values that would crash if read."""
    n, k = chosen.shape
    pairs, jobs = route_ref.lists(chosen.tolist(), first, held, tile)
    most = most_jobs(n, k, held, tile)
    pad = [2**30] * (n * k - len(pairs))
    ints = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
    return Lists(
        n, first, held,
        experts=chosen.int(), weights=route_ref.held_weights(chosen, weights, first, held),
        pairs=ints(pairs + pad), jobs=ints(jobs + [(2**30, 2**30, 8, 0)] * (most - len(jobs))).view(-1, 4), njobs=ints([len(jobs)]),
        partial=torch.empty(0),
    )  # fmt: skip


class Batch:
    """Rows `pick` of a pool of rows with their choices; runs any plan with poisoned buffers."""

    def __init__(self, shape: op.Shape, experts: int, rows: int = 1024, seed: int = 1, total: int | None = None) -> None:
        make = torch.Generator("cuda").manual_seed(seed)
        self.shape, self.experts = shape, experts
        self.x = torch.randn(rows, shape.hidden, device="cuda", generator=make).to(torch.bfloat16)
        self.shared = torch.randn(rows, shape.hidden, device="cuda", generator=make).to(torch.bfloat16)
        ranks = torch.rand(rows, total or experts, device="cuda", generator=make)
        self.chosen = ranks.argsort(-1)[:, : shape.topk].contiguous()
        self.weights = torch.rand(rows, shape.topk, device="cuda", generator=make) + 0.01

    def run(
        self, packed: repack.Packed, pick: torch.Tensor, plan: op.Plan, first: int = 0, live: int | None = None, shared: bool = True
    ) -> tuple[torch.Tensor, op.Workspace]:
        n = len(pick)
        count = n if live is None else live
        lists = host_lists(self.chosen[pick[:count]], self.weights[pick[:count]], first, packed.experts, plan.tile)
        if count < n:
            lists = grow(lists, n, self.shape.topk, plan.tile)
        out = torch.full((n, self.shape.hidden), NAN, device="cuda", dtype=torch.bfloat16)
        work = op.workspace(self.shape, n, "cuda")
        work.h.fill_(NAN)
        work.y.fill_(NAN)
        rows = torch.tensor([count], dtype=torch.int32, device="cuda")
        op.moe_int4(self.x[pick], packed, lists, rows, self.shared[pick] if shared else None, out, work, plan)
        torch.cuda.synchronize()
        return out, work


def grow(lists: Lists, rows: int, topk: int, tile: int) -> Lists:
    """The same lists with the capacity of more rows."""
    most = most_jobs(rows, topk, lists.held, tile)
    wide = {"experts": (rows, topk), "weights": (rows, topk), "pairs": (rows * topk,), "jobs": (most, 4)}
    for name, size in wide.items():
        old = getattr(lists, name)
        new = torch.full(size, NAN if old.is_floating_point() else 2**30, dtype=old.dtype, device="cuda")
        new[: len(old)] = old
        setattr(lists, name, new)
    lists.rows = rows
    return lists


def plans(shape: op.Shape, rows: int) -> list[op.Plan]:
    """Pairs of forms in which every form that may run for so many rows occurs, and what `choose` makes."""
    ups, downs = ([n for n, f in op.HOPPER.items() if f.fits(shape, p) and rows <= (f.rows or rows)] for p in ("gate_up", "down"))
    alone = [n for n in ups if op.HOPPER[n].file in ("crew", "joined")]
    ups, downs = ([n for n in names if n not in alone] for names in (ups, downs))
    pairs = [op.Plan(ups[i % len(ups)], downs[i % len(downs)]) for i in range(max(len(ups), len(downs)))]
    pairs += [op.Plan(name, name) for name in alone]
    return list(dict.fromkeys(pairs + [op.choose(shape, rows, e) for e in (384, 48, 16)]))


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_gives_a_row_the_bits_it_has_alone(shape: op.Shape) -> None:
    held = held_of(shape)
    packed, batch = random_experts(shape, held), Batch(shape, held)
    alone = op.Plan("stream", "few")
    probes = torch.tensor([0, 5, 11], device="cuda")
    base = {int(p): batch.run(packed, p[None], alone)[0][0] for p in probes}
    others = torch.tensor([i for i in range(1024) if i not in base], device="cuda")
    for rows in (3, 4, *EDGES[2:], 128, 512, 1024):
        rest = others[torch.randperm(len(others), device="cuda")[: rows - len(probes)]]
        pick = torch.cat((probes, rest))
        pick = pick[torch.randperm(rows, device="cuda")]
        for plan in plans(shape, rows):
            out, _ = batch.run(packed, pick, plan)
            assert not out.isnan().any(), (rows, plan)
            for i, p in enumerate(pick.tolist()):
                assert p not in base or torch.equal(out[i], base[p]), (rows, plan, i)


@gpu
@needs_gpu
def test_small_experts_of_every_chosen_form_have_the_bits_of_few_rows() -> None:
    """Small enough for the sanitizers, and wide enough for one launch and for a crew."""
    shape = op.shape_of(1024, 1024, 4, 8)
    packed, batch = random_experts(shape, 8), Batch(shape, 8, rows=110)
    base = {p: batch.run(packed, torch.tensor([p], device="cuda"), op.Plan("stream", "few"))[0][0] for p in (0, 23)}
    for rows in (24, 40, 65, 110):
        out, _ = batch.run(packed, torch.arange(rows, device="cuda"), op.choose(shape, rows, 8))
        assert not out.isnan().any() and all(torch.equal(out[p], row) for p, row in base.items()), rows


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 65])
def test_result_matches_float64(shape: op.Shape, rows: int) -> None:
    held, total = (8, 16) if shape == NANO else (held_of(shape), 384)
    packed, batch = random_experts(shape, held), Batch(shape, held, rows=rows, total=total)
    if rows == 1:
        batch.chosen[0] = torch.arange(shape.topk, device="cuda") * 3 % total
    for first in (0, total - held):
        out, work = batch.run(packed, torch.arange(rows, device="cuda"), op.choose(shape, rows, total), first)
        for t in range(0, rows, 4):
            one = slice(t, t + 1)
            dense = functools.lru_cache(None)(lambda e: repack.expert(packed, e, rounded=shape.scaled))
            want = ref.experts(batch.x[one], dense, batch.chosen[one], batch.weights[one], first, held, batch.shared[one])[0]
            error = (out[t].double() - want).abs().max() / want.abs().max()
            assert error < 6e-3, (t, first)


@gpu
@needs_gpu
def test_last_expert_of_384_lies_past_two_to_the_31() -> None:
    packed, batch = random_experts(K26, 384), Batch(K26, 384, rows=2)
    batch.chosen[0] = torch.arange(376, 384, device="cuda")
    x, chosen, weights, shared = (t[:1] for t in (batch.x, batch.chosen, batch.weights, batch.shared))
    want = ref.experts(x, lambda e: repack.expert(packed, e), chosen, weights, 0, 384, shared)[0]
    for plan in plans(K26, 1):
        out, _ = batch.run(packed, torch.arange(1, device="cuda"), plan)
        assert (out[0].double() - want).abs().max() / want.abs().max() < 6e-3, plan


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [TP8, NANO], ids=str)
def test_padding_rows_and_other_ranks_leave_nothing(shape: op.Shape) -> None:
    total = 16 if shape == NANO else 48
    packed, batch = random_experts(shape, total // 2), Batch(shape, total // 2, rows=64, total=total)
    for rows, live in ((4, 2), (4, 0), (33, 20), (64, 63)):
        pick = torch.arange(rows, device="cuda")
        for plan in plans(shape, rows):
            out, _ = batch.run(packed, pick, plan, first=total // 4, live=live, shared=False)
            assert out[live:].isnan().all() and not out[:live].isnan().any(), (rows, live, plan)
            if live:
                full, _ = batch.run(packed, pick[:live], plan, first=total // 4, shared=False)
                assert torch.equal(out[:live], full)
    batch.chosen[0] = torch.arange(shape.topk, device="cuda")
    with_shared, _ = batch.run(packed, torch.arange(1, device="cuda"), op.choose(shape, 1, total), first=total // 2)
    assert torch.equal(with_shared[0], batch.shared[0])


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [TP8, EP8], ids=str)
def test_candidates_of_the_sweep_give_the_bits_of_the_forms_in_use(shape: op.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the sweep's forms are an H200's")
    packed, batch = random_experts(shape, 48), Batch(shape, 48)
    known = {}
    for n, live in CASES:
        known[n, live], _ = batch.run(packed, torch.arange(n, device="cuda"), op.choose(shape, n, 48), live=live)
    forms = op.HOPPER | sweep.FORMS
    monkeypatch.setattr(op, "HOPPER", forms)
    monkeypatch.setattr(op, "FORMS", {"sm_90a": forms})
    for (n, live), want in known.items():
        usual = op.choose(shape, n, 48)
        for name in sweep.FORMS:
            ups, downs = ([name] if forms[name].fits(shape, part) else [] for part in ("gate_up", "down"))
            plans = [op.Plan(up, usual.down) for up in ups] + [op.Plan(usual.gate_up, down) for down in downs]
            plans = [plan for plan in plans if plan.whole] or [op.Plan(name, name)] * bool(ups and downs)
            for plan in plans if n <= (forms[name].rows or n) else []:
                got, _ = batch.run(packed, torch.arange(n, device="cuda"), plan, live=live)
                assert torch.equal(got[:live], want[:live]) and got[live:].isnan().all(), (n, live, plan)


@gpu
@needs_gpu
@pytest.mark.parametrize(("shape", "rows"), [(TP8, 1), (TP8, 33), (TP8, 128), (EP8, 9), (EP8, 72)], ids=str)
def test_graph_replays_are_bitwise_equal(shape: op.Shape, rows: int) -> None:
    packed, batch = random_experts(shape, 48), Batch(shape, 48)
    pick, plan = torch.arange(rows, device="cuda"), op.choose(shape, rows, 48)
    first, _ = batch.run(packed, pick, plan)
    lists = host_lists(batch.chosen[:rows], batch.weights[:rows], 0, 48, plan.tile)
    live, work = torch.tensor([rows], dtype=torch.int32, device="cuda"), op.workspace(shape, rows, "cuda")
    out, x, shared = torch.zeros_like(first), batch.x[:rows], batch.shared[:rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.moe_int4(x, packed, lists, live, shared, out, work, plan)
    for _ in range(20):
        out.zero_()
        for _ in range(50):
            graph.replay()
        assert torch.equal(out, first)
