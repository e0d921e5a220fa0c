"""The attention kernels' reference is the model's formula."""

import dataclasses

import pytest
import torch

from draftwood.kernels.mla_attention import ref, scenario
from draftwood.model.mla import Attention, plan_step
from tests.model.tools import SMALL, target_weights


@dataclasses.dataclass
class Pages:
    """The rows' slots as the model wants them."""

    cache: torch.Tensor
    prefix: torch.Tensor
    lengths: torch.Tensor
    nodes: torch.Tensor


def _slots(step: scenario.Step, nodes: int) -> Pages:
    lengths, longest = step.lengths.long(), int(step.lengths.max())
    pages = torch.nn.functional.pad(step.table, (0, 4), value=0)
    prefix = torch.stack([ref.slots_of(table, torch.arange(longest)) for table in pages])
    places = torch.stack([ref.slots_of(table, n + torch.arange(nodes)) for table, n in zip(pages, lengths, strict=True)])
    return Pages(step.cache, prefix, lengths, places)


@pytest.mark.parametrize("kind", ["near", "wide", "chain"])
def test_reference_is_the_absorbed_formula_of_the_model(kind: str) -> None:
    attention = Attention(target_weights(dtype=torch.float64).layers[0], SMALL)
    lengths, counts = [70, 0, 129], [9, 33, 1]
    step = scenario.make(lengths, counts, attention.heads, latent=24, rope=8, kind=kind, dtype=torch.float64)
    q = torch.randn(99, attention.heads, SMALL.qk_head_dim, dtype=torch.float64)
    plain, rotary = q.split((attention.nope, attention.rope), -1)
    absorbed = torch.einsum("thn,hnl->thl", plain, attention.absorb_k)
    pages = (step.cache, step.table, step.lengths, step.counts, step.starts, step.masks)
    seen = ref.attend(absorbed, rotary, *pages, attention.scale)
    want = torch.einsum("thl,hlv->thv", seen, attention.absorb_v)
    plan = plan_step(_slots(step, 33), step.masks.view(3, 33, 2), step.counts.long(), torch.float64)
    flat = torch.arange(99) if plan.flat is None else plan.flat
    live = q[flat]
    outs = []
    for group in plan.groups:
        some = live.narrow(0, group.start, group.nodes) if group.queries is None else live.index_select(0, group.queries)
        keys = step.cache.index_select(0, group.keys).view(group.rows, -1, attention.width)
        got = attention._absorbed(some, keys, group)
        outs.append(got if group.live is None else got.index_select(0, group.live))
    joint = torch.cat(outs) if plan.order is None else torch.cat(outs).index_select(0, plan.order)
    torch.testing.assert_close(joint.view(len(flat), attention.heads, -1), want[flat], rtol=1e-4, atol=1e-6)  # softmax in float32
