"""Options, checkpoint and device -> Plan. What stands in the Plan is what the engine allocates. No torch.

`find` looks for the checkpoint and reads its configs; `decide` does the arithmetic. Nothing is loaded here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from draftwood import nano
from draftwood.config import MAX_BLOCK, MAX_BUDGET, MIN_BLOCK, PAGE_SIZE, Options, Plan, refuse_drafting
from draftwood.errors import ConfigError
from draftwood.model import costs
from draftwood.model.config import (
    BUILTIN,
    DrafterConfig,
    ModelConfig,
    check_pair,
    read_drafter_config,
    read_model_config,
    resized,
)
from draftwood.model.cuda import keys, work
from draftwood.model.cuda.keys import Sizes
from draftwood.parallel.layout import Layout, check_layout

DEFAULT_BLOCK = 8
ROWS, CPU_ROWS = 128, 8
"""Requests that run together on a GPU and on a CPU unless --max-num-seqs says otherwise: on a CPU memory for more is
cleared at every start (4 s for 128 rows of nano) and two cores gain nothing from it."""
LEAST_CONTEXT = 256
"""A default context is never cut below this many tokens to fit memory; the plan is refused instead."""
SHOWN_CONTEXT = 4096
"""Context of the step whose bytes and time a Plan states."""
NOT_LOADED = "tree budget 0: the drafter is not loaded"
ITEMSIZE = {"float32": 4, "bfloat16": 2}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG_FILES = ["*.json", "draft/*.json"]
_ALL_FILES = [*_CONFIG_FILES, "*.safetensors", "draft/*.safetensors", "tiktoken.model", "*.jinja"]


@dataclass(frozen=True)
class Device:
    """What one rank runs on: `memory` in bytes it may fill, `bandwidth` in bytes per second (None: not known)."""

    kind: str
    name: str
    memory: int
    bandwidth: float | None = None


_READ_SHARE = 0.93
"""Pure reads reach this share of the specified bandwidth (measured on an H200: 4.48 of 4.8 TB/s)."""
USED_SHARE = 0.92
"""Of a GPU's memory; the rest is the context's, the allocator's and NCCL's."""


def _gpu(name: str, gigabytes: float, terabytes_per_second: float) -> Device:
    return Device("cuda", name, int(gigabytes * 1e9 * USED_SHARE), terabytes_per_second * 1e12 * _READ_SHARE)


HARDWARE: dict[str, Device] = {
    "rtx-pro-6000": _gpu("NVIDIA RTX PRO 6000 Blackwell", 102.6, 1.792),
    "h200": _gpu("NVIDIA H200", 150.7, 4.8),
    "b300": _gpu("NVIDIA B300", 288.0, 8.0),
}
"""Devices that can be planned for without having them: vendors' memory and bandwidth."""


MOST_BATCHED = 8192
"""Most prompt tokens of a step on a GPU: its pieces and 128 rows are what the attention kernels take."""


def arch_of(name: str) -> str:
    """Return the architecture of a CUDA device by its name, Hopper's for one not in HARDWARE."""
    return "sm_120a" if "RTX PRO 6000" in name else "sm_103a" if "B300" in name else "sm_90a"


def bandwidth_of(name: str) -> float | None:
    """Return the readable bytes per second of a CUDA device by its name, None for one not in HARDWARE."""
    words = {"rtx-pro-6000": "RTX PRO 6000", "h200": "H200", "b300": "B300"}
    return next((HARDWARE[key].bandwidth for key, word in words.items() if word in name), None)


# ------------------------------------------------------------------------------------------------------ the checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A target and its drafter as their configs describe them. `folder` is None for a built-in shape."""

    name: str
    folder: Path | None
    config: ModelConfig
    draft_folder: Path | None
    drafter: DrafterConfig | None
    notes: tuple[str, ...] = ()


def find(options: Options, weights: bool = True) -> Checkpoint:
    """Locate MODEL and its drafter and read their configs; hub ids are downloaded (configs only without `weights`).

    Raises ConfigError, one line, for what is not there, cannot be read or cannot be run.
    """
    if options.model in BUILTIN and not Path(options.model).is_dir():
        return _resized(options, _builtin(options, weights))
    folder = locate(options.model, weights)
    config = read_model_config(folder)
    draft_folder, notes = _locate_drafter(options, folder, weights)
    drafter = read_drafter_config(draft_folder, options.draft_rope) if draft_folder else None
    return _resized(options, Checkpoint(options.model, folder, config, draft_folder, drafter, notes))


