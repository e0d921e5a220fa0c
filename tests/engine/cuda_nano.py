"""An engine of engine/cuda on nano: on a GPU as it is, on a CPU by the kernels' references (`tests.cuda_refs`)."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

from draftwood import plan as plans
from draftwood.config import Options, Plan
from draftwood.engine.cuda.build import build
from draftwood.engine.cuda.stepper import CudaStepper
from draftwood.engine.loop import Engine
from draftwood.llm import _grammars
from draftwood.model.cuda.pack import pack_drafter, pack_target
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from draftwood.spec.bigram import Bigram

GPU = plans.Device("cuda", "a GPU", 8 << 30)


def made_plan(**options) -> tuple[Plan, plans.Checkpoint]:
    """A plan for nano on a GPU."""
    given = {"max_model_len": 640, "max_num_seqs": 4, "device": "cuda", **options}
    asked = Options("nano", **given)
    checkpoint = plans.find(asked)
    return plans.decide(asked, checkpoint, GPU), checkpoint


@cache
def packed():
    """Target and drafter of nano, packed on the CPU once."""
    checkpoint = plans.find(Options("nano"))
    target = load_target(checkpoint.folder, checkpoint.config, Layout(), torch.bfloat16, "cpu")
    drafter = load_drafter(checkpoint.draft_folder, checkpoint.drafter, Layout(), torch.bfloat16, "cpu")
    return pack_target(checkpoint.config, target, "cpu"), pack_drafter(checkpoint.drafter, drafter, "cpu")


def engine(device: str = "cpu", graphs: bool = False, **options) -> Engine:
    """An engine; `options` are fields of Options, or `pages`: how many the cache has."""
    pages = options.pop("pages", None)
    made, checkpoint = made_plan(**options)
    if pages is not None:
        made = dataclasses.replace(made, num_pages=pages)
    beside = checkpoint.draft_folder / "bigram.safetensors"
    bigram = Bigram.load(beside, checkpoint.config.vocab_size) if made.block else None
    folders = (checkpoint.folder, checkpoint.draft_folder)
    parts = build(
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
