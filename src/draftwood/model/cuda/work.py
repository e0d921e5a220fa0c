"""What the CUDA target and drafter take: bytes of weights and workspace, launches and bytes of a step. Arithmetic; no torch.

The memory plan uses these numbers before anything is loaded, and `pack`, `workspace` and `drafter` allocate exactly them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from draftwood.kernels.linear.plan import MACHINES, Shape, arranged_values, norms_itself
from draftwood.kernels.mla_attention import sizes as attention
from draftwood.kernels.mla_attention.sizes import Need
from draftwood.kernels.moe_int4.sizes import few_rows
from draftwood.kernels.moe_int4.sizes import launches as expert_launches
from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.model.costs import Table
from draftwood.model.cuda.bucket import Bucket, DraftBucket
from draftwood.parallel.layout import Layout

PARTIALS = 1 << 30
"""Bytes that partial attention of a bucket may take; where more would be needed, blocks walk whole rows."""
SUMMED = range(33, 133)
"""Nodes for which, on one rank, the norm after the experts sums over them (a multiprocessor a node), not a kernel of its own."""
MOST_ROUTED, MOST_ROUTED_TO_FEW, FEW_HELD, WHOLE_ROWS, TICKETS = 1024, 2304, 96, 128, 5
"""As in kernels/moe_route: nodes of one call of the router, of one for a rank that holds few experts, how many those are, nodes up
to which it is one launch (else two), and numbers that the one launch counts with."""
DRAFT_CHUNK, DRAFT_QUERIES, DRAFT_SPLIT = 128, 64, 32
"""As in kernels/draft_attention: places per chunk, queries per block, blocks up to which a row is spread."""


def chunks(tokens: int, held: int) -> list[range]:
    """Cut `tokens` nodes into parts that the router of a rank with `held` experts takes, as even as multiples of 8 allow."""
    most = MOST_ROUTED_TO_FEW if held <= FEW_HELD else MOST_ROUTED
    count = -(-tokens // most)
    size = min(-(-tokens // count // 8) * 8, most)
    return [range(at, min(at + size, tokens)) for at in range(0, tokens, size)]


def padded(columns: int) -> int:
    """Columns of an expert as its kernels see them."""
    return -(-columns // 128) * 128


@dataclass(frozen=True)
class Sizes:
    """A target on one rank, with `taps` layers tapped."""

    config: ModelConfig
    layout: Layout
    taps: int

    @property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return len(self.layout.heads(self.config.num_heads))

    @property
    def vocab(self) -> int:
        """Rows of the head on this rank."""
        return len(self.layout.vocab(self.config.vocab_size))

    @property
    def shared(self) -> int:
        """Columns of the shared expert on this rank."""
        return len(self.layout.columns(self.config.shared_intermediate_size))

    @property
    def dense(self) -> int:
        """Columns of a dense layer's MLP on this rank."""
        return len(self.layout.columns(self.config.intermediate_size))

    @property
    def hidden(self) -> int:
        """The widest SwiGLU of this rank that is not a routed expert's."""
        c = self.config
        return max(self.shared if c.num_moe_layers else 0, self.dense if c.first_k_dense else 0)

    @property
    def experts(self) -> range:
        """Routed experts of this rank."""
        return self.layout.experts(self.config.num_experts)

    @property
    def columns(self) -> int:
        """Columns of them, padded."""
        return padded(len(self.layout.expert_columns(self.config.moe_intermediate_size)))

    def linears(self) -> dict[str, Shape]:
        """The linear operations of the target by name."""
        c, h = self.config, self.heads
        return {
            "q_a+kv_a": Shape(c.q_lora_rank + c.latent_width, c.hidden_size),
            "q_b": Shape(h * c.qk_head_dim, c.q_lora_rank),
            "absorb_k": Shape(c.kv_lora_rank, c.qk_nope_head_dim, h),
            "absorb_v": Shape(c.v_head_dim, c.kv_lora_rank, h),
            "o": Shape(c.hidden_size, h * c.v_head_dim),
            "shared gate_up": Shape(2 * self.shared, c.hidden_size, glu=True),
            "shared down": Shape(c.hidden_size, self.shared),
            "dense gate_up": Shape(2 * self.dense, c.hidden_size, glu=True),
            "dense down": Shape(c.hidden_size, self.dense),
            "lm_head": Shape(self.vocab, c.hidden_size),
        }

    def times(self) -> dict[str, int]:
        """How often a step runs each linear operation."""
        c = self.config
        found = dict.fromkeys(("q_a+kv_a", "q_b", "absorb_k", "absorb_v", "o"), c.num_layers)
        found |= dict.fromkeys(("shared gate_up", "shared down"), c.num_moe_layers)
        return found | dict.fromkeys(("dense gate_up", "dense down"), c.first_k_dense) | {"lm_head": 1}

    def arranged(self, bucket: Bucket, arch: str) -> dict[str, int]:
        """By linear operation that a bucket runs: values of its input that are put in order first."""
        rows = dict.fromkeys(self.linears(), bucket.tokens) | {"lm_head": bucket.verified}
        times, machine = self.times(), MACHINES[arch]
        return {n: arranged_values(s, rows[n], machine) if times.get(n) else 0 for n, s in self.linears().items()}

    def ordered(self, buckets: Sequence[Bucket], arch: str) -> int:
        """The most of them for any operation of any of `buckets`."""
        return max(max(self.arranged(b, arch).values()) for b in buckets)

    def attention(self, buckets: Sequence[Bucket], arch: str) -> Need:
        """Memory for the attention of any of `buckets`. Raises ConfigError for one that no kernel serves."""
        c, heads, found = self.config, self.heads, []
        for b in buckets:
            shape = attention.shape_for(b.rows, b.nodes, heads, b.context, c.kv_lora_rank, arch)
            found.append(attention.need(b.rows, b.nodes, b.tokens, heads, b.context, c.kv_lora_rank, shape, partial_bytes=PARTIALS))
        return reduce(Need.with_room_for, found)