def _resized(options: Options, found: Checkpoint) -> Checkpoint:
    """The checkpoint with as many experts and layers as asked for. Raises ConfigError for weights that have a shape already."""
    asked = {"--routed-experts": options.routed_experts, "--layers": options.layers}
    given = {flag: n for flag, n in asked.items() if n is not None}
    if not given:
        return found
    if options.load_format != "dummy" and found.folder is not None:
        flag, n = next(iter(given.items()))
        raise ConfigError(f"{flag} {n} changes the model's shape, which needs random weights: add --load-format dummy")
    config, drafter = resized(found.config, found.drafter, options.routed_experts, options.layers)
    was, now = found.config, config
    note = (
        f"shape changed: {now.num_layers} layers of {was.num_layers}, {now.num_experts} routed experts a layer of {was.num_experts}"
    )
    return replace(found, config=config, drafter=drafter, notes=(*found.notes, note))


def _builtin(options: Options, weights: bool) -> Checkpoint:
    if weights and options.load_format != "dummy":
        raise ConfigError(f"{options.model} is a shape without weights; add --load-format dummy for random ones, or give a folder")
    target, draft = BUILTIN[options.model]
    folder, drafter = None, None
    if options.draft == "auto":
        drafter = read_drafter_config(draft, options.draft_rope)
    elif options.draft != "none":
        folder = locate(options.draft, weights)
        drafter = read_drafter_config(folder, options.draft_rope)
    return Checkpoint(options.model, None, read_model_config(target), folder, drafter)


def _locate_drafter(options: Options, folder: Path, weights: bool) -> tuple[Path | None, tuple[str, ...]]:
    """Return (the drafter's folder or None, what the user should know about that)."""
    if options.draft == "none":
        return None, ()
    if options.draft != "auto":
        return locate(options.draft, weights), ()
    beside = folder / "draft"
    if _is_folder(beside):
        return beside, ()
    return None, (f"no drafter in {beside}: plain decoding; give one with --draft",)


