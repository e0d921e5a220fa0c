"""The target as a sequence of kernels: one forward for plain tokens, trees and prompt chunks, over flat nodes of any rows.

Every kernel's result for a node is the same bits whatever else is in the step, so a node's logits are. Nothing here reads the
device or allocates after `bind`: a forward can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear.plan import norms_itself
from draftwood.kernels.mla_attention import op as attention_op
from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.norm_rope import op as norm_op
from draftwood.kernels.tree.ref import Flat
from draftwood.model.config import ModelConfig
from draftwood.model.cuda import work, workspace
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.pack import PackedDense, PackedLayer, PackedMoE, PackedTarget
from draftwood.model.cuda.workspace import Workspace
from draftwood.model.layers import rope_table
from draftwood.parallel.comm import Comm
from draftwood.parallel.layout import Layout


class CudaTarget:
    """A rank's part of the target on its GPU. Its buffers are ordinary tensors, whichever mode of autograd the caller is in."""

    @torch.inference_mode(False)
    def __init__(
        self,
        config: ModelConfig,
        packed: PackedTarget,
        layout: Layout,
        comm: Comm,
        taps: tuple[int, ...] = (),
        positions: int | None = None,
    ) -> None:
        """taps: layers (0-based) whose output is kept for the drafter, in the order it wants them. positions: of the table of
        rotations (all the model knows by default); a position beyond it takes the last. Raises ValueError for a layout that
        does not fit `comm`."""
        if layout.world != comm.world:
            raise ValueError(f"a layout of {layout.world} ranks does not fit {comm.world} connected ranks")
        self.config, self.packed, self.comm, self.taps = config, packed, comm, taps
        self.device = packed.embed.device
        self.sizes = work.Sizes(config, layout, len(taps))
        known = config.max_position if positions is None else min(positions, config.max_position)
        table = rope_table(config.rope, config.qk_rope_head_dim, known, config.rope.amplitude, self.device)
        self.turns = torch.view_as_real(table).contiguous()
        self.work: Workspace | None = None

    @torch.inference_mode(False)
    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """Allocate one workspace for all `buckets`; forwards bound before lose theirs. Raises ConfigError for a bucket that
        no kernel takes."""
        self.work = None  # its memory first
        self.work = workspace.allocate(self.sizes, buckets, self.device)

    def bind(self, bucket: Bucket) -> Forward:
        """Return the forward of a bucket. Forwards share the workspace: results of one last until the next runs. Raises
        ValueError for a bucket beyond what `reserve` made room for."""
        if self.work is None:
            raise ValueError("reserve() comes before bind()")
        return Forward(self, bucket, self.work.at(bucket))


