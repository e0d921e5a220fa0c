"""Greedy decoding of one prompt as published: plain, and with DDTree (arXiv 2604.12989), in eager PyTorch.

Written from the paper's description, in the manner of its reference code: the target is transformers', the drafter the published
DFlash module, the tree grows on the host, and every step waits for the device twice (guesses, choices).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass
class Answer:
    """Tokens after a prompt. The clock runs from the first token, which the prompt's forward gives, to the last."""

    tokens: list[int]
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    steps: int = 0
    """Target forwards after the prompt's."""

    def add(self, tokens: Sequence[int], stop: Collection[int], most: int) -> bool:
        """Take what a step returned, up to the answer's end; True when that is reached."""
        self.steps += 1
        self.ended = time.perf_counter()
        for token in tokens[: most - len(self.tokens)]:
            self.tokens.append(token)
            if token in stop:
                return True
        return len(self.tokens) >= most


@dataclass(frozen=True)
class Hosted:
    """A tree on the host. Node 0 is the root; parents precede their children."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def visible(self) -> np.ndarray:
        """Return [n, n] bool: node i sees itself and its ancestors."""
        seen = np.eye(len(self.tokens), dtype=bool)
        for i, parent in enumerate(self.parents[1:], 1):
            seen[i] |= seen[parent]
        return seen

    def walk(self, choices: Sequence[int]) -> tuple[list[int], int]:
        """Follow the target's choice at every node from the root; return the accepted nodes and the last choice."""
        children = {edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True)) if node}
        path = [0]
        while (child := children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(child)
        return path, choices[path[-1]]


def best_first(root: int, ids: Sequence[Sequence[int]], logp: Sequence[Sequence[float]], budget: int) -> Hosted:
    """Grow the `budget` most probable prefixes from the best tokens of each depth, most likely first.

    Pop the prefix of highest summed log-probability; push its next sibling and its first child.
    """
    tokens, parents, depths = [root], [-1], [0]
    heap = [(-logp[0][0], 0, 0, 0.0)]  # minus the sum, parent, rank among the siblings, the parent's sum
    while heap and len(tokens) <= budget:
        minus, parent, rank, base = heapq.heappop(heap)
        depth, node = depths[parent], len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        depths.append(depth + 1)
        if rank + 1 < len(ids[depth]):
            heapq.heappush(heap, (-(base + logp[depth][rank + 1]), parent, rank + 1, base))
        if depth + 1 < len(ids):
            heapq.heappush(heap, (minus - logp[depth + 1][0], node, 0, -minus))
    return Hosted(tokens, parents, depths)


@torch.inference_mode()
def plain(target: torch.nn.Module, prompt: Sequence[int], most: int, stop: Collection[int]) -> Answer:
    """Decode up to `most` tokens, one a step."""
    cache = DynamicCache(config=target.config)
    answer = Answer([int(_prompt(target, cache, prompt, False).logits[0, -1].argmax())])
    ended = answer.tokens[0] in stop or most == 1
    while not ended:
        at = len(prompt) + len(answer.tokens) - 1
        token = torch.tensor([answer.tokens[-1:]], device=target.device)
        position = torch.tensor([[at]], device=target.device)
        logits = target(token, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ended = answer.add([int(logits[0, -1].argmax())], stop, most)
    return answer


@torch.inference_mode()
def ddtree(
    target: torch.nn.Module, drafter: torch.nn.Module, prompt: Sequence[int], most: int, stop: Collection[int], budget: int
) -> Answer:
    """Decode up to `most` tokens with trees of up to `budget` nodes beyond the root."""
    cache, drafts = DynamicCache(config=target.config), DynamicCache(config=drafter.config)
    out = _prompt(target, cache, prompt, True)
    answer = Answer([int(out.logits[0, -1].argmax())])
    taps, length = _taps(out.hidden_states, drafter), len(prompt)
    ended = answer.tokens[0] in stop or most == 1
    while not ended:
        ids, logp = _guess(target, drafter, drafts, answer.tokens[-1], taps, length, budget)
        tree = best_first(answer.tokens[-1], ids, logp, budget)
        out = _verify(target, cache, tree, length)
        path, last = tree.walk(out.logits[0].argmax(-1).tolist())
        ended = answer.add([*(tree.tokens[node] for node in path[1:]), last], stop, most)
        kept = torch.tensor(path, device=target.device)
        _compact(cache, length, kept)
        taps = _taps(out.hidden_states, drafter)[:, kept]
        length += len(path)
    return answer


def _prompt(target: torch.nn.Module, cache: DynamicCache, prompt: Sequence[int], taps: bool):
    ids, positions = torch.tensor([list(prompt)], device=target.device), torch.arange(len(prompt), device=target.device)
    return target(
        ids, position_ids=positions[None], past_key_values=cache, use_cache=True, logits_to_keep=1, output_hidden_states=taps
    )  # fmt: skip


def _taps(hidden_states: Sequence[Tensor], drafter: torch.nn.Module) -> Tensor:
    """Return [1, L, taps * H]: the residual stream after the layers that the drafter was trained on."""
    return torch.cat([hidden_states[layer + 1] for layer in drafter.target_layer_ids], -1)


def _guess(
    target: torch.nn.Module, drafter: torch.nn.Module, cache: DynamicCache, root: int, taps: Tensor, length: int, budget: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Run the drafter over the root and masked places; return the best tokens of each depth and their log-probabilities.

    `taps` are of the tokens before `length` that it has not seen yet; the block itself does not stay in its cache.
    """
    block = torch.full((1, drafter.block_size), drafter.mask_token_id, device=target.device)
    block[0, 0] = root
    hidden = drafter(
        target_hidden=taps, noise_embedding=target.get_input_embeddings()(block), past_key_values=cache, use_cache=True,
        position_ids=torch.arange(length - taps.shape[1], length + drafter.block_size, device=target.device)[None],
    )  # fmt: skip
    _crop(cache, length)
    logp = drafter.compute_logits(hidden[0, 1:], target.lm_head).float().log_softmax(-1)
    best = logp.topk(min(budget, logp.shape[-1]), -1)
    return best.indices.tolist(), best.values.tolist()


def _verify(target: torch.nn.Module, cache: DynamicCache, tree: Hosted, length: int):
    """Run the target over all nodes at once: each sees what is committed, itself and its ancestors."""
    device, nodes = target.device, len(tree.tokens)
    mask = torch.ones((1, 1, nodes, length + nodes), dtype=torch.bool, device=device)
    mask[0, 0, :, length:] = torch.from_numpy(tree.visible()).to(device)
    return target(
        torch.tensor([tree.tokens], device=device), attention_mask=mask, past_key_values=cache, use_cache=True,
        position_ids=length + torch.tensor([tree.depths], device=device), output_hidden_states=True,
    )  # fmt: skip


def _compact(cache: DynamicCache, length: int, kept: Tensor) -> None:
    """Make the latents of the accepted nodes, in order, follow those of the first `length` tokens, and forget the others."""
    end = length + len(kept)
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            part[..., length:end, :] = part.index_select(-2, length + kept)
    _crop(cache, end)


def _crop(cache: DynamicCache, length: int) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
