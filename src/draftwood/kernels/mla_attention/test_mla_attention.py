"""Latent attention of trees: the reference by brute force, the kernels by emulation and by limits; on a GPU, the laws."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.errors import ConfigError
from draftwood.kernels import check, jit
from draftwood.kernels.mla_attention import bench, op, ref, scenario, sizes
from draftwood.kernels.mla_attention.scenario import SCALE, alone, attend, make, reference, same

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
TREES = [(1, "near"), (9, "near"), (33, "wide"), (65, "near"), (65, "chain")]
STARTS = (0, 1, 63, 64, 65, 127, 128, 511, 512, 1023, 4095)
EDGES = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
SMALL = op.Law(128, 2, (512, 1024, 2048))
"""Short groups, so that emulation meets several."""


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest value; NaN counts as infinite."""
    e = float((got.double() - want).abs().max() / want.abs().max())
    return e if e == e else float("inf")


def live(step: scenario.Step) -> torch.Tensor:
    """Flat tokens that are live nodes."""
    return torch.tensor(
        [int(s) + i for s, n in zip(step.starts, step.counts, strict=True) for i in range(int(n))], device=step.q.device
    )


# ------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("kind", ["near", "wide", "chain", "star"])
def test_reference_sees_the_prefix_its_ancestors_and_itself(kind: str) -> None:
    step = make([130, 0, 63], [9, 65, 0], heads=2, kind=kind, latent=32, rope=16, dtype=torch.float64)
    got = reference(step)
    for row, paths in enumerate(step.paths):
        for node, path in enumerate(paths):
            t = int(step.starts[row]) + node
            keys = torch.cat((step.prefixes[row], step.latents[row][path]))
            for head in range(2):
                weights = torch.softmax(keys @ torch.cat((step.q[t, head], step.q_pe[t, head])) * SCALE, 0)
                torch.testing.assert_close(got[t, head], weights @ keys[:, :32])


def test_reference_of_a_node_alone_is_that_of_the_node_in_its_tree() -> None:
    step = make([100], [33], heads=2, latent=32, rope=16, dtype=torch.float64)
    got = reference(step)
    for node in range(33):
        torch.testing.assert_close(reference(alone(step, 0, node))[0], got[node])


# ------------------------------------------------------------------------------------------------- limits


@pytest.mark.slow
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_variant_keeps_its_limits(arch: str) -> None:
    for variant in op.variants():
        if arch in variant.archs:
            check.check("mla_attention", variant, arch)


@pytest.mark.parametrize("columns", [False, True])
def test_what_is_chosen_fits_its_architecture_and_is_of_one_family(columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "COLUMNS", columns)
    for arch in jit.ARCHS:
        for rows in (1, 8, 128):
            for nodes in (1, 9, 65):
                for heads in (8, 16, 32, 64):
                    for context in (1024, 32768, 262144):
                        shape = op.SHAPES[sizes.choose(rows, nodes, heads, context, arch)]
                        assert op.fits(shape, arch, 576) and shape.columns == (columns and arch == "sm_90a")
                        sizes.need(rows, nodes, rows * nodes, heads, context, 512, shape, partial_bytes=1 << 30)


def test_cases_cover_every_goal_and_count_bytes() -> None:
    found = {c.label: c for c in bench.cases()}
    for heads, nodes, context in bench.GOALS:
        case = found[f"1 x {nodes} nodes, {heads} heads, context {context}"]
        assert case.bytes > context * 1152 and case.flops == 2 * nodes * heads * context * 1088


