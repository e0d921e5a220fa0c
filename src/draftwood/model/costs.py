"""What a step costs: bytes moved, bytes held and floating point operations, from the shapes alone. No torch.

The planner, the benchmark and the tree-size policy share these formulas. Bytes are floors: every weight that a step
needs is read once. So are operations, and a step of many nodes is bound by them: `floor` takes the larger of both.
`itemsize` is the bytes of an unquantised weight or cached value (2 for bfloat16). A rank reads its
cut of cut matrices and the whole of replicated ones (q_a, kv_a, router, KV cache, drafter fc), as `parallel.layout`
places them; per-rank expert reads are averages, which tensor parallel ranks meet exactly.
"""

from __future__ import annotations

from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.parallel.layout import Layout

Table = tuple[tuple[str, int], ...]
SCALE_BYTES = 2
"""Scales are bfloat16 in the file and in memory."""
WIDE_WASTE = 4
"""Most experts held per expert chosen, of one token, for which a CPU keeps all of them as one wide matrix too: wide
products run at 90 GFLOP/s a core in float32, and the four times as many operations then take no longer than the calls
of one product after another."""
PACKED_INPUTS = 512
"""Inputs of a packed float16 matrix are padded to a multiple of this."""


def total(table: Table) -> int:
    """Sum of a table's numbers."""
    return sum(n for _, n in table)


# ---------------------------------------------------------------------------------------------------- elements of parts


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Weights of one layer's attention: (cut over the ranks, replicated on each), norms left out."""
    heads = config.num_heads
    cut = heads * config.qk_head_dim * config.q_lora_rank
    cut += heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    cut += config.hidden_size * heads * config.v_head_dim
    return cut, config.hidden_size * (config.q_lora_rank + config.latent_width)


def _norms(config: ModelConfig) -> int:
    per_layer = 2 * config.hidden_size + config.q_lora_rank + config.kv_lora_rank
    return config.num_layers * per_layer + config.hidden_size


def _mlp(hidden: int, width: int) -> int:
    return 3 * hidden * width


def _expert_bytes(hidden: int, width: int, config: ModelConfig) -> int:
    weights = _mlp(hidden, width)
    return weights * config.weight_bits // 8 + weights // config.group_size * SCALE_BYTES


def expert_bytes(config: ModelConfig) -> int:
    """Bytes of one routed expert, codes and scales (24.77 MB for K2.6)."""
    return _expert_bytes(config.hidden_size, config.moe_intermediate_size, config)


def expected_experts(config: ModelConfig, tokens: int) -> float:
    """Distinct experts that `tokens` tokens choose in one layer, E(n) = E * (1 - (1 - k/E)^n).

    For uniform and independent choices: an upper bound, since tokens of one tree share experts.
    """
    share = config.experts_per_token / config.num_experts
    return config.num_experts * (1.0 - (1.0 - share) ** tokens)


def kv_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of one token in the latent cache, all layers; every rank holds all of it (70,272 for K2.6)."""
    return config.num_layers * config.latent_width * itemsize


def drafter_kv_bytes_per_token(drafter: DrafterConfig, itemsize: int = 2, layout: Layout | None = None) -> int:
    """Bytes of one context token in the drafter's windows on one rank (24,576 for K2.6-DFlash on one rank)."""
    heads = len((layout or Layout()).kv_heads(drafter.num_heads, drafter.num_kv_heads))
    return 2 * drafter.num_layers * heads * drafter.head_dim * itemsize


# ------------------------------------------------------------------------------------------------------ bytes that stay


