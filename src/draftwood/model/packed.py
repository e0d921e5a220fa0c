"""Products with a constant float32 matrix on a CPU, from a packed copy of it.

Weights of a K2 checkpoint are bfloat16, or INT4 codes times bfloat16 scales: 8 or 11 significant bits. float16 holds
them exactly once the matrix is multiplied by a power of two, and FBGEMM multiplies float32 activations by float16
weights in float32 throughout: half the bytes to read, and a row's result does not depend on the rows beside it. On
processors without AVX-512 it depends on their number, though: there rows are added until it does not (`steady`).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
SHARED_FROM = 1 << 18
"""Elements from which a matrix is multiplied by all threads. The operator that shares work costs 12 microseconds a
call, the other one 2; measured on two AVX-512 cores with 256 x 384 weights they take 15 and 6 microseconds for one row,
21 and 19 for 9, 33 and 38 for 17. And a thread that waits for nobody is not stopped by what else the machine does."""
BLOCK = 120
"""Rows that FBGEMM cuts anew from."""


def packed(weight: Tensor) -> Product | None:
    """Return x [..., in] -> x @ weight.T for weight [out, in], or None where the matrix is best left as it is."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    shift = half_shift(weight)
    if shift is not None and _fbgemm():
        return _half(weight, shift)
    if weight.numel() >= SHARED_FROM and _onednn():
        return _blocked(weight)
    return None


def rounded(weight: Tensor) -> Product | None:
    """Return a product for guesses: weights in 8 bits with a scale for each output, activations in 7 bits; else None.

    About 2 % off and three times as fast as float16 (8192 x 384 weights, 7 rows, two cores: 86 and 253 microseconds).
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _fbgemm():
        return None
    scale = (weight.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny).double()
    shared = torch.ops.quantized.linear_prepack(_in_8_bits(weight, scale), None)
    apply = torch.ops.quantized.linear_dynamic.default
    return lambda x: apply(x, shared, True)  # True: 7 bits, which cannot overflow on any processor


def _in_8_bits(weight: Tensor, scale: Tensor) -> Tensor:
    zero = torch.zeros(len(weight), dtype=torch.long)
    return torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)


def half_shift(weight: Tensor) -> int | None:
    """Return an n for which float16 holds weight * 2^n exactly, 0 if it can be; None when there is none."""
    top = float(weight.abs().max()) if weight.numel() else 0.0
    if not math.isfinite(top):
        return None
    # Up to the largest power of two that float16 can hold: small weights then keep all their bits.
    for shift in (0, 16 - math.frexp(top)[1]):
        scaled = weight * 2.0**shift
        if torch.equal(scaled.half().float(), scaled):
            return shift
    return None


def _half(weight: Tensor, shift: int) -> Product:
    """Products by float16 weights, undone of their power of two, which rounds nothing."""
    # A tensor, not a number: torch would make one of it and convert it, at every call.
    scaled, back = (weight * 2.0**shift).contiguous(), torch.tensor(2.0**-shift)
    if weight.numel() >= SHARED_FROM:
        shared = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        apply = torch.ops.quantized.linear_dynamic_fp16.default
        return steady((lambda x: apply(x, shared)) if shift == 0 else lambda x: apply(x, shared).mul_(back))
    own = torch.fbgemm_pack_gemm_matrix_fp16(scaled)
    multiply = torch.fbgemm_linear_fp16_weight_fp32_activation
    return steady((lambda x: multiply(x, own, None)) if shift == 0 else lambda x: multiply(x, own, None).mul_(back))


def steady(product: Product) -> Product:
    """Return the product with as many rows more as its bits need to be those of the same row among others."""
    more = _more_rows()
    if not any(more):
        return product

    def padded(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        lacking = more[rows % len(more)]
        if not lacking:
            return product(x)
        found = product(torch.constant_pad_nd(x.reshape(rows, -1), (0, 0, 0, lacking)))[:rows]
        return found.view(*x.shape[:-1], -1)

    return padded


@functools.cache
def _more_rows() -> tuple[int, ...]:
    """Return how many rows to add to n rows, by n modulo the 120 that FBGEMM takes at once.

    It cuts rows into blocks of up to 6 (AVX2) or 14 (AVX-512). On AVX2 blocks of one and two rows are summed in another order: the
    last rows of 1, 2, 7 (5 and 2), 14, 31, 32, 37, 38 .. had other bits than among more. Found by trying, so that
    another processor or version is right too.
    """
    made = torch.Generator().manual_seed(1)
    weight, x = torch.randn(64, 384, generator=made).half().float(), torch.randn(BLOCK, 384, generator=made)
    own = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    multiply = torch.fbgemm_linear_fp16_weight_fp32_activation
    usual = multiply(x, own, None)
    good = [torch.equal(multiply(x[:n], own, None), usual[:n]) for n in range(1, BLOCK + 1)]
    return (0, *(good[n:].index(True) for n in range(BLOCK - 1)))


def _blocked(weight: Tensor) -> Product:
    """oneDNN's blocked order: 1.5 to 2 times as fast as plain order for 8 to 65 rows, and equal for one."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    apply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: apply(x, blocked, None, "none", [], "")


@functools.cache
def _fbgemm() -> bool:
    """Say whether this build of torch and this processor have FBGEMM's float16 products, and take them without a bias."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    if not hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
        return False
    with warnings.catch_warnings():
        # Each says once that a later torch will not have it; this package's range of versions does.
        warnings.simplefilter("ignore")
        _in_8_bits(torch.ones(1, 1), torch.ones(1, dtype=torch.double))
        own = torch.fbgemm_pack_gemm_matrix_fp16(torch.full((1, 1), 0.5))
        try:
            out = torch.fbgemm_linear_fp16_weight_fp32_activation(torch.full((1, 1), 3.0), own, None)
        except (TypeError, RuntimeError):  # a torch whose operator wants a bias
            return False
    return bool(out == 1.5)


def _onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