def locate(name: str, weights: bool = True) -> Path:
    """Return the folder of a model: `nano`, a folder, or a hub id, which is downloaded or found in the hub's cache.

    Raises ConfigError for none of these, and when the hub cannot be reached.
    """
    if name == "nano":  # first: what the default model is must not depend on the working folder
        if not (nano.path() / "config.json").exists():
            raise ConfigError(f"the bundled model is missing from {nano.path()}; install draftwood again")
        return nano.path()
    path = Path(name).expanduser()
    if _is_folder(path):
        return path
    if path.exists():
        raise ConfigError(f"{name} is a file; give the checkpoint's folder")
    if not _HUB_ID.fullmatch(name):
        known = ", ".join(["nano", *BUILTIN])
        raise ConfigError(f"{name} is no folder, no hub id (owner/name) and not one of {known}; check the path")
    return _download(name, weights)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def _download(name: str, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # What the hub's HTTP client raises when a download breaks off; before huggingface_hub 1 it was an OSError.
    broken: type[Exception] = getattr(errors, "HTTPError", OSError)

    try:
        return Path(snapshot_download(name, allow_patterns=_ALL_FILES if weights else _CONFIG_FILES))
    except LocalEntryNotFoundError:
        raise ConfigError(f"{name} is not in the hub's cache and the hub cannot be reached; go online, or give a folder") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        why = {401: "needs a login (hf auth login), or does not exist", 403: "is gated: ask for access on its page"}
        reason = why.get(status or 0, "was not found" if status == 404 else f"failed (HTTP {status})")
        raise ConfigError(f"hub id {name} {reason}; a folder works too") from None
    except (OSError, ValueError, broken) as error:
        raise ConfigError(f"hub id {name} could not be downloaded: {' '.join(str(error).split())[:200]}") from None


# ------------------------------------------------------------------------------------------------------------ the plan


def decide(options: Options, checkpoint: Checkpoint, device: Device, strict: bool = True) -> Plan:
    """Decide what the engine allocates on each rank. Raises ConfigError for options that fit no allocation; with
    `strict` off, too little memory becomes a note and the plan is for what would be needed."""
    return _Planner(options, checkpoint, device, strict).plan()


class _Planner:
    """One decision; the steps share these numbers."""

    def __init__(self, options: Options, checkpoint: Checkpoint, device: Device, strict: bool) -> None:
        self.options, self.checkpoint, self.device, self.strict = options, checkpoint, device, strict
        self.config = checkpoint.config
        self.notes = list(checkpoint.notes)
        self.world = options.tp * options.ep
        self.dtype = options.dtype if options.dtype != "auto" else "float32" if device.kind == "cpu" else "bfloat16"
        self.itemsize = ITEMSIZE[self.dtype]

    def plan(self) -> Plan:
        """Return the whole decision."""
        options = self.options
        if self.device.kind == "cuda":
            self._check_cuda()
        elif options.synthetic_accept is not None:
            raise ConfigError(f"--synthetic-accept {options.synthetic_accept:g} needs --device cuda")
        drafter = self._drafter()
        check_layout(self.config, drafter, options.tp, options.ep)
        block = self._block(drafter)
        budget = self._max_budget(drafter)
        context = self._context(drafter)
        window = min(options.draft_window, context)
        self.chunk = self._chunk(drafter, window)
        rows, fixed = self._rows(drafter, block, window, budget, context)
        per_page = self._per_page(drafter)
        pages, context = self._pages(rows, context, budget, fixed, costs.total(per_page))
        fixed = self._fixed(drafter, block, window, budget, rows, context)
        step = self._step(drafter, block, window, budget, context)
        bandwidth = self.device.bandwidth
        return Plan(
            options=options,
            model_path=str(self.checkpoint.folder or self.checkpoint.name),
            draft_path=str(self.checkpoint.draft_folder or self.checkpoint.name) if drafter else None,
            device=self.device.kind,
            dtype=self.dtype,
            world=self.world,
            max_model_len=context,
            max_num_seqs=rows,
            prefill_chunk=self.chunk,
            page_size=PAGE_SIZE,
            num_pages=pages,
            block=block,
            window=window if drafter else 0,
            max_budget=budget,
            # One page more than the pool's: padding is written there.
            memory=(*fixed, *((name, (pages + 1) * size) for name, size in per_page)),
            step_bytes=step,
            bandwidth=bandwidth,
            step_seconds=costs.total(step) / bandwidth if bandwidth else None,
            notes=tuple(self.notes),
        )

    def _drafter(self) -> DrafterConfig | None:
        """The drafter to load: none where no tree will ever have a node beyond its root. Checked against the target
        even then."""
        drafter, options = self.checkpoint.drafter, self.options
        if drafter is None:
            asked = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
            refuse_drafting(asked, "without a drafter")
            return None
        check_pair(self.config, drafter, options.draft_block)
        if options.tree_budget == 0:
            self.notes.append(NOT_LOADED)
            return None
        return drafter

    def _block(self, drafter: DrafterConfig | None) -> int:
        if drafter is None:
            return 0
        if drafter.block_size < MIN_BLOCK:
            raise ConfigError(
                f"the drafter was trained for blocks of {drafter.block_size}, this engine runs {MIN_BLOCK}..{MAX_BLOCK}; "
                "give another one or --draft none"
            )
        block = self.options.draft_block or min(DEFAULT_BLOCK, drafter.block_size)
        self._note_small_trees(block)
        return block

    def _note_small_trees(self, block: int) -> None:
        """Say when a top-k cap and a block make every tree smaller than its budget."""
        cap, budget = self.options.topk_cap, self.options.tree_budget
        most = sum(cap**depth for depth in range(1, block)) if cap else MAX_BUDGET
        if isinstance(budget, int) and most < budget:
            self.notes.append(f"--topk-cap {cap} and block {block} give trees of at most {most} nodes, not {budget}")

    def _max_budget(self, drafter: DrafterConfig | None) -> int:
        asked = self.options.tree_budget
        if drafter is None:
            return 0
        return MAX_BUDGET if isinstance(asked, str) else asked

    def _context(self, drafter: DrafterConfig | None) -> int:
        """The context asked for, else all positions that target and drafter both know."""
        asked, most = self.options.max_model_len, self.config.max_position
        if asked is not None and asked > most:
            raise ConfigError(f"--max-model-len {asked} is above the {most} positions of this model; ask for less")
        if drafter is None or drafter.max_position >= (asked or most):
            return asked or most
        known = drafter.max_position
        if asked is not None:
            fault = f"--max-model-len {asked} is above the {known} positions of the drafter"
            raise ConfigError(f"{fault}; ask for less, or --draft none")
        self.notes.append(f"the drafter knows {known} positions: that is the context, of the model's {most}")
        return known

    def _check_cuda(self) -> None:
        """Refuse what the kernels do not run."""
        options, rows = self.options, self._asked_rows()
        if self.dtype != "bfloat16":
            raise ConfigError(
                f"--dtype {self.dtype} is not what the CUDA kernels compute in; leave it at auto, or use --device cpu"
            )
        if rows > keys.ROWS[-1]:
            raise ConfigError(
                f"--max-num-seqs {rows} is above the {keys.ROWS[-1]} requests that run together on a GPU; ask for less"
            )
        tokens, mean = options.max_num_batched_tokens, options.synthetic_accept
        if tokens > MOST_BATCHED:
            raise ConfigError(f"--max-num-batched-tokens {tokens} is above the {MOST_BATCHED} of a step on a GPU; ask for less")
        if mean is not None:
            self.notes.append(f"synthetic acceptance of {mean:g} tokens a step, whatever the target says: the text means nothing")

    def _chunk(self, drafter: DrafterConfig | None, window: int) -> int:
        """Most prompt tokens of a step. On a GPU the drafter's window takes them all at once."""
        chunk = self.options.max_num_batched_tokens // PAGE_SIZE * PAGE_SIZE
        if self.device.kind != "cuda" or drafter is None or window >= chunk:
            return chunk
        if window < PAGE_SIZE:
            raise ConfigError(f"a draft window of {window} tokens is below the {PAGE_SIZE} that a GPU fills at once; ask for more")
        self.notes.append(f"prompts in chunks of {window // PAGE_SIZE * PAGE_SIZE} tokens: what the draft window holds")
        return window // PAGE_SIZE * PAGE_SIZE

    def _fixed_cuda(
        self, drafter: DrafterConfig | None, block: int, window: int, budget: int, rows: int, context: int
    ) -> costs.Table:
        """The same on a GPU, where it is what the engine allocates; `graphs` is an estimate of what the driver keeps."""
        layout, config = Layout(self.options.tp, self.options.ep, 0), self.config
        sizes, arch = Sizes.make(context, rows, block, budget, self.chunk), arch_of(self.device.name)
        taps = 0 if drafter is None else len(drafter.taps)
        target = work.Sizes(config, layout, taps)
        buckets = sizes.buckets()
        parts = [("target weights", costs.total(work.target_bytes(config, layout, context)))]
        space, own, kept = costs.total(work.workspace_bytes(target, buckets, arch)), None, 0
        if drafter is not None:
            parts.append(("drafter weights", costs.total(work.drafter_bytes(drafter, layout, context))))
            per_token = costs.drafter_kv_bytes_per_token(drafter, self.itemsize, layout)
            parts.append(("draft windows", rows * window * per_token))
            own = work.DraftSizes(drafter, layout, target.vocab)
            space += costs.total(work.draft_workspace_bytes(own, sizes.all_draft_buckets(window), arch))
            kept = per_token // 2 if self.options.enable_prefix_caching else 0
        parts.append(("workspace", space))
        parts += keys.step_memory(sizes, rows, config.vocab_size, kept)
        # A built-in shape has no words, so no grammars either.
        masks = self.checkpoint.folder is not None
        parts.append(("graphs", keys.graph_bytes(sizes, target, own, window, masks, kept > 0, arch)))
        return tuple(parts)

    def _fixed(self, drafter: DrafterConfig | None, block: int, window: int, budget: int, rows: int, context: int) -> costs.Table:
        """Bytes of a rank that do not grow with the pages."""
        if self.device.kind == "cuda":
            return self._fixed_cuda(drafter, block, window, budget, rows, context)
        layout = Layout(self.options.tp, self.options.ep, 0)
        target = dict(costs.weight_bytes(self.config, layout, self.itemsize))
        target["experts"] = costs.expanded_expert_bytes(self.config, layout, self.itemsize)
        parts = [("target weights", sum(target.values()))]
        vocab = self.config.vocab_size * 4
        logits = rows * (budget + 1) * vocab
        if drafter is not None:
            parts.append(("drafter weights", costs.total(costs.drafter_weight_bytes(drafter, layout, self.itemsize))))
            per_token = costs.drafter_kv_bytes_per_token(drafter, self.itemsize, layout)
            parts.append(("draft windows", rows * window * per_token))
            # Logits and noise of each depth, both in float32.
            logits += 2 * rows * (block - 1) * vocab
        # An estimate: the logits of a step, and hidden states of its widest layer.
        nodes = max(rows * (budget + 1), self.options.max_num_batched_tokens)
        wide = self.config.hidden_size * 4 + self.config.intermediate_size * 2 + self.config.num_heads * self.config.qk_head_dim
        parts.append(("workspace", logits + nodes * wide * self.itemsize))
        return tuple(parts)

    def _rows(self, drafter: DrafterConfig | None, block: int, window: int, budget: int, context: int) -> tuple[int, costs.Table]:
        """Return (rows, fixed bytes): as many rows as asked, halved until they leave a fifth of the free memory for
        pages. Refuses weights that do not fit."""
        asked = rows = self._asked_rows()
        memory = self.device.memory
        while True:
            fixed = self._fixed(drafter, block, window, budget, rows, context)
            weights = sum(n for name, n in fixed if name.endswith("weights"))
            if rows == 1 or costs.total(fixed) - weights <= 0.8 * (memory - weights):
                break
            rows //= 2
        if weights > memory:
            self._refuse(f"the weights of a rank are {_gib(weights)} but {self.device.name} has {_gib(memory)} to fill; "
                         "use more ranks (--tp, --ep)")  # fmt: skip
            rows, fixed = asked, self._fixed(drafter, block, window, budget, asked, context)
        elif rows < asked:
            self.notes.append(f"--max-num-seqs {asked} does not fit: {rows} requests run together")
        return rows, fixed

    def _per_page(self, drafter: DrafterConfig | None) -> costs.Table:
        """Bytes of a page on a rank: the target's latents, and what a prefix cache keeps of the drafter's context."""
        parts = [("kv pages", PAGE_SIZE * costs.kv_bytes_per_token(self.config, self.itemsize))]
        if drafter is not None and self.options.enable_prefix_caching:
            layout = Layout(self.options.tp, self.options.ep, 0)
            parts.append(("draft pages", PAGE_SIZE * costs.drafter_kv_bytes_per_token(drafter, self.itemsize, layout)))
        return tuple(parts)

    def _pages(self, rows: int, context: int, budget: int, fixed: costs.Table, page_bytes: int) -> tuple[int, int]:
        """Return (pages, context): every row's longest request if memory holds it, at least one of them."""
        most = _pages_for(context + budget)
        have = (self.device.memory - costs.total(fixed)) // page_bytes - 1
        if have >= most:
            return min(rows * most, have), context
        asked, fits = self.options.max_model_len, have * PAGE_SIZE - budget
        if asked is None and fits >= min(LEAST_CONTEXT, context):
            self.notes.append(f"memory holds a context of {fits} tokens of the model's {context}")
            return have, fits
        if self.strict or costs.total(fixed) <= self.device.memory:
            need = _gib(most * page_bytes)
            self._refuse(f"a context of {context} tokens needs {need} of pages but {_gib(max(0, have) * page_bytes)} are "
                         "left; lower --max-model-len or --max-num-seqs, or use more ranks")  # fmt: skip
        return most, context

    def _asked_rows(self) -> int:
        return self.options.max_num_seqs or (CPU_ROWS if self.device.kind == "cpu" else ROWS)

    def _refuse(self, fault: str) -> None:
        if self.strict:
            raise ConfigError(fault)
        self.notes.append(f"does not fit: {fault}")

    def _step(self, drafter: DrafterConfig | None, block: int, window: int, budget: int, context: int) -> costs.Table:
        """Bytes a rank moves in a step of one request with its largest tree."""
        seen = min(SHOWN_CONTEXT, context)
        return costs.step_bytes(self.config, 1, budget + 1, seen, self.world, self.itemsize, drafter, block, window)


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
