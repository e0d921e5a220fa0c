"""Plain decoding of many rows at once: all rows stand at the same position, one CUDA graph per context length.

Prompts are *forced*: at each step a row takes either the next token of its prompt or the token that the target chose.
So prompts of any length are left-aligned from position 0 without padding or masks.
Attention is the absorbed form of MLA: the cache holds latent + rotary key per token, as the engine's does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.train.network import TargetNet, linear, queries, rms

BUCKET = 256  # context lengths are rounded up to this


class Policy(Protocol):
    """Decides the next token of every row. All state lives in tensors that are changed in place (graph-safe)."""

    ids: Tensor  # [B, L] long: the text so far

    def reset(self) -> None:
        """Start all rows again: fill ids[:, 0]."""

    def next(self, logits: Tensor, position: Tensor) -> Tensor:
        """logits [B, V] fp32 at `position` [1] -> token [B] for position + 1, also written to ids."""


class Decoder:
    """Decodes `policy`'s rows from position 0 to the end of its ids. `net` must be baked."""

    def __init__(self, net: TargetNet, policy: Policy, dtype: torch.dtype) -> None:
        self.net, self.policy, self.dtype = net, policy, dtype
        (self.rows, self.length), device = policy.ids.shape, net.embed.device
        size = (self.rows, self.length, net.shape.latent)
        self.cache = [torch.zeros(size, dtype=dtype, device=device) for _ in net.blocks]
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.token = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.columns = torch.arange(self.length, device=device)
        self.graphs: dict[int, Callable[[], None]] = {}

    def attend(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, context: int) -> Tensor:
        """x [B, hidden] -> attention output [B, heads, v] over cache[:, :context] up to the current position."""
        net, s = self.net, self.net.shape
        block = net.blocks[layer]
        q_nope, q_rope, latent, key = queries(x, block.attention_weights(), cos, sin, s)
        self.cache[layer].index_copy_(1, self.position, torch.cat([latent, key], -1)[:, None])
        w_k, w_v = block.kv_b.to(x.dtype).unflatten(0, (s.heads, -1)).split([s.nope, s.v], 1)
        q = torch.cat([torch.einsum("bhn,hnc->bhc", q_nope, w_k), q_rope], -1)
        past = self.cache[layer][:, :context]
        score = (q @ past.mT).float() * net.scale
        hidden = self.columns[:context] > self.position
        p = torch.softmax(score.masked_fill(hidden, -torch.inf), -1).to(x.dtype)
        return torch.einsum("bhc,hvc->bhv", p @ past[..., : s.kv_lora], w_v)

    def step(self, context: int) -> None:
        """One token for every row."""
        net = self.net
        x = F.embedding(self.token, net.embed).to(self.dtype)
        cos = net.cos.index_select(0, self.position).expand(self.rows, -1)
        sin = net.sin.index_select(0, self.position).expand(self.rows, -1)
        for i, block in enumerate(net.blocks):
            x, _ = net.mix(block, x, self.attend(i, x, cos, sin, context))
        logits = linear(rms(x, net.norm, net.shape.eps), net.head).float()
        self.token.copy_(self.policy.next(logits, self.position))
        self.position += 1

    def capture(self, context: int) -> Callable[[], None]:
        """The step as a CUDA graph. Warm-up and capture disturb the policy: reset it afterwards."""
        self.position.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(context)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(context)
        return graph.replay

    def prepare(self) -> None:
        """Make the steps: one per bucket of context lengths; graphs on CUDA."""
        for first in range(0, self.length, BUCKET):
            context = min(first + BUCKET, self.length)
            if self.token.is_cuda:
                self.graphs[first // BUCKET] = self.capture(context)
            else:
                self.graphs[first // BUCKET] = lambda context=context: self.step(context)  # type: ignore[misc]

    @torch.no_grad()
    def run(self) -> Tensor:
        """Decode all rows to the end; returns the policy's ids [B, L]."""
        if not self.graphs:
            self.prepare()
        self.policy.reset()
        self.position.zero_()
        self.token.copy_(self.policy.ids[:, 0])
        for position in range(self.length - 1):
            self.graphs[position // BUCKET]()
        return self.policy.ids


# ---------------------------------------------------------------- noise and choices
def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser on int64 tensors."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def keyed_gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise that depends on (seed, position, token) alone; long tensors that broadcast -> fp32.

    Only for offline studies, where text and drafts must see the same noise; the engine's noise is `spec.sampling`'s.
    """
    h = _mix(tokens * 0x1E3779B1 + _mix(positions * 0x05EBCA6B + _mix(seeds + 0x27D4EB2F)))
    u = ((h >> 8).float() + 0.5) / (1 << 24)
    u = u * (1 - 2**-20) + (_mix(h + 0x165667B1).float() / 2**32) * 2**-24
    return -torch.log(-torch.log(u.clamp(1e-12, 1 - 1e-7)))


class Fixed:
    """Policy: fixed prompts [B, L] of `lengths` [B] tokens, then choices of law 1 with keyed noise at one temperature."""

    def __init__(self, prompts: Tensor, lengths: Tensor, seeds: Tensor, temperature: float, vocab: int) -> None:
        self.prompts, self.lengths, self.seeds, self.temperature = prompts, lengths, seeds, temperature
        self.ids = torch.zeros_like(prompts)
        self.tokens = torch.arange(vocab, device=prompts.device)

    def reset(self) -> None:
        self.ids.zero_()
        self.ids[:, 0] = self.prompts[:, 0]

    def next(self, logits: Tensor, position: Tensor) -> Tensor:
        at = position + 1
        if self.temperature > 0:
            logits = logits / self.temperature + keyed_gumbel(self.seeds[:, None], at, self.tokens)
        forced = self.prompts.index_select(1, at)[:, 0]
        token = torch.where(at < self.lengths, forced, logits.argmax(-1))
        self.ids.index_copy_(1, at, token[:, None])
        return token


def loop_start(tokens: Tensor, longest: int = 64, least: int = 24) -> int:
    """Index of the first *repeated* token of a final loop in `tokens` [n]; n when there is no such loop.

    A loop: the text repeats what stands `period` <= longest tokens earlier up to its end, for at least two periods
    and `least` tokens.
    """
    x = tokens.cpu()
    n = best = len(x)
    for period in range(1, min(longest, n // 2) + 1):
        same = (x[period:] == x[:-period]).flip(0)
        run = len(same) if bool(same.all()) else int((~same).int().argmax())
        if run >= max(2 * period, least):
            best = min(best, n - run)
    return best
