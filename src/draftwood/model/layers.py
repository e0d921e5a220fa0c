"""What every layer is made of: normalisation, rotary positions, matrix products, the SwiGLU MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.model.config import RopeConfig
from draftwood.model.packed import Product, packed, rounded
from draftwood.model.weights import DenseWeights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    The result is rounded to x's type before it is multiplied, as Hugging Face's modules do. x [..., n], weight [n] or
    anything that broadcasts over it.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


class Norm:
    """`rms_norm` with its constants ready."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        n = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._gain = weight * math.sqrt(n)
        self._floor = torch.tensor(math.sqrt(n * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n] -> the same shape. In float32 as x / hypot(|x|, sqrt(n eps)) * (weight sqrt(n)): the same value in
        four calls instead of seven, and small steps cost by the call (measured: 5 against 12 microseconds)."""
        if x.dtype != torch.float32:
            return rms_norm(x, self.weight, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / length.hypot_(self._floor)).mul_(self._gain)


# ------------------------------------------------------------------------------------------------------------ positions


def rope_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Return the `dim / 2` angles per position, float32, YaRN-scaled (arXiv 2309.00071 section 3.2).

    The correction range is DeepSeek's: floor and ceiling of the dimensions that turn beta_fast and beta_slow times in
    the original context. Arithmetic is float32 in the order of Hugging Face's `_compute_yarn_parameters`, so that long
    positions round to the same angles.
    """
    inverse = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.factor <= 1:
        return inverse

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    stretched = 1.0 / (rope.factor * rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    return stretched * (1 - kept) + inverse * kept


def rope_table(rope: RopeConfig, dim: int, positions: int, amplitude: float, device: torch.device | str) -> Tensor:
    """Return amplitude * exp(i * angle) for positions 0 .. positions - 1: complex64 [positions, dim / 2].

    A table, not a formula per step: a position's rotation is bitwise the same wherever its row stands.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rope_frequencies(rope, dim)
    return torch.polar(torch.full_like(angles, amplitude), angles).to(device)


def rotate_pairs_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate in place the pairs (2i, 2i + 1) of the last dimension of x by `turns`, and return x.

    x [..., d] with even strides, turns complex64 [..., d / 2] broadcast over it. The target stores its rotary
    dimensions this way; queries and keys both stay so, which leaves their products what they were.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    if x.dtype == torch.float32:
        pairs.mul_(turns)  # x.float() was x itself
        return x
    return x.copy_(torch.view_as_real(pairs * turns).flatten(-2))


def rotate_half(x: Tensor, turns: Tensor) -> Tensor:
    """Return x with (i, i + d/2) of the last dimension rotated by `turns`: the drafter's layout ("neox").

    x [..., d], turns complex64 [..., d / 2] broadcast over it.
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * turns.real - b * turns.imag, b * turns.real + a * turns.imag), -1).to(x.dtype)


def halves_to_pairs(weight: Tensor, dim: int) -> Tensor:
    """Reorder rows of a projection [heads * dim, ...] so that `rotate_pairs_` does what `rotate_half` did before.

    Done once to queries and keys alike, attention logits stay what they were and each rotation is one product.
    """
    heads = weight.view(-1, 2, dim // 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


# ------------------------------------------------------------------------------------------------------------- products


class Linear:
    """x -> x @ weight.T for a constant weight [out, in], kept in the form that is fastest where it is (`packed`)."""

    def __init__(self, weight: Tensor, product: Product | None = None) -> None:
        """`product`: another way to multiply by `weight` than the fastest exact one."""
        self.out_features, self.in_features = weight.shape
        self._apply = product or packed(weight) or functools.partial(F.linear, weight=weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._apply(x)


def linear(weight: Tensor | Linear) -> Linear:
    """Return `weight` as a Linear; one that is a Linear already is shared, not copied."""
    return weight if isinstance(weight, Linear) else Linear(weight)


def guesses(weight: Tensor, exact: Linear | None = None) -> Linear:
    """Return a faster and coarser Linear for what is verified anyway; where there is none, `exact` or one that is exact."""
    product = rounded(weight)
    return exact if product is None and exact is not None else Linear(weight, product)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., gate | up]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


class Dense:
    """A SwiGLU MLP, or this rank's columns of one: its output is then a partial sum."""

    def __init__(self, weights: DenseWeights, first: Callable[[Tensor], Linear] = Linear) -> None:
        """`first`: what gate and up are multiplied by."""
        self.gate_up = first(torch.cat((weights.gate, weights.up)))
        self.down = Linear(weights.down)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.down(swiglu(self.gate_up(x)))