# ---------------------------------------------------------------------------------------------------------------- memory


def target_bytes(config: ModelConfig, layout: Layout, positions: int | None = None, router_parts: int = 1) -> Table:
    """Bytes of a packed target on one rank, and of its table of rotations. router_parts: 1 where the routers' weights are
    bfloat16 values, as K2's are, else 3."""
    c, sizes = config, Sizes(config, layout, 0)
    shapes, times = sizes.linears(), sizes.times()
    linears = {name: times[name] * shapes[name].nbytes for name in shapes}
    mlp = {"shared experts": ("shared gate_up", "shared down"), "dense layers": ("dense gate_up", "dense down")}
    apart = {"lm_head", *(name for names in mlp.values() for name in names)}
    known = c.max_position if positions is None else min(positions, c.max_position)
    norms = c.num_layers * (2 * c.hidden_size + c.q_lora_rank + c.kv_lora_rank) + c.hidden_size
    return (
        ("experts", c.num_moe_layers * len(sizes.experts) * 3 * c.hidden_size * sizes.columns * 9 // 16),
        ("attention", sum(n for name, n in linears.items() if name not in apart)),
        *((part, sum(linears[name] for name in names)) for part, names in mlp.items()),
        ("router", c.num_moe_layers * c.num_experts * (2 * router_parts * c.hidden_size + 4)),
        ("lm_head", linears["lm_head"]),
        ("embedding", c.vocab_size * c.hidden_size * 2),
        ("norms", 2 * norms),
        ("rotations", known * c.qk_rope_head_dim * 4),
    )


def workspace_bytes(sizes: Sizes, buckets: Sequence[Bucket], arch: str) -> Table:
    """Bytes of the one workspace that serves all `buckets`, by part. Raises ConfigError as `Sizes.attention`."""
    c, heads = sizes.config, sizes.heads
    tokens, verified = max(b.tokens for b in buckets), max(b.verified for b in buckets)
    per_head = c.qk_head_dim + 2 * c.kv_lora_rank + c.v_head_dim
    per_token = 4 * c.hidden_size + 2 * c.q_lora_rank + c.latent_width + heads * per_head + sizes.hidden
    return (
        ("hidden states", 2 * tokens * per_token + 2 * verified * c.hidden_size),
        ("ordered inputs", 2 * sizes.ordered(buckets, arch)),
        ("taps", 2 * tokens * sizes.taps * c.hidden_size),
        ("logits", 4 * verified * sizes.vocab),
        ("attention", sizes.attention(buckets, arch).nbytes(heads, c.kv_lora_rank)),
        ("experts", _routing_bytes(sizes, max(len(part) for b in buckets for part in chunks(b.tokens, len(sizes.experts))))),
    )


def _routing_bytes(sizes: Sizes, rows: int) -> int:
    """Lists of the router and what experts leave between their kernels, for `rows` nodes."""
    c = sizes.config
    if not c.num_moe_layers:
        return 0
    k, held = c.experts_per_token, len(sizes.experts)
    warps = next(w for w in range(8, 0, -1) if c.hidden_size % (128 * w) == 0)
    jobs = min(rows * k, held) + (rows * k // 8 if rows > 8 else 0)
    lists = rows * k * 12 + jobs * 16 + 4 + 4 * TICKETS + c.hidden_size // (128 * warps) * rows * c.num_experts * 4
    return lists + rows * k * (2 * sizes.columns + 4 * c.hidden_size)


@dataclass(frozen=True)
class DraftSizes:
    """A drafter on one rank. vocab: rows of the target's head on this rank."""

    config: DrafterConfig
    layout: Layout
    vocab: int

    @property
    def q_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.layout.heads(self.config.num_heads))

    @property
    def kv_heads(self) -> int:
        """Key heads of this rank."""
        return len(self.layout.kv_heads(self.config.num_heads, self.config.num_kv_heads))

    @property
    def columns(self) -> int:
        """Columns of an MLP on this rank."""
        return len(self.layout.columns(self.config.intermediate_size))

    @property
    def context_width(self) -> int:
        """Keys and values of all layers for one token."""
        return 2 * self.config.num_layers * self.kv_heads * self.config.head_dim

    def linears(self) -> dict[str, Shape]:
        """The linear operations of the drafter by name."""
        c, d = self.config, self.config.head_dim
        return {
            "qkv": Shape((self.q_heads + 2 * self.kv_heads) * d, c.hidden_size),
            "o": Shape(c.hidden_size, self.q_heads * d),
            "gate_up": Shape(2 * self.columns, c.hidden_size, glu=True),
            "down": Shape(c.hidden_size, self.columns),
            "fc": Shape(c.hidden_size, len(c.taps) * c.hidden_size),
            "context kv": Shape(self.context_width, c.hidden_size),
        }

    def arranged(self, bucket: DraftBucket, arch: str) -> dict[str, int]:
        """By linear operation of a bucket, the head's too: values of its input that are put in order first."""
        shapes, machine = self.linears(), MACHINES[arch]
        rows = dict.fromkeys(shapes, bucket.rows * bucket.block) | dict.fromkeys(("fc", "context kv"), bucket.rows * bucket.path)
        shapes["head"], rows["head"] = Shape(self.vocab, self.config.hidden_size), bucket.rows * (bucket.block - 1)
        return {n: arranged_values(s, rows[n], machine) for n, s in shapes.items()}

    def ordered(self, buckets: Sequence[DraftBucket], arch: str) -> int:
        """The most of them for any operation of any of `buckets`."""
        return max(max(self.arranged(b, arch).values()) for b in buckets)

    def times(self) -> dict[str, int]:
        """How often a step runs each of them; the head is the target's."""
        return dict.fromkeys(("qkv", "o", "gate_up", "down"), self.config.num_layers) | {"fc": 1, "context kv": 1}

    def partial_floats(self, bucket: DraftBucket) -> int:
        """Floats of partial attention of a bucket (draft_attention.op.workspace_numel)."""
        share = self.q_heads // self.kv_heads
        blocks = bucket.rows * self.kv_heads * -(-share * bucket.block // DRAFT_QUERIES)
        if bucket.capacity <= DRAFT_CHUNK or blocks > DRAFT_SPLIT:
            return 0
        chunk_count = -(-bucket.capacity // DRAFT_CHUNK)
        return bucket.rows * self.kv_heads * chunk_count * share * bucket.block * (self.config.head_dim + 2)


def drafter_bytes(config: DrafterConfig, layout: Layout, positions: int | None = None) -> Table:
    """Bytes of a packed drafter on one rank, and of its table of rotations."""
    c, sizes = config, DraftSizes(config, layout, 0)
    shapes, times = sizes.linears(), sizes.times()
    known = c.max_position if positions is None else min(positions, c.max_position)
    norms = c.num_layers * (2 * c.hidden_size + 3 * c.head_dim) + 2 * c.hidden_size
    return (
        *((f"drafter {name}", times[name] * shapes[name].nbytes) for name in shapes),
        ("drafter norms", 2 * norms),
        ("drafter rotations", known * c.head_dim * 4),
    )


def draft_workspace_bytes(sizes: DraftSizes, buckets: Sequence[DraftBucket], arch: str) -> Table:
    """Bytes of the one workspace that serves all `buckets`, by part."""
    c, d = sizes.config, sizes.config.head_dim
    tokens = max(b.rows * b.block for b in buckets)
    guesses = max(b.rows * (b.block - 1) for b in buckets)
    places = max(b.rows * b.path for b in buckets)
    per_token = 3 * c.hidden_size + (2 * sizes.q_heads + 2 * sizes.kv_heads) * d + sizes.columns
    per_place = (len(c.taps) + 2) * c.hidden_size + sizes.context_width
    return (
        ("draft hidden states", 2 * (tokens * per_token + guesses * c.hidden_size)),
        ("draft logits", 4 * guesses * sizes.vocab),
        ("draft attention", 4 * max(sizes.partial_floats(b) for b in buckets)),
        ("draft features", 2 * places * per_place),
        ("ordered draft inputs", 2 * sizes.ordered(buckets, arch)),
    )


# ---------------------------------------------------------------------------------------------------------------- a step


def launches(sizes: Sizes, bucket: Bucket, arch: str, chosen: bool = False) -> Table:
    """Kernel launches of one forward, by kernel. chosen: only some nodes are verified, which takes one norm more."""
    c, layers, moe = sizes.config, sizes.config.num_layers, sizes.config.num_moe_layers
    parts = [len(part) for part in chunks(bucket.tokens, len(sizes.experts))]
    several = {"router parts": 2} if len(parts) > 1 else {}
    columns, held, times = sizes.columns, len(sizes.experts), sizes.times()
    experts = sum(expert_launches(n, columns, c.experts_per_token, held, c.num_experts, arch) for n in parts)
    found = {
        "attention plan": 1,
        "add_norm": (3 - norms_itself(sizes.linears()["q_b"], bucket.tokens)) * layers + 1 + chosen,
        "linear": sum(times.values()),
        "inputs in order": sum(times[name] for name, values in sizes.arranged(bucket, arch).items() if values),
        "turn_and_store": layers,
        "attention": 2 * layers,
        "moe_route": moe * sum(1 if n <= WHOLE_ROWS else 2 for n in parts),
        "moe_int4": moe * (experts - norms_sum(sizes, bucket.tokens)),
    }
    return tuple((name, n) for name, n in (found | several if c.num_moe_layers else found).items() if n)


def norms_sum(sizes: Sizes, tokens: int) -> bool:
    """Whether the norm after the experts of so many nodes sums over each node's experts, whose kernels then leave y of them all."""
    return sizes.layout.world == 1 and tokens in SUMMED and tokens > few_rows(sizes.columns)


def draft_launches(sizes: DraftSizes, bucket: DraftBucket, arch: str) -> Table:
    """Kernel launches of one proposal and one observation on one rank, by kernel; "torch": copies and index arithmetic."""
    layers, times = sizes.config.num_layers, sizes.times() | {"head": 1}
    found = {
        "torch": 2 + 4,
        "add_norm": 2 * layers + 1 + 1,
        "linear": sum(times.values()),
        "inputs in order": sum(times[name] for name, values in sizes.arranged(bucket, arch).items() if values),
        "head_norm_rope": layers,
        "draft_attention": layers,
        "ring_write": 1,
    }
    return tuple((name, n) for name, n in found.items() if n)


def traffic(sizes: Sizes, nodes: Sequence[int], context: int, experts: float) -> Table:
    """Bytes that one forward on this rank must move, by kernel: weights once, what is between kernels written and read once.

    nodes: live nodes of each row, all verified; context: committed tokens of each row; experts: distinct ones of this rank that
    a layer's nodes choose (`costs.expected_experts`).
    """
    c, h, n = sizes.config, sizes.heads, sum(nodes)
    shapes, times = sizes.linears(), sizes.times()
    out_bytes = {"lm_head": 4}
    linear = []
    for name, shape in shapes.items():
        results = shape.outputs // 2 if shape.glu else shape.outputs
        rows = shape.heads * (2 * shape.inputs + out_bytes.get(name, 2) * results) * n
        linear.append((name, times[name] * (shape.nbytes + rows)))
    layers, moe, wide = c.num_layers, c.num_moe_layers, 2 * c.hidden_size
    pairs = n * c.experts_per_token
    latents = sum(context + count for count in nodes) * c.latent_width + n * h * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    expert = 3 * c.hidden_size * sizes.columns * 9 // 16
    return (
        *linear,
        ("add_norm", (2 * layers + 1) * n * 3 * wide + moe * n * 2 * wide + layers * n * 4 * c.q_lora_rank),
        ("turn_and_store", layers * n * 4 * (h * c.qk_rope_head_dim + c.latent_width)),
        ("attention", layers * 2 * latents),
        ("moe_route", moe * (2 * c.num_experts * c.hidden_size + n * wide + pairs * 12)),
        ("moe_int4", moe * round(experts * expert + n * 3 * wide + pairs * 4 * sizes.columns)),
    )
