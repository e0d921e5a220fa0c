"""Packing, checking, choosing and launching `linear`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant
from draftwood.kernels.linear import plan, ref
from draftwood.kernels.linear.plan import Form, Shape

_FOLDER = Path(__file__).parent
_FILES = {
    "linear_stream": "stream.cu", "linear_wide": "wide.cu", "linear_gmma": "gmma.cu", "linear_fed": "fed.cu",
    "linear_arrange": "arrange.cu",
}  # fmt: skip
_NULL = np.uint64(0)


@dataclass(frozen=True)
class Weight:
    """A weight in the kernels' order: data [heads, N/16, steps, 1024] bf16."""

    data: Tensor
    shape: Shape


def pack(weight: Tensor) -> Weight:
    """Pack [N, K], or [heads, N, K] for one product per head. Done once, at load. Raises ValueError for a shape that
    the kernels cannot take."""
    whole = weight if weight.dim() == 3 else weight.unsqueeze(0)
    h, n, k = whole.shape
    _check_weight(n, k)
    return Weight(ref.pack(whole.to(torch.bfloat16)).contiguous(), Shape(n, k, h))


def pack_swiglu(gate: Tensor, up: Tensor) -> Weight:
    """Pack gate and up [I, K] so that the product is silu(gate) * up [n, I]. Raises ValueError as `pack` does."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
    if gate.shape[0] % 8:
        raise ValueError(f"a SwiGLU of {gate.shape[0]} columns cannot be packed: they must be a multiple of 8")
    both = ref.interleave(gate.to(torch.bfloat16), up.to(torch.bfloat16)).unsqueeze(0)
    _check_weight(both.shape[1], both.shape[2])
    return Weight(ref.pack(both).contiguous(), Shape(both.shape[1], both.shape[2], 1, True))


def _check_weight(n: int, k: int) -> None:
    if n % 16 or k % 8 or n < 16 or k < 8:
        raise ValueError(f"a weight of {n} x {k} cannot be packed: outputs must be a multiple of 16 and inputs of 8")


def source(form: Form) -> jit.Source:
    """What is compiled for a form."""
    return jit.Source(_FOLDER / _FILES[form.entry], form.entry, dict(form.macros))


def variants() -> list[Variant]:
    """Everything the launcher chooses for K2.6 and nano on 1, 2, 4 or 8 ranks."""
    found = []
    for machine in dict.fromkeys(plan.MACHINES.values()):
        archs = tuple(a for a in jit.ARCHS if plan.MACHINES[a] == machine)
        spill = 8 if machine == plan.B300 else 0  # in some forms, a register pair; there was no such device to time them on
        forms = {(f.entry, f.macros): f for f in plan.all_forms(machine)}
        special = [_special(plan.stream_form(s, machine), "NORM") for s in plan.normed_shapes()]
        special += [_special(plan.stream_form(s, machine), "GOES_EARLY") for s in plan.early_shapes()]
        forms |= {(f.entry, f.macros): f for f in special}
        found += [Variant(source(f), f.threads, f.shared, spill=spill, archs=archs) for f in forms.values()]
    return found


def _special(form: Form, *macros: str) -> Form:
    """A form of the stream kernel with more of its macros on."""
    return replace(form, macros=tuple(sorted((*form.macros, *((name, 1) for name in macros)))))


@functools.cache
def _kernel(form: Form, device: int) -> jit.Kernel:
    return jit.Kernel(source(form), device, form.shared)


@functools.cache
def _machine_of(device: int) -> plan.Machine:
    return plan.MACHINES[jit.arch_of(torch.cuda.get_device_capability(device))]


def linear(
    x: Tensor,
    weight: Weight,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    form: Form | None = None,
    norm: tuple[Tensor, float] | None = None,
    early: bool = False,
    scratch: Tensor | None = None,
) -> Tensor:
    """Return x @ weight^T on torch's current stream; see ref.py for the meaning.

    x [n, K] bf16, or [n, heads, K] for a weight with heads; the last dimension is contiguous, rows start on 16 bytes.
    out: where the result goes ([n, N] or [n, heads, N], bf16 or float32, last dimension contiguous); made if absent.
    residual: [n, N] bf16 with out's strides, added to the rounded product; may be `out` itself. rows: int32 [1] on the
    device, how many of the n rows are real (the others are not written, and what x holds there does not matter). form: for
    tests and tuning. norm: (weight [K] bf16, eps) of an RMSNorm of x, with the bits of norm_rope's, for up to plan.STREAM_ROWS
    rows. early: up to that many rows let the next kernel fetch its weights before this one has waited (rule (b) of common.cuh).
    scratch: bf16, where many rows of x are put in order first, for at least plan.arranged_values; made if absent.
    Raises ValueError for tensors that do not fit.
    """
    shape = weight.shape
    n = x.shape[0]
    outputs = shape.outputs // 2 if shape.glu else shape.outputs
    wanted = (n, outputs) if shape.heads == 1 and x.dim() == 2 else (n, shape.heads, outputs)
    if out is None:
        out = torch.empty(wanted, dtype=dtype, device=x.device)
    _check(x, shape, out, wanted, residual, rows)
    if n == 0:
        return out
    device = x.device.index
    chosen = plan.form_for(shape, n, _machine_of(device)) if form is None else form
    if (fed := chosen.entry == "linear_fed") and not _stores_lines(out, residual):
        chosen, fed = plan.unfed(shape), False
    streams = chosen.entry == "linear_stream"
    if norm is not None:
        _check_norm(norm[0], shape, streams)
    if streams and (early or norm is not None):
        chosen = _special(chosen, *("GOES_EARLY",) * early, *("NORM",) * (norm is not None))
    kernel = _kernel(chosen, device)
    heads = x.dim() == 3
    tail = (_NULL, np.float32(0)) if norm is None else (norm[0], np.float32(norm[1]))
    given, strides = x, (x.stride(0), x.stride(1) if heads else 0)
    if fed and (tokens := plan.arranged_tokens(chosen, n)):
        given, strides = _arranged(x, shape, tokens, rows, scratch, device), (tokens, 0)
    kernel(
        chosen.grid(shape, n), chosen.threads,
        (weight.data, given, out, _NULL if residual is None else residual, _NULL if rows is None else rows,
         np.int32(n), np.int32(shape.outputs), np.int32(shape.inputs), np.int32(chosen.groups(shape)),
         np.int64(strides[0]), np.int64(strides[1]), np.int64(out.stride(0)),
         np.int64(out.stride(1) if heads else 0), np.int32(out.dtype == torch.float32),
         *(tail if streams else (np.int32(shape.heads), np.int32(plan.segments(shape).bit_length() - 1)) if fed else ())),
        chosen.shared, pdl=True,
    )  # fmt: skip
    return out


def _arranged(x: Tensor, shape: Shape, tokens: int, rows: Tensor | None, scratch: Tensor | None, device: int) -> Tensor:
    """x as the copy engine brings it to where the tensor cores read it (arrange.cu), with room for `tokens`."""
    wanted = shape.heads * shape.steps * tokens * 64
    made = torch.empty(wanted, dtype=torch.bfloat16, device=x.device) if scratch is None else scratch
    if made.dtype != torch.bfloat16 or made.numel() < wanted or not made.is_contiguous() or made.data_ptr() % 16:
        raise ValueError(f"scratch must be {wanted} contiguous bf16 values on 16 bytes; it is {made.dtype} {tuple(made.shape)}")
    form, n, warps = plan.ARRANGE, x.shape[0], plan.arrange_warps(shape)
    blocks = (-(-n * warps // (8 * form.tokens)), -(-shape.inputs * 8 // (warps * form.rows)), shape.heads)
    _kernel(form, device)(
        blocks, form.threads,
        (x, made, _NULL if rows is None else rows, np.int32(n), np.int32(shape.inputs), np.int32(tokens),
         np.int64(x.stride(0)), np.int64(x.stride(1) if x.dim() == 3 else 0), np.int32(warps)),
        0, pdl=True,
    )  # fmt: skip
    return made


def _check(x: Tensor, shape: Shape, out: Tensor, wanted: tuple[int, ...], residual: Tensor | None, rows: Tensor | None) -> None:
    given = tuple(x.shape[1:])
    if given not in ((shape.inputs,), (shape.heads, shape.inputs)) or (x.dim() == 2 and shape.heads != 1):
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {shape.heads} x {shape.outputs} x {shape.inputs}")
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % 8 for s in x.stride()[:-1]):
        raise ValueError(f"x must be bf16 with contiguous rows that start on 16 bytes; it is {x.dtype}, strides {x.stride()}")
    if tuple(out.shape) != wanted or out.stride(-1) != 1 or any(s % 2 for s in out.stride()[:-1]):
        raise ValueError(f"out must be {wanted} with contiguous, even rows; it is {tuple(out.shape)}, strides {out.stride()}")
    if any(t is not None and t.data_ptr() % (2 * t.element_size()) for t in (out, residual)):
        raise ValueError("out and residual must start on the place of a pair of values: pairs are stored at once")
    if out.dtype not in (torch.bfloat16, torch.float32) or (shape.glu and out.dtype != torch.bfloat16):
        raise ValueError(f"out is {out.dtype}; a product is bf16 or float32, a SwiGLU bf16")
    if residual is not None:
        same = residual.shape == out.shape and residual.stride() == out.stride() and residual.dtype == torch.bfloat16
        if not same or out.dtype != torch.bfloat16 or shape.glu:
            raise ValueError("a residual must be bf16 and laid out like a bf16 out; a SwiGLU takes none")
    if rows is not None and (rows.dtype != torch.int32 or rows.numel() != 1):
        raise ValueError(f"rows must be one int32 on the device; it is {rows.dtype} {tuple(rows.shape)}")
    if any(t is not None and t.device != x.device for t in (out, residual, rows)):
        raise ValueError("x, out, residual and rows must be on one device")


def _stores_lines(out: Tensor, residual: Tensor | None) -> bool:
    """Whether 16 bytes of a row of results may be stored at once, as fed forms do."""
    return all(t.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in t.stride()[:-1]) for t in (out, residual) if t is not None)


def _check_norm(weight: Tensor, shape: Shape, streams: bool) -> None:
    if not streams or not plan.norms_itself(shape, 1):
        raise ValueError(
            f"a product norms x itself for up to {plan.STREAM_ROWS} rows, one head and multiples of 64 inputs up to 8192; "
            f"not for {shape}"
        )
    if weight.dtype != torch.bfloat16 or weight.shape != (shape.inputs,) or not weight.is_contiguous() or weight.data_ptr() % 16:
        raise ValueError(f"the norm's weight must be bf16 [{shape.inputs}] on 16 bytes; it is {weight.dtype} {tuple(weight.shape)}")


def bytes_moved(shape: Shape, n: int, out_bytes: int = 2, residual: bool = False) -> int:
    """Bytes that must move: the weight, x and the result once each (and the residual)."""
    outputs = shape.outputs // 2 if shape.glu else shape.outputs
    results = n * shape.heads * outputs * (out_bytes + 2 * residual)
    return shape.heads * (shape.outputs * shape.inputs + n * shape.inputs) * 2 + results


def flops(shape: Shape, n: int) -> int:
    """Multiply-adds count two."""
    return 2 * n * shape.heads * shape.outputs * shape.inputs
