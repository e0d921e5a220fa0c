"""Multi-head latent attention over paged latents, for any mixture of trees, single tokens and prompt chunks.

What a step's rows may see is worked out once per forward (`plan_step`): live nodes are flattened to T, so padding is
never computed; rows of like size attend together. Each layer then only writes its latents and multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.model.config import ModelConfig
from draftwood.model.layers import Linear, Norm, rotate_pairs_
from draftwood.model.weights import LayerWeights

WORD = 64
"""Nodes in one word of an ancestor mask."""
SMALL = 4096
"""Nodes x keys of a row up to which the logits are formed whole; beyond it they are formed in blocks
(`scaled_dot_product_attention`). Measured on two cores: equal near 17 nodes x 500 keys."""
ALONE = 1024
"""Padded node-key pairs that cost about as much as attending to a row by itself."""


class Slots(Protocol):
    """Where the rows' latents are. `kv.store.Scratch` is one."""

    @property
    def cache(self) -> Tensor:
        """[layers, slots, latent_width]"""

    @property
    def prefix(self) -> Tensor:
        """[R, L] slots of the committed tokens in position order; any valid id after `lengths`."""

    @property
    def lengths(self) -> Tensor:
        """[R] committed tokens."""

    @property
    def nodes(self) -> Tensor:
        """[R, N] slot of each node."""


@dataclass(frozen=True)
class Group:
    """Rows that attend together, padded to the same number of nodes and of keys.

    A padding query is a copy of the row's node 0 and a padding key is masked and points at node 0's slot, so that
    nothing unwritten is ever read.
    """

    rows: int
    nodes: int
    start: int | None
    """First flat node when the group is one row (its nodes are then start .. start + nodes - 1)."""
    queries: Tensor | None
    """[rows * nodes] flat node of each padded query; None for one row."""
    live: Tensor | None
    """Places in rows * nodes that are real, in order; None when all are."""
    keys: Tensor
    """[rows * M] slots: committed tokens, then nodes."""
    mask: Tensor
    """[rows, nodes, M] 0 or -inf."""
    _spread: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def bias(self, heads: int) -> Tensor:
        """The mask for every head, [rows, heads * nodes, M]; made once for all layers."""
        if heads not in self._spread:
            r, n, m = self.mask.shape
            self._spread[heads] = self.mask.unsqueeze(1).expand(r, heads, n, m).reshape(r, heads * n, m)
        return self._spread[heads]


@dataclass(frozen=True)
class StepPlan:
    """What attention needs to know about a step, the same for every layer."""

    flat: Tensor | None
    """[T] place in R * N of each live node; None when all R * N are live."""
    starts: list[int]
    """First flat node of each row."""
    slots: Tensor
    """[T] slot of each live node."""
    groups: list[Group]
    order: Tensor | None
    """[T] place of each flat node in the groups' joint output; None when that is in order."""


def plan_step(slots: Slots, ancestors: Tensor, counts: Tensor, dtype: torch.dtype) -> StepPlan:
    """Work out keys and masks of a step. ancestors [R, N, W] int64 words, counts [R] live nodes of each row."""
    live, lengths = counts.tolist(), slots.lengths.tolist()
    width, device = slots.nodes.shape[1], slots.nodes.device
    starts, total = [], 0
    for n in live:
        starts.append(total)
        total += n
    flat = None
    if total < len(live) * width:
        flat = (torch.arange(width, device=device) < counts.unsqueeze(1)).flatten().nonzero().squeeze(1)
    members = _group(live, lengths)
    groups = [_plan_group(rows, slots, ancestors, live, lengths, starts, dtype) for rows in members]
    joint = [row for rows in members for row in rows]
    order = None
    if joint != sorted(joint):
        runs = torch.cat([torch.arange(starts[r], starts[r] + live[r], device=device) for r in joint])
        order = torch.empty_like(runs).index_copy_(0, runs, torch.arange(total, device=device))
    nodes = slots.nodes.flatten()
    return StepPlan(flat, starts, nodes if flat is None else nodes.index_select(0, flat), groups, order)


