"""The forms of the experts' down part for slices, run on the CPU: the bits of the measured ones at every number of rows and jobs.

Sums inside an emulated mma are not a GPU's, but equal chains give equal bits here as well.
"""

import functools

import pytest
import torch

from draftwood.kernels.moe_int4 import op, repack, sweep
from draftwood.kernels.moe_route import ref as route_ref
from draftwood.kernels.moe_route.op import Lists, most_jobs
from draftwood.model.int4 import pack_int4
from tests.kernels.emulate import COMPILER, Emulated

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), pytest.mark.xdist_group("emulated")]
NAN = float("nan")
SHAPE = op.Shape(896, 256, 8)
EXPERTS, HELD = 20, (3, 12)
FORMS = op.HOPPER | {"rows": sweep.FORMS["rows"]}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(name: str, part: str, shape: op.Shape, device: int) -> Emulated:
        return Emulated(op._variant(name, part, shape, "sm_90a").source)

    monkeypatch.setattr(op, "HOPPER", FORMS)
    monkeypatch.setattr(op, "FORMS", {"sm_90a": FORMS})
    monkeypatch.setattr(op, "_arch", lambda device: "sm_90a")
    monkeypatch.setattr(op, "_kernel", functools.cache(kernel))
    monkeypatch.setattr(op, "_multiprocessors", lambda device: 1)


@functools.cache
def _weights() -> repack.Packed:
    make = torch.Generator().manual_seed(0)
    gate = pack_int4(torch.zeros(HELD[1], 256, 896))
    return repack.repack(*gate, *gate, *pack_int4(torch.randn(HELD[1], 896, 256, generator=make)))


def _run(name: str, rows: int, live: int, shared: bool) -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    chosen = torch.rand(rows, EXPERTS, generator=make).argsort(-1)[:live, :8]
    h = torch.randn(rows * 8, 256, generator=make).to(torch.bfloat16)
    x, add = torch.zeros(rows, 896, dtype=torch.bfloat16), torch.randn(rows, 896, generator=make).to(torch.bfloat16)
    weights = torch.rand(rows, 8, generator=make)
    weights[:live] = route_ref.held_weights(chosen, weights[:live], *HELD)
    pairs, jobs = route_ref.lists(chosen.tolist(), *HELD, 8)
    ints = functools.partial(torch.tensor, dtype=torch.int32)
    beyond = [[2**30, 2**30, 8, 0]] * (most_jobs(rows, 8, HELD[1], 8) - len(jobs))
    lists = Lists(
        rows, *HELD, experts=torch.zeros(rows, 8, dtype=torch.int32), weights=weights,
        pairs=ints(pairs + [2**30] * (rows * 8 - len(pairs))),
        jobs=ints([list(j) for j in jobs] + beyond).view(-1, 4), njobs=ints([len(jobs)]), partial=torch.empty(0),
    )  # fmt: skip
    work, out = op.workspace(SHAPE, rows, "cpu"), torch.full((rows, 896), NAN, dtype=torch.bfloat16)
    work.h.copy_(h)
    op.Call(x, _weights(), lists, ints([live]), add if shared else None, out, work, op.Plan("stream", name), rows).down()
    return out


@pytest.mark.parametrize("early", [False, True])
def test_one_row_has_the_same_bits_in_every_form(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    for live, shared in ((1, True), (1, False), (0, True)):
        want = _run("few", 1, live, shared)
        assert want.isnan().all() == (live == 0)
        for name in ("rows", "one", "duo"):
            assert torch.equal(_run(name, 1, live, shared).nan_to_num(7.0), want.nan_to_num(7.0)), (name, live)


@pytest.mark.parametrize(("rows", "live"), [(2, 2), (9, 9), (40, 33)])
def test_a_cluster_shares_units_and_keeps_the_bits_of_a_block_for_a_tile(rows: int, live: int) -> None:
    want = _run("rows", rows, live, True)
    assert not want[:live].isnan().any() and want[live:].isnan().all()
    assert torch.equal(_run("duo", rows, live, True).nan_to_num(7.0), want.nan_to_num(7.0))


def test_64_clusters_own_the_rows_of_k26() -> None:
    shape = op.Shape(7168, 256, 8)
    assert op.run_of(shape) == 7 and shape.rows("down") == 64 * 7 * 16
    for name in ("duo", "one"):
        assert op.HOPPER[name].fits(shape, "down") and not op.HOPPER[name].fits(op.Shape(7168, 2048, 8), "down")
