"""Show what the engine would allocate and the floor of a step's time, from configs alone: nothing is loaded.

MODEL may be a shape without weights (k2.6), and --hardware a device that this machine does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from draftwood import plan
from draftwood.commands import console
from draftwood.config import Options, Plan, add_options, options_from
from draftwood.errors import ConfigError
from draftwood.model import costs
from draftwood.report import closed_pipe_is_fine, json_line, table

ROWS = (1, 8, 32, 128)
NODES = (1, 9, 17, 33, 65)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options and what to plan for."""
    add_options(parser)
    parser.add_argument(
        "--hardware",
        default="auto",
        choices=("auto", *plan.HARDWARE),
        help="device of each rank (default auto: what this machine has)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan as tables, then as one JSON line. Too little memory is told, not refused."""
    options = options_from(args)
    checkpoint = plan.find(options, weights=False)
    device = _device(options, args.hardware)
    made = plan.decide(options, checkpoint, device, strict=False)
    steps = _steps(made, checkpoint)
    with closed_pipe_is_fine():
        console.write(_show(made, device, steps), end="\n")
        console.write(json_line(_record(made, device, steps)), end="\n")
    return 0


def _device(options: Options, hardware: str) -> plan.Device:
    if hardware != "auto":
        device = plan.HARDWARE[hardware]
        if options.device not in ("auto", device.kind):
            raise ConfigError(f"--device {options.device} is not what --hardware {hardware} is; give one of them")
        return device
    from draftwood import devices

    return devices.detect(options.device, options.tp * options.ep)


def _steps(made: Plan, checkpoint: plan.Checkpoint) -> list[dict[str, Any]]:
    """Bytes and time of a step by requests and nodes of each, as far as the plan allows them."""
    context = min(plan.SHOWN_CONTEXT, made.max_model_len)
    drafter = checkpoint.drafter if made.block else None
    found = []
    for rows in ROWS:
        for nodes in NODES:
            if rows > made.max_num_seqs or nodes > made.max_budget + 1:
                continue
            count = costs.total(
                costs.step_bytes(
                    checkpoint.config, rows, nodes, context, made.world, plan.ITEMSIZE[made.dtype],
                    drafter if nodes > 1 else None, made.block, made.window,
                )
            )  # fmt: skip
            ms = count / made.bandwidth * 1e3 if made.bandwidth else None
            found.append({"rows": rows, "nodes": nodes, "context": context, "bytes": count, "floor_ms": ms})
    return found


def _show(made: Plan, device: plan.Device, steps: list[dict[str, Any]]) -> str:
    """The plan for people."""
    trees = f"block {made.block}, at most {made.max_budget} nodes beyond the root, window {made.window}"
    facts = [
        ("target", made.model_path),
        ("drafter", made.draft_path or "none"),
        ("each rank", f"{device.name}, {console.size(device.memory)} to fill, {made.dtype}"),
        ("ranks", f"{made.world} (tp {made.options.tp} x ep {made.options.ep})"),
        ("context", f"{made.max_model_len} tokens"),
        ("requests", f"{made.max_num_seqs} together, prompts in chunks of {made.prefill_chunk}"),
        ("pages", f"{made.num_pages} of {made.page_size} tokens"),
        ("trees", trees if made.block else "none: plain decoding"),
    ]
    parts = [console.table(facts, indent="")]
    memory = [*made.memory, ("all", costs.total(made.memory))]
    parts.append(table(("memory of a rank", "bytes", ""), [(name, n, console.size(n)) for name, n in memory]))
    context = min(plan.SHOWN_CONTEXT, made.max_model_len)
    head = f"read by a rank in a step (1 request, {made.max_budget + 1} nodes, context {context})"
    moved = [*made.step_bytes, ("all", costs.total(made.step_bytes))]
    parts.append(table((head, "bytes", ""), [(name, n, console.size(n)) for name, n in moved]))
    rows = [(s["rows"], s["nodes"], console.size(s["bytes"]), s["floor_ms"]) for s in steps]
    parts.append(table(("requests", "nodes each", "bytes of a step", "floor, ms"), rows))
    if made.bandwidth is None:
        parts.append("The bandwidth of this device is not known, so no times are predicted.")
    parts += [f"note: {note}" for note in made.notes]
    return "\n\n".join(parts) + "\n"


def _record(made: Plan, device: plan.Device, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan for programs: the fields of Plan, tables as objects."""
    record = dataclasses.asdict(made)
    record["memory"], record["step_bytes"] = dict(made.memory), dict(made.step_bytes)
    return record | {"hardware": dataclasses.asdict(device), "steps": steps}
