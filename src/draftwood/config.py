"""Frozen records: Options is what was asked, Plan is what was decided. Neither does anything.

Each field of Options is one command-line flag; its metadata is the flag's help, so that the parser, the
documentation and the check of a value have one source.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwood.errors import ConfigError

MAX_BUDGET = 64
"""Most tree nodes beyond the root; 64 + root fill the two 64-bit words of an ancestor mask."""
MIN_BLOCK, MAX_BLOCK = 4, 16
PAGE_SIZE = 64
STAGES = ("draft", "tree", "verify", "accept", "commit")
DRAFTING = ("tree_budget", "draft_block", "draft_window", "topk_cap", "tree_spine", "noise", "bigram", "draft_rope")
"""Options that nobody would heed where nothing drafts."""


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


def parse_budget(text: str) -> int | str:
    """Return "auto" or the number in `text`. Raises ArgumentTypeError, which argparse reports, for anything else."""
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


@dataclass(frozen=True)
class Options:
    """What the user asked for. Values that no checkpoint could make valid are refused here."""

    model: str = _flag("nano", "folder, hub id, or nano", positional=True)
    draft: str = _flag("auto", "drafter folder or hub id; auto: MODEL/draft if there; none: no drafter")
    tree_budget: int | str = _flag(8, "most tree nodes beyond the root, 0..64, or auto", parse=parse_budget, metavar="N|auto")
    draft_block: int | None = _flag(
        None, "block size of the drafter, 4..16 (default: 8, or the drafter's own if smaller)", parse=int
    )
    draft_window: int = _flag(2048, "context tokens the drafter sees", parse=int)
    topk_cap: int | None = _flag(None, "most children of a node (default: 4, growing with the budget)", parse=int)
    tree_spine: bool = _flag(False, "put the top-1 chain into the tree first")
    noise: str = _flag(
        "shared",
        "noise of the drafter at temperature > 0: the target's own, or none",
        choices=("shared", "own", "none"),
    )
    bigram: str = _flag("auto", "previous-token table: auto (beside the drafter), none, or a file")
    draft_rope: str = _flag(
        "auto", "YaRN amplitude of the drafter: auto (per checkpoint), 1, or mscale", choices=("auto", "1", "mscale")
    )
    tp: int = _flag(1, "ranks that slice each expert", parse=int)
    ep: int = _flag(1, "groups of ranks that hold whole experts", parse=int)
    dtype: str = _flag("auto", "type of weights and activations", choices=("auto", "float32", "bfloat16"))
    device: str = _flag("auto", "where to run", choices=("auto", "cpu", "cuda"))
    load_format: str = _flag("auto", "dummy: random weights from config.json alone", choices=("auto", "dummy"))
    routed_experts: int | None = _flag(None, "with random weights: so many routed experts a layer", parse=int)
    layers: int | None = _flag(None, "with random weights: so many layers", parse=int)
    synthetic_accept: float | None = _flag(
        None,
        "pretend that a step of a row returns this many tokens on average, 1..16, for measuring: the text means nothing (cuda)",
        parse=float,
    )
    max_model_len: int | None = _flag(
        None, "most tokens of prompt and answer (default: what the model allows and memory holds)", parse=int
    )
    max_num_seqs: int | None = _flag(None, "most requests that run together (default: 8 on a CPU, else 128)", parse=int)
    max_num_batched_tokens: int = _flag(512, "most prompt tokens in a step", parse=int)
    enable_prefix_caching: bool = _flag(
        False, "keep full pages of finished texts for prompts that begin alike (default: on for serve and chat)", pair=True
    )

    def __post_init__(self) -> None:
        self._between("tree-budget", self.tree_budget, 0, MAX_BUDGET, skip="auto")
        self._between("draft-block", self.draft_block, MIN_BLOCK, MAX_BLOCK, skip=None)
        self._between("topk-cap", self.topk_cap, 1, MAX_BUDGET, skip=None)
        self._between("draft-window", self.draft_window, 16, 1 << 20)
        self._between("tp", self.tp, 1, 64)
        self._between("ep", self.ep, 1, 64)
        self._between("max-model-len", self.max_model_len, 2, 1 << 22, skip=None)
        self._between("max-num-seqs", self.max_num_seqs, 1, 1024, skip=None)
        accept = self.synthetic_accept
        if accept is not None and (not isinstance(accept, int | float) or not 1 <= accept <= MAX_BLOCK):
            raise ConfigError(f"--synthetic-accept {accept} is outside 1..{MAX_BLOCK}; choose a number in that range")
        self._between("max-num-batched-tokens", self.max_num_batched_tokens, PAGE_SIZE, 1 << 16)
        for f in dataclasses.fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ConfigError(f"--{f.name.replace('_', '-')} {getattr(self, f.name)!r} is not one of {', '.join(choices)}")

    @staticmethod
    def _between(flag: str, value: Any, low: int, high: int, skip: Any = ...) -> None:
        if value == skip:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"--{flag} {value} is outside {low}..{high}; choose a value in that range")


def add_options(parser: argparse.ArgumentParser, only: tuple[str, ...] | None = None) -> None:
    """Add the flags of Options (all, or the named fields) to a command's parser."""
    group = parser.add_argument_group("engine")
    for f in dataclasses.fields(Options):
        if only is not None and f.name not in only:
            continue
        meta = dict(f.metadata)
        shown = "" if f.default is None or "(default" in meta["help"] else f" (default {f.default})"
        help = meta["help"] + shown
        if meta.get("positional"):
            parser.add_argument(f.name, nargs="?", default=f.default, help=help)
        elif f.default is False:
            action = argparse.BooleanOptionalAction if meta.get("pair") else "store_true"
            group.add_argument(f"--{f.name.replace('_', '-')}", action=action, default=False, help=help)
        else:
            extra = {k: meta[k] for k in ("choices", "metavar") if k in meta}
            # None says that the flag was not given, also where its own default was.
            group.add_argument(f"--{f.name.replace('_', '-')}", type=meta.get("parse", str), default=None, help=help, **extra)


def options_from(args: argparse.Namespace) -> Options:
    """Build Options from parsed flags; fields the command did not offer and flags that were not given keep their defaults.

    Raises ConfigError for flags of a drafter beside `--draft none`, too.
    """
    names = {f.name for f in dataclasses.fields(Options)}
    given = {k: v for k, v in vars(args).items() if k in names and v is not None}
    if given.get("draft") == "none":
        refuse_drafting(given, "with --draft none")
    return Options(**given)


def refuse_drafting(given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for the first option among `given` that only a drafter could heed. A tree budget of 0 is none."""
    for name in DRAFTING:
        if value := given.get(name):
            flag = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise ConfigError(f"{flag} has no effect {where}; leave it out, or give a drafter with --draft")


@dataclass(frozen=True)
class Plan:
    """What was decided. The engine allocates exactly what stands here.

    Sizes are in tokens or nodes, `memory` in bytes per rank, times in seconds.
    """

    options: Options
    model_path: str
    draft_path: str | None
    device: str
    dtype: str
    world: int
    max_model_len: int
    max_num_seqs: int
    prefill_chunk: int
    page_size: int
    num_pages: int
    block: int
    """Block size of the drafter; depth of a tree is block - 1. 0 without a drafter."""
    window: int
    max_budget: int
    """Largest tree of a row beyond its root; scratch slots of a row are max_budget + 1."""
    memory: tuple[tuple[str, int], ...] = ()
    step_bytes: tuple[tuple[str, int], ...] = ()
    bandwidth: float | None = None
    step_seconds: float | None = None
    notes: tuple[str, ...] = ()
