"""Loads a rank's weights onto its GPU in the kernels' order and allocates what a Plan says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftwood.config import Options, Plan
from draftwood.engine.cuda.auto import AutoTrees
from draftwood.engine.cuda.graph import CudaParts
from draftwood.engine.cuda.stepper import CudaStepper, short_of_memory
from draftwood.errors import ConfigError
from draftwood.kernels.tree.ref import CAP_STEPS, Table
from draftwood.kernels.tree.ref import Options as GrowOptions
from draftwood.kv.store import DraftStore, LatentStore
from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.model.cuda.drafter import CudaDrafter
from draftwood.model.cuda.dummy import dummy_drafter, dummy_target
from draftwood.model.cuda.keys import Sizes
from draftwood.model.cuda.pack import PackedDrafter, PackedTarget, pack_drafter, pack_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.comm import Comm
from draftwood.parallel.layout import Layout
from draftwood.spec.bigram import Bigram
from draftwood.spec.grammar import Grammars

_BF16 = torch.bfloat16


def start(
    plan: Plan,
    config: ModelConfig,
    drafter: DrafterConfig | None,
    folders: tuple[Path | None, Path | None],
    bigram: Bigram | None,
    comm: Comm,
    grammars: Grammars | None,
) -> tuple[CudaParts, CudaStepper]:
    """Load and allocate on this process's GPU; see `build`. Raises ConfigError for a bad checkpoint, too little memory, and more
    than one rank."""
    if comm.world > 1:
        raise ConfigError(
            f"{comm.world} ranks on --device cuda are not supported yet; leave --tp and --ep at 1, or use --device cpu"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        parts = build(plan, config, drafter, folders, bigram, comm, device, grammars)
        stepper = CudaStepper(parts, plan)
        stepper.calibrate()
        return parts, stepper
    except torch.OutOfMemoryError:
        raise short_of_memory(plan) from None


@torch.inference_mode(False)  # what is written later must be ordinary tensors, whatever mode the caller is in
def build(
    plan: Plan,
    config: ModelConfig,
    drafter: DrafterConfig | None,
    folders: tuple[Path | None, Path | None],
    bigram: Bigram | None,
    comm: Comm,
    device: torch.device,
    grammars: Grammars | None = None,
) -> CudaParts:
    """Load and allocate. folders: of target and drafter, None for random weights. Raises ConfigError for a bad checkpoint."""
    options, drafter = plan.options, drafter if plan.block else None
    layout = Layout(options.tp, options.ep, comm.rank)
    dummy = options.load_format == "dummy"
    packed = _target(config, layout, None if dummy else folders[0], device)
    target = CudaTarget(config, packed, layout, comm, drafter.taps if drafter is not None else (), plan.max_model_len)
    parts = CudaParts(
        target=target,
        kv=LatentStore(config.num_layers, plan.num_pages, plan.page_size, config.latent_width, _BF16, device),
        comm=comm,
        vocab=config.vocab_size,
        stop_ids=config.stop_ids,
        positions=config.max_position,
        grammars=grammars,
        options=GrowOptions(caps=caps(options), spine=options.tree_spine),
        bigram=table(bigram, device) if bigram is not None and drafter is not None else None,
        noise=options.noise,
        synthetic=options.synthetic_accept,
    )
    if drafter is not None:
        own = _drafter(drafter, layout, None if dummy else folders[1], device)
        parts.drafter = CudaDrafter(drafter, own, layout, comm, target, plan.max_model_len)
        parts.draft_kv = _windows(plan, drafter, layout, device)
        if options.tree_budget == "auto":
            parts.auto = AutoTrees(Sizes.of(plan), plan.max_num_seqs, plan.max_model_len, device)
    return parts


def _target(config: ModelConfig, layout: Layout, folder: Path | None, device: torch.device) -> PackedTarget:
    if folder is None:
        return dummy_target(config, layout, device)
    return pack_target(config, load_target(folder, config, layout, _BF16, "cpu"), device)


def _drafter(config: DrafterConfig, layout: Layout, folder: Path | None, device: torch.device) -> PackedDrafter:
    if folder is None:
        return dummy_drafter(config, layout, device)
    return pack_drafter(config, load_drafter(folder, config, layout, _BF16, "cpu"), device)


def _windows(plan: Plan, drafter: DrafterConfig, layout: Layout, device: torch.device) -> DraftStore:
    heads = len(layout.kv_heads(drafter.num_heads, drafter.num_kv_heads))
    kept = (plan.num_pages + 1) * plan.page_size if plan.options.enable_prefix_caching else 0
    return DraftStore(drafter.num_layers, plan.max_num_seqs, plan.window, heads, drafter.head_dim, _BF16, device, slots=kept)


def caps(options: Options) -> tuple[tuple[int, int], ...]:
    """Children of a node as the tree grows."""
    return CAP_STEPS if options.topk_cap is None else ((CAP_STEPS[-1][0], options.topk_cap),)


def table(bigram: Bigram, device: torch.device) -> Table:
    """The previous-token table as the kernels read it."""

    def moved(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(device, dtype)

    return Table(
        moved(torch.from_numpy(bigram.row_ptr), torch.int32), moved(torch.from_numpy(bigram.cols), torch.int32),
        moved(torch.from_numpy(bigram.vals), torch.float32), moved(torch.from_numpy(bigram.base), torch.float32),
    )  # fmt: skip
