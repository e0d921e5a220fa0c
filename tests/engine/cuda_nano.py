"""An engine of engine/cuda on nano: on a GPU as it is, on a CPU by the kernels' references (`tests.cuda_refs`)."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from draftwood import plan as plans
from draftwood.config import Options, Plan
from draftwood.engine.cuda import build as builder
from draftwood.engine.cuda.stepper import CudaStepper
from draftwood.engine.loop import Engine
from draftwood.llm import _grammars
from draftwood.parallel.comm import Local
from draftwood.spec.bigram import Bigram

GPU = plans.Device("cuda", "a GPU", 8 << 30)


def made_plan(**options) -> tuple[Plan, plans.Checkpoint]:
    """A plan for nano on a GPU."""
    given = {"max_model_len": 640, "max_num_seqs": 4, "device": "cuda", **options}
    asked = Options("nano", **given)
    checkpoint = plans.find(asked)
    return plans.decide(asked, checkpoint, GPU), checkpoint


_target, _drafter = cache(builder._target), cache(builder._drafter)
"""Weights of nano in the kernels' order, made once a process: a second, and as much again for what references unpack from them."""


def engine(device: str = "cpu", graphs: bool = False, **options) -> Engine:
    """An engine; `options` are fields of Options, or `pages`: how many the cache has, or `own`: True for weights of its own."""
    pages, own = options.pop("pages", None), options.pop("own", False)
    made, checkpoint = made_plan(**options)
    if pages is not None:
        made = dataclasses.replace(made, num_pages=pages)
    beside = checkpoint.draft_folder / "bigram.safetensors"
    bigram = Bigram.load(beside, checkpoint.config.vocab_size) if made.block else None
    folders = (checkpoint.folder, checkpoint.draft_folder)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu" and not own:
            patch.setattr(builder, "_target", _target)
            patch.setattr(builder, "_drafter", _drafter)
        parts = builder.build(
            made, checkpoint.config, checkpoint.drafter, folders, bigram, Local(), torch.device(device), _grammars(checkpoint)
        )
    return Engine(parts, made, checkpoint.config.stop_ids, CudaStepper(parts, made, graphs))


def decode(some: Engine, requests) -> list[list[int]]:
    """Run (prompt, params) pairs together; tokens in the same order. Pages must come back."""
    ids = [some.add(*request) for request in requests]
    out: dict[int, list[int]] = {i: [] for i in ids}
    while not some.idle:
        for output in some.step():
            out[output.request_id] += output.token_ids
    some.scheduler.recount()
    assert some.scheduler.available == some.plan.num_pages
    return [out[i] for i in ids]