@pytest.mark.parametrize(("rows", "nodes", "said"), [(1, 66, "66 nodes"), (257, 1, "257 rows")])
def test_a_bucket_beyond_the_kernels_is_one_line(rows: int, nodes: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        op.MlaAttention(rows, nodes, 8, 1024, SCALE, torch.device("cuda", 0))


@pytest.mark.parametrize(("name", "heads", "multiple"), [("c1", 4, 8), ("n4", 8, 64)])
def test_forms_with_lines_as_columns_refuse_heads_that_do_not_fill_them(name: str, heads: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=f"with {heads} heads; it takes multiples of {multiple}"):
        sizes.shape_for(1, 1, heads, 1024, 512, "sm_90a", name)


class Recorder:
    """Stands in for a loaded kernel: holds each launch against the signature in the source."""

    launched: list[tuple[str, int, int]] = []

    def __init__(self, file: str, entry: str, shared: int) -> None:
        self.entry, self.shared = entry, shared
        text = (op.FOLDER / file).read_text()
        inside = re.search(entry + r"\((.*?)\)\s*{", text, re.DOTALL)
        assert inside is not None
        self.parameters = [" ".join(p.split()) for p in inside[1].split(",")]

    def __call__(self, grid: int | tuple[int, ...], block: int, args: list[object], pdl: bool = False) -> None:
        assert len(args) == len(self.parameters)
        for arg, parameter in zip(args, self.parameters, strict=True):
            kind = parameter.rsplit(" ", 1)[0]
            if "*" in parameter:
                assert isinstance(arg, torch.Tensor), parameter
            else:
                assert type(arg) is {"int": np.int32, "long long": np.int64, "float": np.float32}[kind], parameter
        size = grid if isinstance(grid, int) else grid[0] * grid[1]
        self.launched.append((self.entry, size, block))


@pytest.mark.parametrize("name", sorted(op.SHAPES))
def test_launches_match_the_signatures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "arch", lambda device: "sm_90a")
    monkeypatch.setattr(op, "processors", lambda device: 132)
    monkeypatch.setattr(op, "_load", lambda file, entry, macros, device, shared: Recorder(file, entry, shared))
    monkeypatch.setattr(Recorder, "launched", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    nodes = isinstance(op.SHAPES[name], sizes.Nodes)
    attend(make([300, 5], [5, 3], 64 if nodes else 8), name)
    plan, fold = ("mla_plan_nodes", (160, 128)) if nodes else ("mla_plan", (2 * 5 * 8 * 4, 256))
    assert [entry for entry, _, _ in Recorder.launched] == [plan, "mla_attend", "mla_combine"]
    assert Recorder.launched[1][2] == op.SHAPES[name].threads(512) and Recorder.launched[2][1:] == fold


# ------------------------------------------------------------------------------------------------- emulation


def _emulator(folder: Path, shape: op.Form, latent: int, rope: int, cols: int = 0) -> Path:
    """The kernels of a form as a program in the test's folder, built once."""
    nodes = isinstance(shape, sizes.Nodes)
    binary = folder / f"emulator_{shape.lines}_{cols}_{shape.file}"
    if binary.exists():
        return binary
    span = SMALL.unit * (SMALL.per if shape.walk else 1)
    macros = shape.macros(latent, rope, SMALL) | {"FOLDED": cols, "LINES": shape.lines, "SPAN": span}
    heads = isinstance(shape, sizes.Heads)
    macros |= {"NODES": 1, "TOGETHER": 1 + heads, "HEADS": int(heads)} if nodes else {}
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-w", "-DEMULATION", *(f"-D{k}={v}" for k, v in macros.items())]
    subprocess.run(["g++", *flags, "-o", str(binary), str(op.FOLDER / "emulation" / "main.cpp")], check=True)
    return binary


def _emulate(binary: Path, shape: op.Form, step: scenario.Step, whole: bool = False, blocks: int = 7, **given: str) -> torch.Tensor:
    """Run the kernels' text on a CPU. whole: partials for walking rows only; given: variables of emulation/cuda.h."""
    tokens, heads, latent = step.q.shape
    rows, span = len(step.lengths), SMALL.unit * (SMALL.per if shape.walk else 1)
    full = sum(SMALL.pieces(int(n + c), span) * int(c) * heads for n, c in zip(step.lengths, step.counts, strict=True))
    parts, blocks = (2 * tokens * heads, 100) if whole else (full, blocks)
    sizes = [rows, tokens // rows, heads, step.table.shape[1], 2, tokens, parts, 100_000, blocks]
    content = [torch.tensor(sizes, dtype=torch.int32), torch.tensor([SCALE * op.LOG2E], dtype=torch.float32)]
    content += [step.lengths, step.counts, step.starts, step.table, step.masks, step.q, step.q_pe, step.cache]
    source, result = binary.with_suffix(".in"), binary.with_suffix(".out")
    with source.open("wb") as file:
        for x in content:
            data = x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else x.dtype).numpy()
            file.write(struct.pack("<q", data.size) + data.tobytes())
    environment = dict(os.environ) | given
    code = subprocess.run([str(binary), str(source), str(result)], env=environment, check=False).returncode
    assert code == (10 if whole else 0)
    return torch.frombuffer(bytearray(result.read_bytes()), dtype=torch.bfloat16).view(tokens, heads, latent)


@needs_compiler
@pytest.mark.parametrize("name", ["u1", "g4", "c9", "nano"])
def test_emulated_kernels_are_the_reference_whatever_blocks_do(tmp_path: Path, name: str) -> None:
    shape, latent, rope = (op.NARROW, 96, 16) if name == "nano" else (op.SHAPES[name], 512, 64)
    binary = _emulator(tmp_path, shape, latent, rope, {"g4": 64, "c9": 32, "nano": 128}.get(name, 0))
    step = make([850, 0], [5, 3], 8, latent=latent, rope=rope)
    got, some = _emulate(binary, shape, step), live(step)
    assert error(got[some], reference(step)[some]) < 1e-2
    assert same(got[some], _emulate(binary, shape, step, DEFER="1", FROM_LAST="1")[some])
    assert same(got[4], _emulate(binary, shape, alone(step, 0, 4))[0])
    dead = sorted(set(range(len(got))) - set(some.tolist()))
    assert bool((got[dead].view(torch.int16) == 0x7FFF).all()), "only live nodes are written"


@needs_compiler
def test_emulated_lines_as_columns_have_the_same_bits_in_every_form(tmp_path: Path) -> None:
    step = make([1100], [6], 8, kind="near")  # units and groups of two sizes, 48 lines of two bases
    one, nine, four = (
        _emulate(_emulator(tmp_path, op.SHAPES[name], 512, 64, cols), op.SHAPES[name], step)
        for name, cols in (("c1", 0), ("c9", 64), ("d4", 128))
    )
    assert same(one, nine) and same(four, nine) and error(nine, reference(step)) < 1e-2


@needs_compiler
def test_emulated_nodes_have_the_bits_of_columns_whole_and_cut(tmp_path: Path) -> None:
    columns = op.SHAPES["c9"]
    other = _emulator(tmp_path, columns, 512, 64, 64)
    one, many = [600], [130, 0, 62]  # a row that is cut; nodes that are jobs enough
    for name, cut in (("n4", one), ("n2", one), ("h", one), ("n4", many), ("h", many)):
        shape = op.SHAPES[name]
        step = make(cut, [1] if len(cut) == 1 else [3, 1, 5], 64 if name == "h" else 32, kind="chain")
        binary, some = _emulator(tmp_path, shape, 512, 64), live(step)
        got = _emulate(binary, shape, step)
        assert error(got[some], reference(step)[some]) < 1e-2
        assert same(got[some], _emulate(other, columns, step)[some])
        assert same(got[some], _emulate(binary, shape, step, DEFER="1", FROM_LAST="1")[some])
        dead = sorted(set(range(len(got))) - set(some.tolist()))
        assert bool((got[dead].view(torch.int16) == 0x7FFF).all()), "only live nodes are written"


@needs_compiler
@pytest.mark.parametrize("lengths", [[0, 62, 130, 0, 64], [200, 0, 330, 63]])
def test_emulated_jobs_of_one_cluster_follow_each_other(tmp_path: Path, lengths: list[int]) -> None:
    shape, columns = op.SHAPES["h"], op.SHAPES["c9"]
    step = make(lengths, [3, 1, 2, 1, 2][: len(lengths)], 64, kind="chain")  # jobs of one tile to six, begun by either block
    binary, some = _emulator(tmp_path, shape, 512, 64), live(step)
    got = _emulate(binary, shape, step, blocks=1)
    assert same(got[some], _emulate(_emulator(tmp_path, columns, 512, 64, 64), columns, step)[some])
    for late in ({"FROM_LAST": "1"}, {"DEFER": "1"}, {"DEFER": "1", "FROM_LAST": "1"}):
        assert same(got[some], _emulate(binary, shape, step, blocks=1, **late)[some])


@needs_compiler
@pytest.mark.parametrize("name", ["g1s", "d4"])
def test_emulated_walk_over_whole_rows_gives_the_bits_of_groups(tmp_path: Path, name: str) -> None:
    shape = op.SHAPES[name]
    binary, step = _emulator(tmp_path, shape, 512, 64), make([1500], [2], 8, kind="chain")
    assert same(_emulate(binary, shape, step), _emulate(binary, shape, step, whole=True))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "law"),
    [("cover", sizes.FEW), ("cover", sizes.MANY), ("cover", SMALL), ("cover_nodes", sizes.MANY), ("cover_nodes", SMALL)],
)
def test_emulated_plans_give_every_key_of_every_line_to_one_job(tmp_path: Path, name: str, law: op.Law) -> None:
    macros = op.sizes(512, 64, law) | {"COLUMNS": int(law == sizes.FEW)}
    flags = ["-O2", "-std=c++17", "-w", "-DEMULATION", *(f"-D{k}={v}" for k, v in macros.items())]
    subprocess.run(["g++", *flags, "-o", str(tmp_path / name), str(op.FOLDER / "emulation" / f"{name}.cpp")], check=True)
    done = subprocess.run([str(tmp_path / name), "1", "25"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


PROBE = jit.Source(op.FOLDER / "emulation" / "probe.cu", "probe")


def _probed() -> tuple[torch.Tensor, torch.Tensor]:
    """Operands a [64, 64] and b [72, 64] whose products are exact in float32."""
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (n, 64), generator=made).bfloat16() for n in (64, 72))
    return a, b


