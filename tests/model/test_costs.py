"""Costs: the formulas reproduce the published sizes of K2.6 and add up over the ranks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.model import costs
from draftwood.model.config import K2_6, K2_6_DRAFT, read_drafter_config, read_model_config
from draftwood.model.moe import Experts
from draftwood.model.weights import MoEWeights, TargetWeights, dummy_drafter, dummy_target
from draftwood.parallel.layout import Layout
from tests.model.shapes import TINY, TINY_DRAFT

K2 = read_model_config(K2_6)
DRAFT = read_drafter_config(K2_6_DRAFT)
GIB = 1 << 30


def test_one_token_reads_the_published_gigabytes_by_part():
    step = dict(costs.step_bytes(K2, rows=1, nodes=1, context=0))
    published = {
        "experts": 11.89, "attention": 12.34, "shared experts": 5.28, "lm_head": 2.35, "dense layers": 0.79,
        "router": 0.33,
    }  # fmt: skip
    for part, gigabytes in published.items():
        assert step[part] / 1e9 == pytest.approx(gigabytes, abs=0.005), part
    assert sum(step[part] for part in published) / 1e9 == pytest.approx(32.98, abs=0.005)


def test_published_sizes_of_an_expert_a_cached_token_and_the_files():
    assert costs.expert_bytes(K2) / 1e6 == pytest.approx(24.77, abs=0.005)
    assert costs.kv_bytes_per_token(K2) == 70_272 and costs.kv_bytes_per_token(K2, 1) == 35_136
    assert costs.drafter_kv_bytes_per_token(DRAFT) == 24_576
    assert costs.total(costs.weight_bytes(K2, router=2)) / GIB == pytest.approx(553.40, abs=0.005)
    assert costs.total(costs.drafter_weight_bytes(DRAFT)) / GIB == pytest.approx(6.4807, abs=5e-5)
    assert costs.total(costs.drafter_weight_bytes(DRAFT)) == 3_479_277_056 * 2


@pytest.mark.parametrize(
    ("nodes", "experts", "total_gb"),
    [(1, 8, 33.0), (2, 15.8, 44.6), (4, 31.0, 67.2), (9, 66.3, 119.6), (17, 115.5, 192.8), (65, 286.3, 446.6)],
)
def test_a_tree_costs_what_the_byte_floor_table_says(nodes, experts, total_gb):
    assert costs.expected_experts(K2, nodes) == pytest.approx(experts, abs=0.06)
    step = dict(costs.step_bytes(K2, 1, nodes, 0))
    floor = sum(n for part, n in step.items() if part not in ("embedding", "kv read", "kv write"))
    assert floor / 1e9 == pytest.approx(total_gb, abs=0.06)


def test_operations_per_token_are_the_published_ones():
    assert costs.node_flops(K2) / 1e12 == pytest.approx(0.063, abs=0.0005)
    per_context_token = costs.node_flops(K2, 1) - costs.node_flops(K2)
    assert per_context_token == 61 * 2 * 64 * 1088
    assert costs.expert_flops(K2) == 2 * 3 * 2048 * 7168
    assert costs.step_flops(K2, 2, 3, 10) == 6 * costs.node_flops(K2, 13)


def test_operations_by_part_are_those_counted_by_hand():
    """9 nodes of each of 64 rows after 512 tokens; a multiply-add is two operations."""
    found = dict(costs.step_operations(K2, 576, 512, 1, DRAFT, 64, 8, 2048))
    assert found["experts"] == 576 * 60 * 8 * 2 * 3 * 7168 * 2048 == 24_352_464_568_320
    assert found["shared experts"] == found["experts"] // 8
    weights = 64 * 192 * 1536 + 64 * 256 * 512 + 7168 * 64 * 128 + 7168 * 2112
    assert found["attention"] == 576 * 61 * 2 * weights
    assert found["router"] == 576 * 60 * 2 * 384 * 7168
    assert found["dense layers"] == 576 * 2 * 3 * 7168 * 18432
    assert found["lm_head"] == 576 * 2 * 163840 * 7168
    assert found["kv read"] == 576 * 512 * 61 * 64 * 2 * (576 + 512)
    per_layer = 7168 * 128 * (64 + 2 * 8 + 64) + 3 * 7168 * 18432
    assert found["drafter"] == 64 * 2 * (8 * 6 * per_layer + 7168 * 6 * 7168)
    assert found["drafter lm_head"] == 64 * 7 * 2 * 163840 * 7168
    assert found["drafter kv"] == 64 * 8 * 6 * 64 * 2 * 2 * 128 * 512
    halved = dict(costs.step_operations(K2, 576, 512, 2))
    assert halved["experts"] * 2 == found["experts"] and halved["router"] == found["router"] and "drafter" not in halved


def test_a_floor_is_by_part_the_larger_of_bytes_and_operations():
    moved, done = (("read", 4_000), ("both", 2_000), ("multiplied", 10)), (("both", 30_000), ("multiplied", 70_000))
    found = dict(costs.floor(moved, done, 1_000.0, 10_000.0))
    assert found == {"read": 4.0, "both": 3.0, "multiplied": 7.0}


def test_64_rows_of_9_nodes_are_bound_by_the_operations_of_their_experts():
    """48 experts a layer, 61 layers, at 4.38 TB/s and 780 TFLOP/s: 31 ms of experts by operations, 16 by bytes."""
    few = replace(K2, num_experts=48)
    moved = costs.step_bytes(few, 64, 9, 512, distinct=48)
    by_part = dict(costs.floor(moved, costs.step_operations(few, 576, 512), 4.38e12, 780e12))
    assert dict(moved)["experts"] == 48 * 60 * 24_772_608
    assert by_part["experts"] == pytest.approx(24.352e12 / 780e12, rel=1e-3) and by_part["experts"] > 1.9 * 71.35e9 / 4.38e12
    assert sum(by_part.values()) > max(costs.total(moved) / 4.38e12, 576 * costs.node_flops(few, 512) / 780e12)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_cut_weights_add_up_over_the_ranks(tp, ep):
    layouts = [Layout(tp, ep, rank) for rank in range(tp * ep)]
    whole = dict(costs.weight_bytes(K2))
    for part in ("experts", "shared experts", "dense layers", "lm_head"):
        assert sum(dict(costs.weight_bytes(K2, layout))[part] for layout in layouts) == whole[part]
    assert all(dict(costs.weight_bytes(K2, layout))["router"] == whole["router"] for layout in layouts)


@given(st.integers(1, 500), st.integers(1, 500))
def test_more_tokens_touch_more_experts_and_never_more_than_there_are(a, b):
    few, many = sorted((a, b))
    assert costs.expected_experts(K2, few) <= costs.expected_experts(K2, many) <= K2.num_experts
    assert costs.expected_experts(K2, few) <= few * K2.experts_per_token + 1e-9


def held(record) -> int:
    """Bytes of every tensor in nested records and lists."""
    if isinstance(record, torch.Tensor):
        return record.numel() * record.element_size()
    if isinstance(record, list | dict):
        return sum(map(held, record.values() if isinstance(record, dict) else record))
    return sum(map(held, vars(record).values())) if hasattr(record, "__dict__") else 0


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_weight_formulas_are_the_bytes_that_a_rank_really_holds(tp, ep):
    for rank in range(tp * ep):
        layout = Layout(tp, ep, rank)
        target: TargetWeights = dummy_target(TINY, layout, torch.bfloat16, "cpu")
        assert held(target) == costs.total(costs.weight_bytes(TINY, layout, 2))
        drafter = dummy_drafter(TINY_DRAFT, layout, torch.float32, "cpu")
        assert held(drafter) == costs.total(costs.drafter_weight_bytes(TINY_DRAFT, layout, 4))


@pytest.mark.parametrize(("experts", "dtype"), [(4, torch.float32), (16, torch.float32), (4, torch.bfloat16)])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2)])
def test_the_formula_of_expanded_experts_counts_the_matrices_that_a_cpu_holds(experts, dtype, tp, ep):
    config = replace(TINY, num_experts=experts, experts_per_token=2)
    for rank in range(tp * ep):
        layout = Layout(tp, ep, rank)
        layers = [layer.mlp for layer in dummy_target(config, layout, dtype, "cpu").layers if isinstance(layer.mlp, MoEWeights)]
        parts = [Experts(w.experts, w.shared, 2, experts, dtype) for w in layers]
        kept = [m for part in parts for m in (*part._gate_up, *part._down)]
        kept += [m for part in parts if part.wide is not None for m in (part.wide.gate_up, part.wide.down)]
        sizes = [costs.matrix_bytes(m.out_features, m.in_features, dtype.itemsize) for m in kept]
        assert sum(sizes) == costs.expanded_expert_bytes(config, layout, dtype.itemsize)


def test_a_matrix_on_a_cpu_is_plain_or_packed_whichever_is_larger():
    assert costs.matrix_bytes(10, 512, 4) == 10 * 512 * 4 and costs.matrix_bytes(10, 128, 4) == 10 * 512 * 2
    assert costs.matrix_bytes(10, 128, 2) == 10 * 128 * 2


def test_a_step_with_a_drafter_counts_its_pass_once():
    plain, drafted = costs.step_bytes(K2, 1, 9, 1000, 8), costs.step_bytes(K2, 1, 9, 1000, 8, 2, DRAFT, 8, 2048)
    assert drafted[: len(plain)] == plain
    extra = dict(drafted[len(plain) :])
    assert extra["drafter kv"] == 1000 * 24_576 // 8
    assert costs.step_bytes(K2, 1, 9, 5000, 8, 2, DRAFT, 8, 2048)[-1][1] == 2048 * 24_576 // 8


def test_a_second_rank_halves_cut_parts_and_not_replicated_ones():
    one, two = dict(costs.step_bytes(K2, 1, 1, 0)), dict(costs.step_bytes(K2, 1, 1, 0, world=2))
    assert two["lm_head"] * 2 == one["lm_head"] and two["router"] == one["router"]
    assert two["attention"] > one["attention"] // 2


def test_peak_memory_of_a_load_is_little_more_than_what_stays():
    layout = Layout(8, 1, 0)
    stays = costs.total(costs.weight_bytes(K2, layout))
    assert stays < costs.peak_load_bytes(K2, layout) < stays * 1.001
    assert stays / 1e9 == pytest.approx(595 / 8, abs=6)
