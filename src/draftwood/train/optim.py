"""Muon for matrices, AdamW for the rest, one learning-rate schedule.

Muon: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with the update scaled by
0.2 sqrt(max dimension) so that its RMS is AdamW's (Moonshot AI, arXiv 2502.16982).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration in bf16 on a batch of matrices [n, r, c], r <= c."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x


def rate(progress: float, step: int, warmup: int = 100, hold: float = 0.4, floor: float = 0.01) -> float:
    """Factor on the learning rate: warm-up by steps, flat until `hold` of the run, then linear to `floor`."""
    decay = 1.0 if progress < hold else max(floor, 1 - (progress - hold) / (1 - hold))
    return min(1.0, (step + 1) / warmup) * decay


def continued(progress: float, step: int, share: float, warmup: int = 30, floor: float = 0.02) -> float:
    """Factor on the learning rate of a run that starts from trained weights: linear from `share` to `floor`.

    The warm-up is short: it only bridges the steps in which the optimiser's moments are still those of few gradients.
    """
    return min(1.0, (step + 1) / warmup) * (share + (min(floor, share) - share) * progress)


class Optimiser:
    """Muon on parameters with two or more dimensions, AdamW on vectors and on those named in `adam`."""

    def __init__(self, model: nn.Module, adam: tuple[str, ...], muon_lr: float, adam_lr: float, weight_decay: float = 0.05) -> None:
        named = list(model.named_parameters())
        self.matrices = [p for n, p in named if p.ndim >= 2 and not any(k in n for k in adam)]
        chosen = {id(p) for p in self.matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.groups: dict[tuple[int, int], list[int]] = {}
        for i, p in enumerate(self.matrices):
            r, c = sorted(p.shape[-2:])
            self.groups.setdefault((r, c), []).append(i)
        self.lr, self.adam_lr, self.weight_decay = muon_lr, adam_lr, weight_decay
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, fused=rest[0].is_cuda)

    @torch.no_grad()
    def step(self, factor: float, momentum: float = 0.95) -> None:
        """One update with both learning rates times `factor`; gradients must be present."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        for (r, c), members in self.groups.items():
            params: list[Tensor] = [self.matrices[i] for i in members]
            moments = [self.momentum[i] for i in members]
            grads = [p.grad for p in params if p.grad is not None]
            torch._foreach_lerp_(moments, grads, 1 - momentum)
            nesterov = torch._foreach_lerp(grads, moments, momentum)
            flat = torch.cat([(u if u.shape[-2] == r else u.mT).reshape(-1, r, c) for u in nesterov])
            updates = orthogonalise(flat)
            torch._foreach_mul_(params, 1 - self.lr * factor * self.weight_decay)
            at = 0
            for p in params:
                n = p.numel() // (r * c)
                u = updates[at : at + n]
                u = u if p.shape[-2] == r else u.mT
                p.add_(u.reshape(p.shape).to(p.dtype), alpha=-self.lr * factor * 0.2 * math.sqrt(c))
                at += n

    def zero(self) -> None:
        """Forget the gradients."""
        for p in self.matrices:
            p.grad = None
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