def _check_probe(a: torch.Tensor, b: torch.Tensor, along: torch.Tensor, across: torch.Tensor, turned: torch.Tensor) -> None:
    """Hold results [64, 72] twice and [16, 64] against their meaning, each by name."""
    want = torch.arange(1024).view(16, 64).bfloat16()
    right = {"along": torch.equal(along, a.float() @ b.float().T), "across": torch.equal(across, a.float().T @ b.float().T)}
    assert right | {"turned": torch.equal(turned, want)} == {"along": True, "across": True, "turned": True}


@needs_compiler
def test_emulated_warpgroup_products_read_their_operands_as_described(tmp_path: Path) -> None:
    a, b = _probed()
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-w", "-DEMULATION", "-x", "c++"]
    subprocess.run(["g++", *flags, "-o", str(tmp_path / "probe"), str(PROBE.file)], check=True)
    (tmp_path / "in").write_bytes(torch.cat((a, b)).view(torch.int16).numpy().tobytes())
    subprocess.run([str(tmp_path / "probe"), str(tmp_path / "in"), str(tmp_path / "out")], check=True)
    data = (tmp_path / "out").read_bytes()
    sums = torch.frombuffer(bytearray(data[: 2 * 64 * 72 * 4]), dtype=torch.float32).view(2, 64, 72)
    _check_probe(a, b, sums[0], sums[1], torch.frombuffer(bytearray(data[-2048:]), dtype=torch.bfloat16).view(16, 64))