def _group(live: list[int], lengths: list[int]) -> list[list[int]]:
    """Split rows that have nodes into groups in which padding costs no more than it saves.

    From the largest row down, a row joins while its padding is less work than its own nodes, or next to none.
    """
    rows = sorted((r for r, n in enumerate(live) if n), key=lambda r: (-live[r], -lengths[r], r))
    groups: list[list[int]] = []
    most_nodes = most_keys = 0
    for r in rows:
        own, keys = live[r] * (lengths[r] + live[r]), lengths[r] + live[r]
        padded = most_nodes * max(most_keys, keys)
        grown = max(keys - most_keys, 0) * most_nodes * (len(groups[-1]) if groups else 0)
        if groups and padded + grown - own <= max(ALONE, own):
            groups[-1].append(r)
            most_keys = max(most_keys, keys)
        else:
            groups.append([r])
            most_nodes, most_keys = live[r], keys
    for group in groups:
        group.sort()
    return groups


def _plan_group(
    rows: list[int],
    slots: Slots,
    ancestors: Tensor,
    live: list[int],
    lengths: list[int],
    starts: list[int],
    dtype: torch.dtype,
) -> Group:
    n, longest = max(live[r] for r in rows), max(lengths[r] for r in rows)
    words = -(-n // WORD)
    if len(rows) == 1:
        r = rows[0]
        keys = torch.cat((slots.prefix[r, :longest], slots.nodes[r, :n]))
        mask = _mask(ancestors[r : r + 1, :n, :words], n, longest, dtype)
        return Group(1, n, starts[r], None, None, keys, mask)
    device = slots.nodes.device
    index = torch.tensor(rows, device=device)
    count = torch.tensor([live[r] for r in rows], device=device).unsqueeze(1)
    length = torch.tensor([lengths[r] for r in rows], device=device).unsqueeze(1)
    ahead = torch.arange(n, device=device)
    node = torch.where(ahead < count, ahead, 0)
    nodes = slots.nodes.index_select(0, index)
    seen = torch.arange(longest, device=device) < length
    prefix = torch.where(seen, slots.prefix.index_select(0, index)[:, :longest], nodes[:, :1])
    keys = torch.cat((prefix, nodes.gather(1, node)), 1)
    words_of = ancestors.index_select(0, index)[:, :, :words]
    words_of = words_of.gather(1, node.unsqueeze(-1).expand(-1, -1, words))
    mask = _mask(words_of, n, longest, dtype)
    mask[:, :, :longest].masked_fill_(~seen.unsqueeze(1), -torch.inf)
    first = torch.tensor([starts[r] for r in rows], device=device).unsqueeze(1)
    real = None
    if any(live[r] < n for r in rows):
        real = (ahead < count).flatten().nonzero().squeeze(1)
    return Group(len(rows), n, None, (first + node).flatten(), real, keys.flatten(), mask)


def _mask(words: Tensor, nodes: int, longest: int, dtype: torch.dtype) -> Tensor:
    """Return [rows, nodes, longest + nodes]: 0 on the prefix, on ancestors and on the node itself, else -inf."""
    bits = (words.unsqueeze(-1) >> torch.arange(WORD, device=words.device)) & 1
    mask = torch.zeros(words.shape[0], nodes, longest + nodes, dtype=dtype, device=words.device)
    mask[:, :, longest:].masked_fill_(bits.flatten(2)[:, :, :nodes] == 0, -torch.inf)
    return mask


class Attention:
    """One layer's attention, or a rank's heads of it: its output is then a partial sum."""

    def __init__(self, weights: LayerWeights, config: ModelConfig) -> None:
        c = config
        self.nope, self.rope, self.v, self.latent = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
        self.q_lora, self.width = c.q_lora_rank, c.latent_width
        self.scale = c.softmax_scale
        self.heads = weights.q_b.shape[0] // c.qk_head_dim
        self.down = Linear(torch.cat((weights.q_a, weights.kv_a)))
        self.q_b, self.o = Linear(weights.q_b), Linear(weights.o)
        self.q_norm = Norm(weights.q_a_norm, c.latent_norm_eps)
        self.kv_norm = Norm(weights.kv_a_norm, c.latent_norm_eps)
        self.kv_b = weights.kv_b
        per_head = weights.kv_b.view(self.heads, self.nope + self.v, self.latent)
        self.absorb_k = per_head[:, : self.nope].contiguous()
        """[h, nope, latent]: takes a query's part without position to the latent space."""
        self.absorb_v = per_head[:, self.nope :].transpose(1, 2).contiguous()
        """[h, latent, v]: takes attended latents to values."""
        self.plain_from = self._break_even()

    def _break_even(self) -> int:
        """Nodes of a row from which expanding all keys and values once costs less than attending to latents."""
        absorbed = 2 * self.latent + self.rope
        plain = 2 * (self.nope + self.rope)
        expand = self.latent * (self.nope + self.v)
        return expand // (absorbed - plain) + 1 if absorbed > plain else 1 << 30

    def __call__(self, x: Tensor, turns: Tensor, cache: Tensor, plan: StepPlan) -> Tensor:
        """x [T, H] normed live nodes, turns [T, rope / 2], cache [slots, latent_width] of this layer -> [T, H].

        The nodes' latents are written first and read back with the prefix, so that a node sees what later steps will.
        """
        q_low, latent, key = torch.split_with_sizes(self.down(x), (self.q_lora, self.latent, self.rope), -1)
        rotate_pairs_(key, turns)
        stored = torch.cat((self.kv_norm(latent), key), -1)
        cache.index_copy_(0, plan.slots, stored.to(cache.dtype))
        q = self.q_b(self.q_norm(q_low)).view(-1, self.heads, self.nope + self.rope)
        rotate_pairs_(q[..., self.nope :], turns.unsqueeze(1))
        outs = [self._attend(q, cache, group) for group in plan.groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return self.o(out if plan.order is None else out.index_select(0, plan.order))

    def _attend(self, q: Tensor, cache: Tensor, group: Group) -> Tensor:
        """q [T, h, nope + rope] of all rows -> [live nodes of the group, h * v]."""
        if group.queries is None:
            assert group.start is not None
            q = q.narrow(0, group.start, group.nodes)
        else:
            q = q.index_select(0, group.queries)
        keys = cache.index_select(0, group.keys).view(group.rows, -1, self.width).to(q.dtype)
        out = self._plain(q, keys, group) if group.nodes >= self.plain_from else self._absorbed(q, keys, group)
        return out if group.live is None else out.index_select(0, group.live)

    def _absorbed(self, q: Tensor, keys: Tensor, group: Group) -> Tensor:
        """Attend in the latent space: q [r * n, h, nope + rope], keys [r, M, latent_width] -> [r * n, h * v]."""
        r, n, h, wide = group.rows, group.nodes, self.heads, group.nodes * group.mask.shape[-1] > SMALL
        plain, rotary = torch.split_with_sizes(q.transpose(0, 1), (self.nope, self.rope), -1)
        q = torch.cat((torch.bmm(plain, self.absorb_k), rotary), -1)
        if r > 1:
            q = q.view(h, r, n, -1).transpose(0, 1)
        if wide:
            k = keys.unsqueeze(1).expand(r, h, -1, -1)
            # Values are the first columns of the keys; the rest is computed too, because equal widths run fused.
            seen = F.scaled_dot_product_attention(q.view(r, h, n, -1), k, k, attn_mask=group.mask.unsqueeze(1), scale=self.scale)[
                ..., : self.latent
            ]
        else:
            logits = torch.baddbmm(group.bias(h), q.reshape(r, h * n, -1), keys.transpose(1, 2), alpha=self.scale)
            weights = torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype)
            seen = torch.bmm(weights, keys[..., : self.latent]).view(r, h, n, -1)
        seen = seen.transpose(0, 1).reshape(h, r * n, -1)
        return torch.bmm(seen, self.absorb_v).transpose(0, 1).reshape(r * n, -1)

    def _plain(self, q: Tensor, keys: Tensor, group: Group) -> Tensor:
        """Attend to expanded keys and values: q [r * n, h, nope + rope], keys [r, M, latent_width] -> [r * n, h * v]."""
        r, n, h, m = group.rows, group.nodes, self.heads, keys.shape[1]
        latent, rotary = keys.split((self.latent, self.rope), -1)
        k, v = F.linear(latent, self.kv_b).view(r, m, h, -1).transpose(1, 2).split((self.nope, self.v), -1)
        k = torch.cat((k, rotary.unsqueeze(1).expand(r, h, m, -1)), -1)
        wider = k.shape[-1] - self.v
        q = q.view(r, n, h, -1).transpose(1, 2)
        if wider > 0:
            v = F.pad(v, (0, wider))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask.unsqueeze(1), scale=self.scale)
        return seen[..., : self.v].transpose(1, 2).reshape(r * n, -1)
