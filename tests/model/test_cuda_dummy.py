"""Random weights of the CUDA model: tokens choose experts as independent ones would, so that steps cost what the formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.kernels.moe_int4 import repack
from draftwood.model.costs import expected_experts
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.dummy import dummy_target
from draftwood.model.cuda.pack import PackedMoE
from draftwood.model.cuda.target import CudaTarget
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_refs import Calls, cuda_refs  # noqa: F401
from tests.cuda_tools import Memory, Row, Step
from tests.model.test_cuda_work import NARROW
from tests.model.tools import random_tree

ROUTED = replace(
    NARROW, num_layers=9, num_heads=2, q_lora_rank=32, num_experts=48, experts_per_token=8, moe_intermediate_size=32,
    intermediate_size=64,
)  # fmt: skip
LENGTH = 192


def chosen(nodes: int) -> torch.Tensor:
    """Experts [MoE layers, nodes, k] of the nodes of one random tree after random latents, no token twice."""
    target = CudaTarget(ROUTED, dummy_target(ROUTED, Layout(), "cpu"), Layout(), Local())
    bucket, memory = Bucket.of(1, nodes + 2, 512), Memory(ROUTED, 1, 5, "cpu")
    target.reserve([bucket])
    memory.cache.normal_(generator=torch.Generator().manual_seed(3))
    tokens = torch.randperm(ROUTED.vocab_size, generator=torch.Generator().manual_seed(nodes))[:nodes].tolist()
    step, forward = Step.make(bucket, [Row(0, LENGTH, tokens, random_tree(nodes, 0))], memory), target.bind(bucket)
    forward.routed = torch.full((ROUTED.num_moe_layers, bucket.tokens, 8), -1, dtype=torch.int32)
    step.run(forward, memory.cache)
    return forward.routed[:, :nodes]


def distinct(experts: torch.Tensor) -> float:
    """Of a layer, on average."""
    return sum(len(layer.unique()) for layer in experts) / len(experts)


@pytest.mark.parametrize("nodes", [1, 2, 9, 17])
def test_nodes_of_a_tree_choose_as_many_experts_as_independent_choices_do(cuda_refs: Calls, nodes: int) -> None:  # noqa: F811
    experts = chosen(nodes)
    assert bool(((experts >= 0) & (experts < 48)).all())
    assert distinct(experts) == pytest.approx(expected_experts(ROUTED, nodes), rel=0.05)


def test_codes_of_experts_have_no_direction_of_their_own() -> None:
    """Their mean is 0, so a constant input is answered by nothing constant; and every other code is as frequent as the next."""
    packed = dummy_target(ROUTED, Layout(), "cpu").layers[1].mlp
    assert isinstance(packed, PackedMoE)
    for words in (packed.experts.gate_up, packed.experts.down):
        codes = torch.stack([words.view(torch.int32) >> 4 * i & 15 for i in range(8)]).flatten() - 8
        shares = torch.bincount(codes + 8, minlength=16) / len(codes)
        assert shares[0] == 0 and shares[8] == pytest.approx(2 / 16, rel=0.05)
        assert torch.allclose(shares[[*range(1, 8), *range(9, 16)]], torch.tensor(1 / 16), rtol=0.05)
        assert abs(float(codes.double().mean())) < 0.03 and float(codes.double().square().mean()) == pytest.approx(17.5, rel=0.02)
    inputs = torch.ones(ROUTED.hidden_size)
    answers = torch.cat([repack.expert(packed.experts, e, torch.float32)[0] @ inputs for e in range(48)])
    assert abs(float(answers.mean())) < 4 * float(answers.std()) * len(answers) ** -0.5