def weight_bytes(config: ModelConfig, layout: Layout | None = None, itemsize: int = 2, router: int = 4) -> Table:
    """Bytes of the target's weights on one rank by part (no layout: the whole model). `router`: its bytes per weight.

    With router=2 and one rank this is the text part of the checkpoint's files: 553.40 GiB for K2.6.
    """
    layout = layout or Layout()
    hidden, moe, experts = config.hidden_size, config.num_moe_layers, config.num_experts
    cut, whole = _attention(config)
    columns = len(layout.expert_columns(config.moe_intermediate_size))
    heads = len(layout.heads(config.num_heads))
    shared = len(layout.columns(config.shared_intermediate_size))
    return (
        ("experts", moe * len(layout.experts(experts)) * _expert_bytes(hidden, columns, config)),
        ("attention", config.num_layers * (cut * heads // config.num_heads + whole) * itemsize),
        ("shared experts", moe * _mlp(hidden, shared) * itemsize),
        ("router", moe * experts * (hidden * router + 4)),
        ("dense layers", config.first_k_dense * _mlp(hidden, len(layout.columns(config.intermediate_size))) * itemsize),
        ("lm_head", len(layout.vocab(config.vocab_size)) * hidden * itemsize),
        ("embedding", config.vocab_size * hidden * itemsize),
        ("norms", _norms(config) * itemsize),
    )


def matrix_bytes(outputs: int, inputs: int, itemsize: int) -> int:
    """Most bytes of a constant matrix on a CPU: as it is, or packed in float16 with its inputs in blocks (`model.packed`)."""
    plain = outputs * inputs * itemsize
    return max(plain, 2 * outputs * -(-inputs // PACKED_INPUTS) * PACKED_INPUTS) if itemsize == 4 else plain


def expanded_expert_bytes(config: ModelConfig, layout: Layout | None = None, itemsize: int = 4) -> int:
    """Most bytes of one rank's routed experts on a CPU, which expands them from INT4 (`model.moe.Experts`).

    Two matrices an expert, and where experts are few two more that hold all of them, the shared expert among them.
    """
    layout = layout or Layout()
    hidden, columns = config.hidden_size, len(layout.expert_columns(config.moe_intermediate_size))
    held = len(layout.experts(config.num_experts))
    total = held * (matrix_bytes(2 * columns, hidden, itemsize) + matrix_bytes(hidden, columns, itemsize))
    if config.num_experts <= WIDE_WASTE * config.experts_per_token:
        wide = held * columns + len(layout.columns(config.shared_intermediate_size))
        total += matrix_bytes(2 * wide, hidden, itemsize) + matrix_bytes(hidden, wide, itemsize)
    return config.num_moe_layers * total


def drafter_weight_bytes(drafter: DrafterConfig, layout: Layout | None = None, itemsize: int = 2) -> Table:
    """Bytes of the drafter's weights on one rank by part: 6.48 GiB in all for K2.6-DFlash on one rank."""
    layout = layout or Layout()
    hidden, d, layers = drafter.hidden_size, drafter.head_dim, drafter.num_layers
    heads, kv_heads = len(layout.heads(drafter.num_heads)), len(layout.kv_heads(drafter.num_heads, drafter.num_kv_heads))
    return (
        ("drafter fc", hidden * hidden * len(drafter.taps) * itemsize),
        ("drafter attention", layers * 2 * (heads + kv_heads) * d * hidden * itemsize),
        ("drafter mlp", layers * _mlp(hidden, len(layout.columns(drafter.intermediate_size))) * itemsize),
        ("drafter norms", (layers * (2 * hidden + 2 * d) + 2 * hidden) * itemsize),
    )


def peak_load_bytes(config: ModelConfig, layout: Layout | None = None, itemsize: int = 2) -> int:
    """Most bytes that one rank holds while its target is read: all its weights and the largest part of a layer twice.

    The second time is the part as the file has it (bfloat16), before it is cast. The embedding is read before the
    layers, when its second copy does not matter.
    """
    layout = layout or Layout()
    heads, hidden = len(layout.heads(config.num_heads)), config.hidden_size
    largest = max(
        hidden * len(layout.columns(config.intermediate_size)),
        hidden * max(config.q_lora_rank, config.num_experts, heads * config.v_head_dim),
        heads * config.qk_head_dim * config.q_lora_rank,
    )
    return total(weight_bytes(config, layout, itemsize)) + 2 * largest


# ------------------------------------------------------------------------------------------------------ bytes of a step


def step_bytes(
    config: ModelConfig, rows: int, nodes: int, context: int, world: int = 1, itemsize: int = 2,
    drafter: DrafterConfig | None = None, block: int = 0, window: int = 0, distinct: float | None = None,
) -> Table:  # fmt: skip
    """Bytes that one rank must move in a step, by part: `rows` requests of `nodes` nodes each after `context` tokens.

    With `drafter`, a draft pass of `block` tokens over at most `window` context tokens is counted too. distinct: experts that
    a layer's nodes choose, if that is known; else `expected_experts`.
    """
    tokens, hidden = rows * nodes, config.hidden_size
    cut, whole = _attention(config)
    distinct = expected_experts(config, tokens) if distinct is None else distinct
    experts = distinct * config.num_moe_layers * expert_bytes(config)
    kv = kv_bytes_per_token(config, itemsize)
    table = [
        ("experts", round(experts / world)),
        ("attention", config.num_layers * (cut // world + whole) * itemsize),
        ("shared experts", config.num_moe_layers * _mlp(hidden, config.shared_intermediate_size) * itemsize // world),
        # The router's weights are bfloat16 in the file; converting them is this engine's choice, not the floor.
        ("router", config.num_moe_layers * config.num_experts * hidden * 2),
        ("dense layers", config.first_k_dense * _mlp(hidden, config.intermediate_size) * itemsize // world),
        ("lm_head", config.vocab_size * hidden * itemsize // world),
        ("embedding", tokens * hidden * itemsize),
        ("kv read", rows * context * kv),
        ("kv write", tokens * kv),
    ]
    if drafter is not None and block > 0:
        weights = dict(drafter_weight_bytes(drafter, None, itemsize))
        fc = weights.pop("drafter fc")
        seen = min(context, window)
        table += [
            ("drafter", fc + sum(weights.values()) // world),
            ("drafter lm_head", config.vocab_size * hidden * itemsize // world),
            ("drafter kv", rows * seen * drafter_kv_bytes_per_token(drafter, itemsize) // min(world, drafter.num_kv_heads)),
        ]
    return tuple(table)


# ----------------------------------------------------------------------------------------------------------- operations


def expert_flops(config: ModelConfig) -> int:
    """Operations of one routed expert on one token (a multiply-add is two)."""
    return 2 * _mlp(config.hidden_size, config.moe_intermediate_size)


def step_operations(
    config: ModelConfig, tokens: int, context: int, world: int = 1, drafter: DrafterConfig | None = None, rows: int = 0,
    block: int = 0, window: int = 0,
) -> Table:  # fmt: skip
    """Operations of one rank in a step of `tokens` nodes, all verified, after `context` tokens each, by the parts of
    `step_bytes`; absorbed attention is the part "kv read". Elementwise work and attention within trees are left out.

    With `drafter`, a pass of `block` tokens for each of `rows` is counted too, and of each row one committed token.
    """
    cut, whole = _attention(config)
    moe, hidden, vocab = config.num_moe_layers, config.hidden_size, config.vocab_size
    per_key = config.num_layers * config.num_heads * (config.latent_width + config.kv_lora_rank)
    table = [
        ("experts", tokens * moe * config.experts_per_token * expert_flops(config) // world),
        ("attention", 2 * tokens * config.num_layers * (cut // world + whole)),
        ("shared experts", 2 * tokens * moe * _mlp(hidden, config.shared_intermediate_size) // world),
        ("router", 2 * tokens * moe * config.num_experts * hidden),
        ("dense layers", 2 * tokens * config.first_k_dense * _mlp(hidden, config.intermediate_size) // world),
        ("lm_head", 2 * tokens * vocab * hidden // world),
        ("kv read", 2 * tokens * per_key * context // world),
    ]
    if drafter is not None and block > 0:
        weights = {name: n // 2 for name, n in drafter_weight_bytes(drafter, None, 2)}
        passed = weights["drafter attention"] + weights["drafter mlp"]
        per_key = 2 * drafter.num_layers * drafter.num_heads * drafter.head_dim
        table += [
            ("drafter", 2 * rows * (block * passed // world + weights["drafter fc"])),
            ("drafter lm_head", 2 * rows * (block - 1) * vocab * hidden // world),
            ("drafter kv", 2 * rows * block * per_key * min(context, window) // world),
        ]
    return tuple(table)


def node_flops(config: ModelConfig, context: int = 0) -> int:
    """Operations of one node through the target, absorbed attention over `context` tokens included, whole machine."""
    return total(step_operations(config, 1, context))


def step_flops(config: ModelConfig, rows: int, nodes: int, context: int) -> int:
    """Operations of a step of the target, whole machine."""
    return rows * nodes * node_flops(config, context + nodes)


def floor(moved: Table, done: Table, bandwidth: float, flops: float) -> tuple[tuple[str, float], ...]:
    """Least seconds of a step by part: its bytes at `bandwidth` bytes per second or its operations at `flops` per second,
    whichever takes longer. Parts need each other's results, so their sum is a floor of the step."""
    operations = dict(done)
    return tuple((name, max(size / bandwidth, operations.get(name, 0) / flops)) for name, size in moved)