TURNED = jit.Source(op.FOLDER / "emulation" / "turned.cu", "turned")
SPREADS = [(0, 1), (-8, 9), (-40, 41), (-75, -55), (-134, -120), (40, 62)]
"""Of exponents: values alike, sums that round, products lost beside others, subnormal sums, subnormal values, near the largest."""


def _hard(spread: tuple[int, int], cancels: bool, seed: int) -> torch.Tensor:
    """Operand [64, 576] bf16 of random values with exponents from a range; cancels: nine of ten pairs are opposite."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(64, 576, generator=made) * torch.exp2(torch.randint(*spread, (64, 576), generator=made).float())
    if cancels:
        opposite = torch.rand(64, 288, generator=made) < 0.9
        values[:, 1::2] = torch.where(opposite, -values[:, ::2], values[:, 1::2])
    return values.bfloat16()


@needs_compiler
def test_emulated_products_turned_round_are_the_same(tmp_path: Path) -> None:
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-w", "-DEMULATION", "-x", "c++"]
    subprocess.run(["g++", *flags, "-o", str(tmp_path / "turned"), str(TURNED.file)], check=True)
    made = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-4, 5, (64, 576), generator=made).bfloat16() for _ in range(2))
    (tmp_path / "in").write_bytes(torch.cat((x, y)).view(torch.int16).numpy().tobytes())
    subprocess.run([str(tmp_path / "turned"), str(tmp_path / "in"), str(tmp_path / "out")], check=True)
    data = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.float32)
    columns, rows, tall, wide = (part.view(64, -1) for part in data.split([64 * 64, 64 * 64, 64 * 128, 64 * 128]))
    scores = x.float() @ y.float().T
    values = sum(x[:, 64 * i : 64 * i + 64].float() @ y[:, 128 * i : 128 * i + 128].float() for i in range(4))
    assert [torch.equal(a, b) for a, b in ((columns, scores), (rows, scores), (tall, values), (wide, values))] == [True] * 4


# ------------------------------------------------------------------------------------------------- on a GPU


@gpu
@needs_gpu
def test_warpgroup_products_on_the_device_are_those_of_the_emulation() -> None:
    _skip_without("c1")
    a, b = _probed()
    along, across = torch.full((2, 64, 72), float("nan"), device=cuda())
    turned = torch.full((16, 64), float("nan"), dtype=torch.bfloat16, device=cuda())
    jit.Kernel(PROBE, cuda().index, (64 + 72 + 16) * 128)(1, 128, [a.to(cuda()), b.to(cuda()), along, across, turned])
    torch.cuda.synchronize()
    _check_probe(a, b, along.cpu(), across.cpu(), turned.cpu())


@gpu
@needs_gpu
def test_products_turned_round_have_the_same_bits_on_hard_values() -> None:
    _skip_without("c1")
    turned = jit.Kernel(TURNED, cuda().index, 18 * 8192)
    for i, spread in enumerate(SPREADS):
        for j, other in enumerate(SPREADS):
            x, y = (_hard(s, (i + j) % 2 == 1, seed).to(cuda()) for s, seed in ((spread, i), (other, 100 + j)))
            outs = [torch.full((64, n), float("nan"), device=cuda()) for n in (64, 64, 128, 128)]
            turned(1, 128, [x, y, *outs])
            columns, rows, tall, wide = (out.view(torch.int32) for out in outs)
            assert torch.equal(columns, rows) and torch.equal(tall, wide), f"exponents {spread} and {other}"


def _shapes(heads: int = 64) -> list[str]:
    arch = jit.arch_of(torch.cuda.get_device_capability())
    return [n for n, s in op.SHAPES.items() if op.fits(s, arch, 576) and sizes.takes(s, heads)]


def _heads(name: str | None) -> int:
    """So few that the shape takes them."""
    return 8 if name is None or sizes.takes(op.SHAPES[name], 8) else 64


def _skip_without(name: str) -> None:
    if name not in _shapes():
        pytest.skip(f"this device has no {name}")


@gpu
@needs_gpu
@pytest.mark.parametrize("heads", [8, 64])
def test_every_shape_has_the_same_bits_and_they_are_near_float64(heads: int) -> None:
    worst = 0.0
    for start in STARTS:
        for nodes, kind in TREES:
            step = make([start], [nodes], heads, cuda(), seed=start, kind=kind)
            want, first = (
                reference(step),
                {op.SHAPES[name].columns: attend(step, name) for name in ("u1s", "c9") if name in _shapes()},
            )
            worst = max(worst, *(error(out, want) for out in first.values()))
            for name in _shapes(heads):
                assert same(attend(step, name), first[op.SHAPES[name].columns]), f"{name} at {start} + {nodes} {kind}"
    assert worst < 6e-3


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("heads", "tree", "node_alone"),
    [(8, None, None), (64, None, None), (8, "c9", "c1"), (64, "c9", "c9"), (64, "n4", "c9"), (64, "h", "c9")],
)
def test_a_node_has_the_bits_of_the_same_token_decoded_alone(heads: int, tree: str | None, node_alone: str | None) -> None:
    _skip_without(tree or "u1s")
    checked = 0
    for start in (0, 63, 64, 512, 1023, 1085, 2500):
        for nodes, kind in TREES:
            step = make([start], [nodes], heads, cuda(), seed=start + 1, kind=kind)
            got = attend(step, tree)
            for node in range(nodes) if start < 2000 else sorted({0, 1, nodes // 2, nodes - 1} & set(range(nodes))):
                assert same(attend(alone(step, 0, node, seed=node), node_alone)[0], got[node]), (
                    f"node {node} of {start} + {nodes} {kind}"
                )
                checked += 1
    assert checked > 1000, "of each number of heads"


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [None, "c9", "d4", "n4", "n2", "h"])
@pytest.mark.parametrize("nodes", EDGES)
def test_edge_sizes(nodes: int, shape: str | None) -> None:
    _skip_without(shape or "u1s")
    step = make([700], [nodes], _heads(shape), cuda(), seed=nodes)
    got = attend(step, shape)
    assert error(got, reference(step)) < 6e-3
    assert same(attend(alone(step, 0, nodes - 1), shape)[0], got[nodes - 1])


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", ["u1", "g1", "g4", "c9", "d4", "n4", "n2", "h"])
def test_a_row_does_not_depend_on_other_rows_their_number_its_slot_or_pages(shape: str) -> None:
    _skip_without(shape)
    lengths, counts = [0, 3000, 65, 1, 512, 2047, 900], [9, 3, 0, 33, 1, 17, 9]
    step = make(lengths, counts, _heads(shape), cuda(), seed=5, nodes=33)
    got = attend(step, shape)
    assert same(attend(step, shape, partial_bytes=0) if op.SHAPES[shape].walk else got, got)
    assert torch.isnan(got).flatten(1).any(1).sum() == len(got) - sum(counts), "only live nodes are written"
    for row in (0, 1, 3, 4, 5, 6):
        n, t = counts[row], int(step.starts[row])
        cache, table = scenario.place([step.prefixes[row]], [step.latents[row]], np.random.default_rng(row))
        ints = [torch.tensor([x], dtype=torch.int64, device=cuda()) for x in (lengths[row], n, 0)]
        own = scenario.Step(
            step.q[t : t + n].contiguous(), step.q_pe[t : t + n].contiguous(), cache, table, *ints,
            step.masks[t : t + n].contiguous(), [step.prefixes[row]], [step.latents[row]], [step.paths[row]],
        )  # fmt: skip
        other = {"c9": "d4", "d4": "c9", "n4": "c9", "n2": "n4", "h": "c9"}.get(shape, "u1s")
        assert same(attend(own, other), got[t : t + n]), f"row {row}"


@gpu
@needs_gpu
def test_another_law_has_other_bits() -> None:
    step = make([8191], [33], 64, cuda())  # a million values: another order of sums rounds some of them otherwise
    assert not same(attend(step), attend(step, law=op.Law(128, 4, (2048, 8192, 32768))))
    assert not same(attend(step), attend(step, law=op.Law(256, 8, (4096, 16384, 65536))))


@gpu
@needs_gpu
def test_pages_beyond_two_to_the_31_elements() -> None:
    step = make([700], [33], 8, cuda())
    want, pages = attend(step), 2**31 // 576 // 64 + 1
    small = step.cache.view(-1, 64, 576)
    cache = torch.empty(pages + len(small), 64, 576, dtype=torch.bfloat16, device=cuda())
    cache[pages:] = small
    step.cache, step.table = cache.view(-1, 576), step.table + pages
    assert step.cache.numel() > 2**31 and same(attend(step), want)


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", ["u1", "g2", "c9", "d4", "n4", "h"])
def test_a_thousand_replays_have_the_same_bits_and_follow_new_lengths(shape: str) -> None:
    _skip_without(shape)
    step = make([1500, 900], [9, 5], _heads(shape), cuda(), nodes=9)
    lengths, counts = step.lengths.clone(), step.counts.clone()
    one = op.MlaAttention(2, 9, _heads(shape), 4096, SCALE, cuda(), shape=shape)
    out = torch.full_like(step.q, float("nan"))

    def launch() -> None:
        one.plan(lengths, counts, step.starts)
        one(step.q, step.q_pe, step.cache, step.table, step.masks, out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    first, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    differ = torch.zeros((), dtype=torch.int64, device=cuda())
    for _ in range(1000):
        graph.replay()
        differ += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differ) == 0 and same(first, attend(step, shape))
    lengths[1], counts[0] = 0, 0
    other = make([1500, 0], [0, 5], _heads(shape), cuda(), nodes=9)
    other.q, other.q_pe, other.cache, other.table, other.masks = step.q, step.q_pe, step.cache, step.table, step.masks
    out.fill_(float("nan"))
    step.cache[scenario_slots(step, 1, 5)] = 1.0
    graph.replay()
    assert same(out, attend(other, shape))


def scenario_slots(step: scenario.Step, row: int, count: int) -> torch.Tensor:
    """Slots of the first `count` positions of a row."""
    return ref.slots_of(step.table[row], torch.arange(count, device=step.table.device))


@gpu
@needs_gpu
@pytest.mark.parametrize(("shape", "partial_bytes"), [("g4", op.PARTIAL_BYTES), ("g4", 0), ("c9", op.PARTIAL_BYTES), ("d4", 0)])
def test_128_rows_of_33_nodes(shape: str, partial_bytes: int) -> None:
    _skip_without(shape)
    lengths = [(37 * r) % 1900 for r in range(128)]
    step = make(lengths, [33 - r % 3 for r in range(128)], 8, cuda(), nodes=33)
    got, some = attend(step, shape, partial_bytes), live(step)
    assert error(got[some], reference(step, torch.float32)[some].double()) < 6e-3
    for row in (0, 50, 127):
        assert same(attend(alone(step, row, 30), "c1" if op.SHAPES[shape].columns else "u1s")[0], got[row * 33 + 30])


@gpu
@needs_gpu
def test_narrow_latents_of_nano() -> None:
    step = make([700, 3, 64], [9, 65, 1], 8, cuda(), nodes=65, latent=96, rope=16)
    got, some = attend(step), live(step)
    assert error(got[some], reference(step)[some]) < 6e-3
    for row, node in ((0, 8), (1, 64), (2, 0)):
        assert same(attend(alone(step, row, node))[0], got[row * 65 + node])