class _Nodes(NamedTuple):
    """The live nodes of a step in buffers of T, and how many there are: total int32 [1], on the device."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    masks: Tensor
    total: Tensor


Pending = Tensor | norm_op.Parts | None
"""What is still to be added to the residual stream."""


class Forward:
    """The target's forward at one bucket."""

    @torch.inference_mode(False)
    def __init__(self, target: CudaTarget, bucket: Bucket, space: Workspace) -> None:
        c, sizes = target.config, target.sizes
        self.target, self.bucket, self.work, self.config = target, bucket, space, c
        self.alone = target.comm.world == 1
        self.attention = attention_op.MlaAttention(
            bucket.rows, bucket.nodes, sizes.heads, bucket.context, c.softmax_scale, target.device,
            latent=c.kv_lora_rank, rope=c.qk_rope_head_dim, tokens=bucket.tokens,
            partial_bytes=work.PARTIALS, scratch=space.attention,
        )  # fmt: skip
        experts = workspace.expert_shape(sizes)
        self.chunks = work.chunks(bucket.tokens, len(sizes.experts))
        self.plans = [moe_op.choose(experts, len(part), c.num_experts) for part in self.chunks] if c.num_moe_layers else []
        self.begins = torch.tensor([part.start for part in self.chunks], dtype=torch.int32, device=target.device)
        self.lives = torch.zeros_like(self.begins)
        self.norms_sum = work.norms_sum(sizes, bucket.tokens)
        self.router = route_op.best_form(len(self.chunks[0]))
        self.routed: Tensor | None = None
        """Set to int32 [MoE layers, T, k] to have runs leave there which experts each live node chose in each layer."""

    def __call__(
        self,
        flat: Flat,
        lengths: Tensor,
        counts: Tensor,
        table: Tensor,
        cache: Tensor,
        verified: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the live nodes of `flat`; write their latents into `cache` at their slots.

        flat: room for at least the bucket's tokens, starts of its rows; lengths [R] committed tokens and counts [R] live nodes
        (0 for an empty row), int32 or int64; table int32 [R, pages]; cache bf16 [layers, slots, latent_width]. verified: (index
        int64 [M] of flat nodes, live int32 [1]) whose logits are wanted; None: all nodes.
        Returns (logits float32 [M or T, V], taps bf16 [T, taps * H]): the residual stream after the chosen layers, without norm.
        Rows of both beyond the live ones are not written.
        """
        b, w, t = self.bucket, self.work, self.bucket.tokens
        nodes = _Nodes(flat.tokens[:t], flat.positions[:t], flat.places[:t], flat.ancestors[:t], flat.total)
        if len(self.chunks) > 1:
            torch.sub(flat.total, self.begins, out=self.lives)
            torch.clamp(self.lives, 0, len(self.chunks[0]), out=self.lives)
        self.attention.plan(lengths, counts, flat.starts[: b.rows])
        pending: Pending = None
        for index, layer in enumerate(self.target.packed.layers):
            self._norm(index, layer.input_norm, pending, nodes)
            self._attend(layer, nodes, cache[index], table)
            delta = None if self.alone else self.target.comm.all_reduce(w.delta)
            norm_op.add_norm(
                w.x, layer.post_norm, self.config.rms_norm_eps, delta=delta, out=w.normed, rows=nodes.total,
                residual=None if delta is None else w.x,
            )  # fmt: skip
            pending = self._mlp(index, layer.mlp, nodes)
        self._norm(len(self.target.packed.layers), self.target.packed.norm, pending, nodes)
        return self._logits(nodes, verified), w.taps

    def _norm(self, index: int, weight: Tensor, pending: Pending, nodes: _Nodes) -> None:
        """Norm the residual stream before layer `index`, having added `pending`; keep it as tap of the layer before."""
        w, eps, taps = self.work, self.config.rms_norm_eps, self.target.taps
        if index == 0:
            norm_op.add_norm(
                self.target.packed.embed, weight, eps, index=nodes.tokens, residual=w.x, out=w.normed, rows=nodes.total
            )
            return
        tap = None
        if index - 1 in taps:
            at, hidden = taps.index(index - 1), self.config.hidden_size
            tap = w.taps[:, at * hidden : (at + 1) * hidden]
        residual = None if pending is None else w.x
        norm_op.add_norm(w.x, weight, eps, delta=pending, residual=residual, tap=tap, out=w.normed, rows=nodes.total)

    def _attend(self, layer: PackedLayer, nodes: _Nodes, cache: Tensor, table: Tensor) -> None:
        """Attention of the normed nodes; its output is added to the residual stream, or on several ranks left in `delta`.

        The nodes' latents are written first and read with the rest, so a node sees what later steps will. That and the rotations
        run beside the absorption of keys, which has waited for all they read.
        """
        w, c, total = self.work, self.config, nodes.total
        linear_op.linear(w.normed, layer.down, w.low, rows=total, scratch=w.ordered)
        low = w.low[:, : c.q_lora_rank]
        if norms_itself(layer.q_b.shape, self.bucket.tokens):
            linear_op.linear(low, layer.q_b, w.q.flatten(1), rows=total, scratch=w.ordered, norm=(layer.q_norm, c.latent_norm_eps))
        else:
            norm_op.add_norm(low, layer.q_norm, c.latent_norm_eps, out=w.q_low, rows=total, early=norm_op.EARLY_QUERY_ROWS)
            linear_op.linear(w.q_low, layer.q_b, w.q.flatten(1), rows=total, scratch=w.ordered)
        plain, rotary = w.q[..., : c.qk_nope_head_dim], w.q[..., c.qk_nope_head_dim :]
        linear_op.linear(plain, layer.absorb_k, w.q_latent, rows=total, scratch=w.ordered)
        norm_op.turn_and_store(
            rotary, w.low[:, c.q_lora_rank :], layer.kv_norm, self.target.turns, nodes.positions, nodes.slots, cache,
            c.latent_norm_eps, rows=total,
        )  # fmt: skip
        self.attention(w.q_latent, rotary, cache, table, nodes.masks, w.seen)
        linear_op.linear(w.seen, layer.absorb_v, w.values, rows=total, scratch=w.ordered, early=True)
        values = w.values.flatten(1)
        if self.alone:
            linear_op.linear(values, layer.o, w.x, residual=w.x, rows=total, scratch=w.ordered)
        else:
            linear_op.linear(values, layer.o, w.delta, rows=total, scratch=w.ordered)

    def _mlp(self, index: int, mlp: PackedDense | PackedMoE, nodes: _Nodes) -> Pending:
        """The MLP of layer `index` on the normed nodes. Returns what is still to be added to the residual stream, None if it has
        been."""
        w, total = self.work, nodes.total
        if isinstance(mlp, PackedMoE):
            self._moe(index, mlp, nodes)
            if self.norms_sum:
                assert w.lists is not None and w.experts is not None
                return norm_op.Parts(w.experts.y, w.lists.weights, w.shared)
        elif self.alone:
            self._dense(mlp, w.x, total, residual=w.x)
            return None
        else:
            self._dense(mlp, w.delta, total)
        return self.target.comm.all_reduce(w.delta)

    def _dense(
        self, mlp: PackedDense, out: Tensor, total: Tensor, residual: Tensor | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """A SwiGLU of the normed nodes. between: launches something between its products."""
        w = self.work
        hidden = w.hidden[:, : mlp.down.shape.inputs]
        linear_op.linear(w.normed, mlp.gate_up, hidden, rows=total, scratch=w.ordered)
        if between is not None:
            between()
        linear_op.linear(hidden, mlp.down, out, residual=residual, rows=total, scratch=w.ordered)

    def _moe(self, index: int, mlp: PackedMoE, nodes: _Nodes) -> None:
        """Routed experts plus the shared one, to `delta`, or if the next norm sums, to `experts.y` and `shared`; the router takes
        so many nodes at a time (`work.chunks`).

        The router or its scores go first: that keeps few multiprocessors busy, and the shared expert's kernel loads weights
        meanwhile. Or, where that is faster, all or the rest runs beside that kernel, which has waited for what both need when
        they may start.
        """
        w = self.work
        assert w.lists is not None and w.experts is not None
        for place, (part, plan) in enumerate(zip(self.chunks, self.plans, strict=True)):
            live = nodes.total if len(self.chunks) == 1 else self.lives[place : place + 1]
            x, shared, out = (t[part.start : part.stop] for t in (w.normed, w.shared, w.delta))
            ahead, beside = route_op.FORMS["parts" if place else self.router]
            router = functools.partial(route_op.route, x, mlp.router, live, w.lists, plan.tile)
            if ahead:
                router(form=ahead)
            if place == 0:
                self._dense(mlp.shared, w.shared, nodes.total, between=functools.partial(router, form=beside) if beside else None)
            if self.routed is not None:
                self.routed[index - self.config.first_k_dense, part.start : part.stop] = w.lists.experts[: len(part)]
            # After the shared expert's second product the lists are older than the kernel before.
            summed = not self.norms_sum
            moe_op.moe_int4(x, mlp.experts, w.lists, live, shared, out, w.experts, plan, early=place == 0, summed=summed)

    def _logits(self, nodes: _Nodes, verified: tuple[Tensor, Tensor] | None) -> Tensor:
        w, packed = self.work, self.target.packed
        if verified is None:
            chosen, logits, live = w.normed, w.logits, nodes.total
            if self.bucket.verified < self.bucket.tokens:
                raise ValueError(f"{self.bucket} has no room for the logits of all nodes")
        else:
            index, live = verified
            chosen, logits = w.chosen[: len(index)], w.logits[: len(index)]
            norm_op.add_norm(w.x, packed.norm, self.config.rms_norm_eps, index=index, out=chosen, rows=live)
        linear_op.linear(chosen, packed.lm_head, logits, rows=live, scratch=w.ordered)
        return self.target.comm.all_gather(logits, -1)
