"""`linear`: layouts by emulation, limits by compiling, and on a GPU the law of the bits."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.check import Variant
from draftwood.kernels.linear import op, plan, ref, sweep
from draftwood.kernels.linear.plan import Shape
from draftwood.kernels.linear.tuned import TUNED

EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 40, 41, 63, 64, 65, 72, 73, 127, 128)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FEW = {
    "q_a": Shape(2112, 7168), "q_b/8": Shape(1536, 1536), "w_uk": Shape(512, 128, 8), "w_uv": Shape(128, 512, 8),
    "w_uv whole": Shape(128, 512, 64), "gate_up/8": Shape(512, 7168, glu=True), "down/8": Shape(7168, 256),
    "o": Shape(7168, 8192), "gate_up": Shape(4096, 7168, glu=True), "dense gate_up": Shape(36864, 7168, glu=True),
    "nano q_a": Shape(240, 384), "nano w_uk": Shape(96, 32, 8), "nano w_uv": Shape(16, 96, 8), "nano down": Shape(384, 80),
    "nano o/8": Shape(384, 16), "nano gate_up/8": Shape(32, 384, glu=True), "nano head": Shape(8192, 384),
}  # fmt: skip


# --------------------------------------------------------------------------------------------- layouts, without a GPU


def _fragment_a(words: np.ndarray) -> np.ndarray:
    """[32 lanes, 4 registers, 2] -> A [16, 16], by the PTX table of mma.m16n8k16."""
    a = np.zeros((16, 16))
    for lane in range(32):
        g, q = divmod(lane, 4)
        for register in range(4):
            a[g + 8 * (register & 1), 2 * q + 8 * (register >> 1) :][:2] = words[lane, register]
    return a


def _fragment_b(words: np.ndarray) -> np.ndarray:
    """[32 lanes, 2 registers, 2] -> B [16, 8]."""
    b = np.zeros((16, 8))
    for lane in range(32):
        g, q = divmod(lane, 4)
        for register in range(2):
            b[2 * q + 8 * register : 2 * q + 8 * register + 2, g] = words[lane, register]
    return b


def _emulate(packed: torch.Tensor, x: np.ndarray, s: int) -> np.ndarray:
    """What both kernels do with one head's packed weight and 8 tokens, in exact arithmetic."""
    tiles, steps, _ = packed.shape
    x = np.pad(x, ((0, 0), (0, steps * 64 - x.shape[1])))
    y = np.zeros((8, tiles * 16))
    for tile in range(tiles):
        total = 0
        for segment in range(s):
            acc = np.zeros((16, 8))
            for step in range(steps * segment // s, steps * (segment + 1) // s):
                w = packed[tile, step].double().numpy().reshape(4, 32, 4, 2)
                for half in range(2):
                    lanes = np.stack([x[lane // 4, step * 64 + half * 32 + lane % 4 * 8 :][:8].reshape(4, 2) for lane in range(32)])
                    acc += _fragment_a(w[2 * half]) @ _fragment_b(lanes[:, :2])
                    acc += _fragment_a(w[2 * half + 1]) @ _fragment_b(lanes[:, 2:])
            total = total + acc
        y[:, tile * 16 : tile * 16 + 16] = total.T
    return y


@pytest.mark.parametrize(("n", "k", "s"), [(32, 192, 2), (16, 80, 1), (48, 16, 1), (16, 384, 4)])
def test_fragments_of_the_packed_weight_multiply_to_the_product(n: int, k: int, s: int) -> None:
    numbers = torch.Generator().manual_seed(0)
    w = torch.randint(-8, 9, (n, k), generator=numbers).float()
    x = torch.randint(-8, 9, (8, k), generator=numbers).float()
    packed = op.pack(w).data[0]
    assert np.array_equal(_emulate(packed, x.double().numpy(), s), (x @ w.T).double().numpy())


def test_packing_is_undone_by_unpacking() -> None:
    for heads, n, k in ((1, 32, 64), (3, 16, 80), (2, 48, 16)):
        w = torch.randn(heads, n, k, dtype=torch.bfloat16)
        packed = op.pack(w)
        assert packed.data.numel() * 2 == packed.shape.nbytes
        assert torch.equal(ref.unpack(packed.data, k), w)


def test_a_gate_meets_its_up_in_one_tile() -> None:
    gate, up = torch.randn(24, 64), torch.randn(24, 64)
    rows = ref.interleave(gate, up).view(3, 2, 8, 64)
    assert torch.equal(rows[:, 0].reshape(24, 64), gate)
    assert torch.equal(rows[:, 1].reshape(24, 64), up)


def test_staged_x_is_read_where_it_was_put_without_bank_conflicts() -> None:
    place = {t * 128 + ((c ^ ((t & 1) << 2)) * 16): (t, c) for t in range(8) for c in range(8)}
    for half in range(2):
        for phase in range(4):
            lanes = [divmod(lane, 4) for lane in range(phase * 8, phase * 8 + 8)]
            at = [(g * 128 + ((q ^ ((g & 1) << 2)) * 16)) ^ 64 * half for g, q in lanes]
            assert [place[a] for a in at] == [(g, half * 4 + q) for g, q in lanes]
            assert len({a // 16 % 8 for a in at}) == 8


def test_partials_are_written_without_bank_conflicts() -> None:
    for rows in [16 * n + 4 for n in range(1, 9)] + [32 * w + 4 for w in range(1, 10)]:
        assert len({(2 * q * rows + g) % 32 for g in range(8) for q in range(4)}) == 32


@pytest.mark.parametrize("depth", [3, 4])
@pytest.mark.parametrize("x_steps", [1, 2, 4])
def test_wide_rings_are_read_after_they_landed_and_written_after_they_were_read(depth: int, x_steps: int) -> None:
    """Copies land only when a wait proves it, and a barrier alone shows them (and that slots are free) to other threads."""
    ahead = depth - 2 + x_steps
    slots = ahead + x_steps
    for steps in (1, 2, 3, 4, 5, 7, 9, 14, 21, 32):
        groups = []
        for i in range(depth - 1):
            now = [("w", j) for j in range(depth - 1)] + [("x", j) for j in range(x_steps - 1)] if i == 0 else []
            groups.append([copy for copy in [*now, ("x", i + x_steps - 1)] if copy[1] < steps])
        holds: dict[int, int] = {j % slots: j for g in groups for kind, j in g if kind == "x"}
        visible, barrier = 0, 0
        for step in range(steps):
            landed = len(groups) - (depth - 2)
            if step % x_steps == 0:
                visible, barrier = landed, step
            new = [("w", step + depth - 1), ("x", step + ahead)]
            if step + ahead < steps:
                assert holds.get((step + ahead) % slots, -1) < barrier
                holds[(step + ahead) % slots] = step + ahead
            assert (step + depth - 1) % depth != step % depth
            groups.append([copy for copy in new if copy[1] < steps])
            assert ("w", step) in [copy for g in groups[:landed] for copy in g]
            assert ("x", step) in [copy for g in groups[:visible] for copy in g]


# ---------------------------------------------------------------------------------------------------- plan and limits


def _served() -> list[Shape]:
    return [s for world in (1, 2, 4, 8) for shapes in (plan.k26_shapes, plan.nano_shapes) for s in shapes(world).values()]


def test_every_form_sums_the_segments_of_its_shape() -> None:
    for shape in _served():
        s = plan.segments(shape)
        assert shape.steps >= s
        for machine, n in itertools.product((plan.H200, plan.B300, plan.PRO_6000), (1, 8, 9, 33, 65, 128, 300, 1024)):
            for form in plan.forms_for(shape, n, machine) + (plan.candidates(shape, n) if machine == plan.H200 else ()):
                macros = dict(form.macros)
                fed = form.entry == "linear_fed"
                assert macros["SEVERAL"] == (s > 1) if fed else macros["CLUSTER"] * macros.get("KWARPS", 1) == s
                assert form.shared <= machine.block
                grid = form.grid(shape, n)
                assert grid[1] < 65536 and grid[2] < 65536
                assert form.groups(shape) * form.rows >= shape.outputs
                if fed:
                    assert 0 < grid[0] <= machine.slots(1, form.cluster) and grid[0] % form.cluster == 0
                    assert plan.arranged_tokens(form, n) in (0, *range(n, n + form.tokens * macros["ALONG"]))
                    assert macros["DEPTH"] >= (4 if macros["ARRANGED"] else 3)  # rows of x have a ring of their own
                else:
                    assert grid[1] * form.tokens >= n


def test_wide_blocks_load_the_multiprocessors_of_an_h200_evenly() -> None:
    """The busiest multiprocessor has at most a quarter more than its share of every large K2.6 projection."""
    for shape in plan.k26_shapes().values():
        for tiles in (2, 3, 5, 9):
            form = plan.wide_forms(shape, tiles)[0]
            _, _, groups = form.grid(shape, 8 * tiles)
            busiest = -(-groups * form.cluster // plan.H200.count) * form.rows
            if shape.nbytes > 20_000_000:
                assert busiest * plan.H200.count <= 1.26 * shape.outputs * shape.heads * form.cluster, (shape, tiles)


def test_forms_measured_to_be_the_fastest_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FED", True)
    shapes = {(s.outputs, s.inputs, s.heads): s for world in (1, 8) for s in plan.k26_shapes(world).values()}
    for (*key, rows), (kernel, *knobs) in TUNED.items():
        form = plan.form_for(shapes[tuple(key)], rows)
        assert form.entry == f"linear_{kernel}"
        assert [dict(form.macros)[k] for k in plan.KNOBS[kernel]] == knobs


def test_a_sweep_chooses_the_fastest_form_of_the_right_bits() -> None:
    name, shape = "tp1 o", plan.k26_shapes()["o"]
    usual, other = plan.computed(shape, 65)[:2]
    wide = plan.wide_forms(shape, 9)[0]
    first = {"case": name, "rows": 65, "same_bits": True}
    lines = [
        first | {"entry": form.entry, **dict(form.macros), "us": us} for form, us in ((usual, 40.0), (other, 39.9), (wide, 30.0))
    ]
    chosen = ("wide", *(dict(wide.macros)[k] for k in plan.KNOBS["wide"]))
    assert sweep.choose(lines) == f"    {(7168, 8192, 1, 72)}: {chosen},\n".replace("'", '"')
    assert sweep.choose([*lines[:2], lines[2] | {"same_bits": False}]) == ""


def test_warp_group_forms_hold_more_rows_of_weights_than_tokens_where_both_come_from_l2() -> None:
    """x goes to every block: at 128 rows a block of at least 8 row tiles reads no more of it than of the weights."""
    for name in ("o", "dense gate_up", "lm_head", "draft fc", "shared down"):
        macros = dict(plan.gmma_forms(plan.k26_shapes()[name], 16)[0].macros)
        assert macros["BLOCK"] >= 8, name


@pytest.mark.parametrize("fed", [True, False])
def test_variants_hold_everything_the_launcher_chooses(fed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FED", fed)
    for machine in (plan.H200, plan.B300, plan.PRO_6000):
        known = {(f.entry, f.macros): f.shared for f in plan.all_forms(machine)}
        for shape in _served():
            for n in (1, 9, 17, 33, 65, 128, 129, 260, 576, 900, 2000):
                form = plan.form_for(shape, n, machine)
                assert known[form.entry, form.macros] == form.shared


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_kernels_of_the_largest_forms_stay_within_limits(arch: str) -> None:
    machine = plan.MACHINES[arch]
    some = (("o", (1, 9, 65, 128)), ("gate_up/8", (1, 33)), ("nano down", (1, 65)))
    forms = [plan.form_for(FEW[name], n, machine) for name, rows in some for n in rows]
    known = {v.source.label(): v for v in op.variants() if arch in v.archs}
    for form in forms:
        built = check.check("linear", known[jit.Source(op._FOLDER, form.entry, dict(form.macros)).label()], arch)
        assert built.spill_bytes == 0


@pytest.mark.parametrize(("name", "n"), [("o", 65), ("gate_up/8", 128), ("nano down", 9), ("w_uv", 40), ("o", 8)])
def test_warp_group_forms_stay_within_limits(name: str, n: int) -> None:
    for form in plan.gmma_forms(FEW[name], plan._split(n)[0])[:1]:
        resident = plan.GMMA_WARPS[form.tokens // 8] // (form.threads // 32)
        variant = Variant(op.source(form), form.threads, form.shared, max(resident, 1), archs=("sm_90a",))
        check.check("linear", variant, "sm_90a")


@pytest.mark.parametrize(("name", "n"), [("o", 1024), ("gate_up", 576), ("q_a", 288), ("w_uv whole", 576), ("dense gate_up", 512)])
def test_fed_forms_stay_within_limits(name: str, n: int) -> None:
    form = plan.fed_forms(FEW[name], n)[0]
    check.check("linear", Variant(op.source(form), form.threads, form.shared, archs=("sm_90a",)), "sm_90a")


def test_fed_blocks_fill_an_h200_evenly_where_rows_allow_it() -> None:
    """Of the multiprocessors' time in whole rounds of tiles no more than a third is lost to tiles that are not there."""
    shapes = plan.k26_shapes()
    for name in ("o", "q_b", "shared gate_up", "shared down", "dense gate_up", "lm_head", "draft fc"):
        for n in (256, 512, 576, 1024, 1152):
            form = plan.fed_forms(shapes[name], n)[0]
            tiles = -(-n // form.tokens) * form.groups(shapes[name])
            rounds = -(-tiles // plan.H200.count)
            wanted = n * shapes[name].outputs
            assert rounds * plan.H200.count * form.tokens * form.rows <= 1.5 * wanted, (name, n, form)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))  # a quarter of sm_90a's takes a core 70 seconds
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_variant_stays_within_limits(arch: str, part: int) -> None:
    for variant in [v for v in op.variants() if arch in v.archs][part::4]:
        check.check("linear", variant, arch)


def test_unfit_tensors_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="multiple of 16 and inputs of 8"):
        op.pack(torch.zeros(24, 64))
    with pytest.raises(ValueError, match="multiple of 8"):
        op.pack_swiglu(torch.zeros(12, 64), torch.zeros(12, 64))
    weight = op.pack(torch.zeros(32, 64))
    with pytest.raises(ValueError, match="does not fit a weight of 1 x 32 x 64"):
        op.linear(torch.zeros(2, 72, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="x must be bf16"):
        op.linear(torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match="rows must be one int32"):
        op.linear(torch.zeros(2, 64, dtype=torch.bfloat16), weight, rows=torch.zeros(1))


def _every_silu(folder: Path) -> jit.Source:
    """A kernel that counts the floats, of all there are, whose silu in fed.cu differs from fold.cuh's."""
    file = folder / "every_silu.cu"
    file.write_text(
        f'#include "{op._FOLDER}/fed.cu"\n'
        'extern "C" __global__ void every_silu(int* differ) {\n'
        "  for (u64 i = blockIdx.x * 256 + threadIdx.x; i < 1ull << 32; i += gridDim.x * 256) {\n"
        "    const float g = __uint_as_float((u32)i);\n"
        "    if (__float_as_uint(silu(g)) != __float_as_uint(silu_at_once(g))) atomicAdd(differ, 1);\n"
        "  }\n"
        "}\n"
    )
    return jit.Source(file, "every_silu", {"GLU": 1})


def test_the_comparison_of_every_silu_compiles(tmp_path: Path) -> None:
    assert jit.build(_every_silu(tmp_path), "sm_90a").spill_bytes == 0


# --------------------------------------------------------------------------------------------------------- on a device


def _random(shape: Shape, n: int, seed: int = 0) -> tuple[torch.Tensor, op.Weight]:
    numbers = torch.Generator(device="cuda").manual_seed(seed)
    data = torch.empty(shape.nbytes // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.05, generator=numbers)
    weight = op.Weight(data.view(shape.heads, shape.outputs // 16, shape.steps, 1024), shape)
    size = (n, shape.heads, shape.inputs) if shape.heads > 1 else (n, shape.inputs)
    return torch.randn(size, device="cuda", generator=numbers).to(torch.bfloat16), weight


def _reference(x: torch.Tensor, weight: op.Weight) -> torch.Tensor:
    whole = ref.unpack(weight.data, weight.shape.inputs).double()
    if weight.shape.glu:
        pairs = whole[0].view(-1, 2, 8, weight.shape.inputs)
        return ref.swiglu(x.double(), pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1), torch.float64)
    if weight.shape.heads > 1:
        return ref.heads(x.double(), whole, torch.float64)
    return ref.linear(x.double(), whole[0], out=torch.float64)


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("name", FEW)
    def test_results_are_the_float64_product_to_rounding(self, name: str) -> None:
        x, weight = _random(FEW[name], 128)
        want = _reference(x, weight)
        for n in (1, 9, 33, 65, 128):
            got = op.linear(x[:n].contiguous(), weight).double()
            assert float((got - want[:n]).abs().max() / want.abs().max()) < 6e-3, n

    @pytest.mark.parametrize("name", FEW)
    def test_a_row_is_bitwise_the_same_alone_and_in_any_company(self, name: str) -> None:
        x, weight = _random(FEW[name], 128)
        alone = torch.cat([op.linear(x[i : i + 1].contiguous(), weight) for i in range(128)])
        assert not alone.isnan().any()
        for n in EDGES:
            order = torch.randperm(128, generator=torch.Generator().manual_seed(n)).cuda()[:n]
            assert torch.equal(_bits(op.linear(x[order], weight)), _bits(alone[order])), n

    @pytest.mark.parametrize("name", ["q_a", "o", "w_uv", "gate_up/8", "nano down", "nano o/8"])
    def test_every_form_gives_the_same_bits_up_to_a_thousand_rows(self, name: str) -> None:
        x, weight = _random(FEW[name], 1024)
        want = op.linear(x, weight)
        alone = torch.cat([op.linear(x[i : i + 1].contiguous(), weight) for i in range(0, 1024, 31)])
        assert torch.equal(_bits(alone), _bits(want[::31]))
        for n in (1, 8, 9, 33, 65, 128, 129, 300, 1024):
            for form in plan.forms_for(weight.shape, n):
                assert torch.equal(_bits(op.linear(x[:n].contiguous(), weight, form=form)), _bits(want[:n])), (form, n)

    @pytest.mark.parametrize("name", ["q_a", "o", "w_uv", "gate_up/8", "nano down", "nano o/8", "nano gate_up/8"])
    def test_candidates_have_the_bits_of_the_forms_in_use(self, name: str) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("they are an H200's")
        x, weight = _random(FEW[name], 300)
        want = op.linear(x, weight)
        for n in (1, 9, 33, 65, 127, 300):
            firsts = {form.entry: form for form in reversed(plan.candidates(weight.shape, n))}  # of each kernel
            for form in firsts.values():
                got = op.linear(x[:n].contiguous(), weight, form=form)
                assert torch.equal(_bits(got), _bits(want[:n])), (form, n)
                few = torch.full_like(got, 7.0)
                op.linear(x[:n].contiguous(), weight, few, rows=torch.tensor([n // 2], dtype=torch.int32, device="cuda"), form=form)
                assert torch.equal(_bits(few[: n // 2]), _bits(want[: n // 2])) and bool((few[n // 2 :] == 7).all())

    @pytest.mark.parametrize("name", ["q_a", "o", "w_uv", "gate_up/8", "nano down", "nano w_uv"])
    def test_rows_beyond_the_devices_count_are_neither_read_nor_written(self, name: str) -> None:
        x, weight = _random(FEW[name], 72)
        want = op.linear(x, weight)
        for n in (0, 1, 8, 9, 65):
            poisoned = x.clone()
            poisoned[n:] = float("nan")
            out = torch.full_like(want, 7.0)
            op.linear(poisoned, weight, out, rows=torch.tensor([n], dtype=torch.int32, device="cuda"))
            assert torch.equal(_bits(out[:n]), _bits(want[:n]))
            assert bool((out[n:] == 7).all())

    def test_a_poisoned_row_stays_alone(self) -> None:
        for name in ("q_a", "w_uk", "gate_up/8", "nano down"):
            x, weight = _random(FEW[name], 33)
            want = op.linear(x, weight)
            x[5] = float("nan")
            got = op.linear(x, weight)
            rest = [i for i in range(33) if i != 5]
            assert torch.equal(_bits(got[rest]), _bits(want[rest]))
            assert bool(got[5].isnan().all())

    def test_float32_results_are_the_same_sums_unrounded(self) -> None:
        x, weight = _random(FEW["nano head"], 150)
        for n in (1, 8, 33, 150):
            wide = op.linear(x[:n].contiguous(), weight, dtype=torch.float32)
            assert torch.equal(_bits(wide.to(torch.bfloat16)), _bits(op.linear(x[:n].contiguous(), weight)))

    def test_a_residual_is_added_as_tensors_add_also_in_place(self) -> None:
        x, weight = _random(FEW["down/8"], 300)
        for n in (1, 9, 65, 300):
            residual = torch.randn(n, 7168, device="cuda").to(torch.bfloat16)
            want = op.linear(x[:n].contiguous(), weight) + residual
            assert torch.equal(_bits(op.linear(x[:n].contiguous(), weight, residual=residual)), _bits(want))
            assert torch.equal(_bits(op.linear(x[:n].contiguous(), weight, residual, residual)), _bits(want))

    def test_heads_are_read_and_written_with_strides(self) -> None:
        for n in (9, 150):
            x, weight = _random(FEW["w_uk"], n)
            query = torch.randn(n, 8, 192, device="cuda").to(torch.bfloat16)
            query[..., :128] = x
            for place in (0, 2):  # fed forms store four results at once, and leave the other place to others
                out = torch.full((n, 8, 576), 3.0, dtype=torch.bfloat16, device="cuda")
                op.linear(query[..., :128], weight, out[..., place : place + 512])
                assert torch.equal(_bits(out[..., place : place + 512].contiguous()), _bits(op.linear(x, weight)))
                assert bool((out[..., place + 512 :] == 3).all()) and bool((out[..., :place] == 3).all())

    def test_fed_blocks_skip_tiles_without_rows_and_meet_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many times: blocks that only skip leave at once."""
        monkeypatch.setattr(plan, "FED", True)
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("they are an H200's")
        for name in ("q_a", "o", "gate_up", "w_uv whole"):
            x, weight = _random(FEW[name], 1152)
            want = op.linear(x, weight)
            for live in (0, 1, 129, 433, 1000):
                out, rows = torch.full_like(want, 7.0), torch.tensor([live], dtype=torch.int32, device="cuda")
                for _ in range(500):
                    op.linear(x, weight, out, rows=rows)
                assert torch.equal(_bits(out[:live]), _bits(want[:live])) and bool((out[live:] == 7).all()), (name, live)

    def test_a_swiglu_of_many_rows_has_the_bits_of_a_division_for_every_gate(self, tmp_path: Path) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("fed forms are an H200's")
        built = jit.Kernel(_every_silu(tmp_path), 0)
        differ = torch.zeros(1, dtype=torch.int32, device="cuda")
        built(132 * 8, 256, (differ,))
        assert int(differ) == 0

    def test_offsets_past_two_to_the_31(self) -> None:
        shape = Shape(163840, 7168)
        x, weight = _random(shape, 9)
        tail = op.Weight(weight.data[:, -1:].contiguous(), Shape(16, 7168))
        got = op.linear(x, weight, dtype=torch.float32)[:, -16:]
        want = _reference(x, tail)
        assert float((got - want).abs().max() / want.abs().max()) < 1e-5
        stride = 1 << 28
        store = torch.empty(8 * stride + 7168, dtype=torch.bfloat16, device="cuda")
        far = store.as_strided((9, 7168), (stride, 1))
        far.copy_(x)
        assert torch.equal(op.linear(far, tail), op.linear(x, tail))

    def test_a_thousand_replays_of_a_chain_are_bitwise_equal(self) -> None:
        x, first = _random(FEW["q_b/8"], 33)
        _, second = _random(dataclasses.replace(FEW["q_b/8"]), 33, seed=1)
        middle, out = torch.empty_like(x), torch.empty_like(x)

        def chain() -> None:
            op.linear(x, first, middle)
            op.linear(middle, second, out, residual=None)
            op.linear(out, first, middle)
            op.linear(middle, second, out)

        chain()
        torch.cuda.synchronize()
        want = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        for _ in range(1000):
            graph.replay()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(50):
            out.zero_()
            graph.replay()
            wrong += (_bits(out) != _bits(want)).sum()
        assert int(wrong) == 0
