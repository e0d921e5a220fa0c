"""What a forward asks for in L2: parts of weights that products read next, within runs and bytes; nothing depends on it."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels.jit import ARCHS
from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear import plan
from draftwood.kernels.linear.op import Weight
from draftwood.kernels.linear.plan import Shape
from draftwood.kernels.norm_rope import op as norm_op
from draftwood.model.cuda.ahead import Reach, layer_ahead
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.pack import PackedMoE
from tests.cuda_refs import Calls, cuda_refs  # noqa: F401
from tests.cuda_tools import Memory, Row, Step, chain
from tests.model.test_cuda_work import NARROW, made

K26 = {"o": Shape(7168, 8192), "shared": Shape(4096, 7168, glu=True)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows", [1, 9, 65, 2000])
@pytest.mark.parametrize("name", list(K26))
def test_a_reach_is_whole_steps_that_no_ring_holds(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, arch: str) -> None:
    monkeypatch.setattr(linear_op, "_machine_of", lambda device: linear_op._MACHINES[arch])
    shape = K26[name]
    weight = Weight(torch.empty(1, shape.outputs // 16, shape.steps, 1024, dtype=torch.bfloat16, device="meta"), shape)
    dense = type("Layer", (), {"o": weight, "mlp": None})
    for wanted in (0, 1 << 20, 8 << 20, 16 << 20, 64 << 20):
        found = layer_ahead(dense, rows, Reach(o=wanted), torch.device("meta"))  # type: ignore[arg-type]
        assert found.shared is None
        least = shape.steps // plan.segments(shape) - linear_op.held(shape, rows, 0)
        step = shape.tiles * plan.segments(shape) * 2048
        if found.o is None:
            assert wanted < step or least <= 0
            continue
        assert found.o.data is weight.data and found.o.first == linear_op.held(shape, rows, 0)
        assert found.o.nbytes == step * min(wanted // step, least) <= wanted


def test_layers_with_routed_experts_ask_for_their_shared_one(cuda_refs: Calls) -> None:  # noqa: F811
    ours = made()
    bucket = Bucket.of(2, 4, 64)
    ours.reserve([bucket])
    for layer, ahead in zip(ours.packed.layers, ours.bind(bucket).aheads, strict=True):
        assert ahead.o is not None and ahead.o.data is layer.o.data
        if isinstance(layer.mlp, PackedMoE):
            assert ahead.shared is not None and ahead.shared.data is layer.mlp.shared.gate_up.data
        else:
            assert ahead.shared is None
    ours.reach = Reach(0, 0)
    assert all(ahead.o is None and ahead.shared is None for ahead in ours.bind(bucket).aheads)


def test_a_forward_gives_its_kernels_what_the_layer_asks_for(cuda_refs: Calls, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ours, seen = made(), []
    for name in ("add_norm", "query_rope"):
        real = getattr(norm_op, name)

        def watched(*args: object, real=real, ahead=None, **given: object) -> object:  # type: ignore[no-untyped-def]
            if ahead is not None:
                seen.append(ahead)
            return real(*args, ahead=ahead, **given)

        monkeypatch.setattr(norm_op, name, watched)
    bucket, memory = Bucket.of(1, 0, 64), Memory(NARROW, 1, 2, "cpu")
    ours.reserve([bucket])
    forward, step = ours.bind(bucket), Step.make(bucket, [Row(0, 0, [5], chain(1))], memory)
    step.run(forward, memory.cache)
    want = [part for ahead in forward.aheads for part in (ahead.o, ahead.shared) if part is not None]
    assert [id(x) for x in seen] == [id(x) for x in want] and len(want) == NARROW.num_layers + NARROW.num_moe_layers
