"""Write the model card of a trained pair from what training and evaluation left behind."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from draftwood import report
from draftwood.errors import ConfigError

BUDGETS = ("chain", "4", "7", "8", "16", "32", "64")

_TEXT = """# nano: a Kimi-K2-shaped target and its DFlash drafter

Two small models trained from scratch by this project's own `draftwood train` commands, so that everything in the package
can be tried and tested on real weights. The target has exactly the K2 architecture: MLA with LoRA ranks, a dense first
layer, MoE with sigmoid routing and a shared expert, YaRN, and routed experts in INT4 (group 32), trained with fake
quantisation from the first step, so INT4 is native. The drafter serves block sizes 4 to 16 with one set of weights.

It writes Python-looking text and answers requests for short functions in K2's chat format. It knows nothing else, makes
mistakes, and is meant for tests and demonstrations only. Positions above 2,047 were not trained.

| | |
|---|---|
| licence | Apache-2.0; every source text is under a permissive licence, listed below |
| files | {bytes:,} bytes with tokenizer, drafter and previous-token table |
| target | {steps:,} steps, {tokens:.0f} M tokens, {seconds:.0f} s on one H200, runs: {runs} |
| drafter | {draft_steps:,} steps, {draft_seconds:.0f} s on one H200, runs: {draft_runs}, on text that the target wrote itself |
| data of the last run | {corpus_tokens:.1f} M tokens of Python source and documentation, {pair_tokens:.1f} M tokens of chats |
| held-out packages | {held:.3f} nats/token = {bits:.3f} bits/character; chats {held_pairs:.3f} nats/token |
| greedy answers to held-out chats | {closed:.0%} end by themselves within {limit} tokens, {looping:.0%} loop |

Besides what was cut from packages, the data holds {classics} answers to everyday requests (well-known short functions, and
who is speaking), written for this project: as chats, and the functions as files of their own, so that a bare signature
(`def fibonacci(n):`) has a continuation. These the model recites; they say nothing about its skill or acceptance elsewhere.

## Accept length

Committed tokens per target forward, the finally chosen one included, on prompts from held-out packages ({prompts} pieces of
text, {prompts} chats). Each cell: all text / text before any loop (a text loops when a period repeats to its end). "chain" is the
drafter's likeliest chain of block - 1 tokens, without a tree. "table": the previous-token table `draft/bigram.safetensors`,
alpha {alpha}. "noise": what the drafter adds at T > 0: nothing, noise of its own, or the target's (shared); scaled by
depth, 1 then {beta}.

{accept}

Greedy, block 8, text before loops: chain {chain7:.2f}; budget 16 {tree16:.2f} ({gain:.2f} x the chain); with the table
{tree16_table:.2f} ({table_gain:.3f} x more). By kind, without the table: {kinds}.

## Data

{count} packages; {files:,} files; held out: {held_names}.

{licences}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `draftwood train card`."""
    parser.add_argument("--model", required=True, help="checkpoint folder with its drafter in draft/; the card is written there")
    parser.add_argument(
        "--target-log", required=True, nargs="+", metavar="FILE", help="training.log.json of each run of the target, in order"
    )
    parser.add_argument("--draft-log", required=True, nargs="+", metavar="FILE", help="draft-training.json of each run, in order")
    parser.add_argument("--evaluation", required=True, help="the file that `train evaluate` wrote")
    parser.add_argument("--data", required=True, help="data folder with meta.json and packages.json")
    parser.add_argument("--classics", type=int, default=102, help="answers written for this project (default 102)")


def run(args: argparse.Namespace) -> int:
    """Write MODEL/README.md; return 0. Raises ConfigError for a missing or unreadable file."""
    folder, data = Path(args.model), Path(args.data)
    scores, target, drafter = _json(args.evaluation), _whole(args.target_log), _whole(args.draft_log)
    meta, packages = _json(data / "meta.json"), _json(data / "packages.json")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; --model takes the checkpoint")
    card = folder / "README.md"
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc") and p != card)
    try:
        text = _TEXT.format(**_facts(scores, target, drafter, meta, packages), bytes=size, classics=args.classics)
    except (KeyError, TypeError, ValueError) as missing:
        raise ConfigError(f"the logs do not have what the card needs ({missing}); use those of one training") from None
    card.write_text(text, encoding="utf-8")
    total = size + card.stat().st_size
    report.show(report.table(("file", "bytes"), [[str(card), card.stat().st_size], ["folder", total]]))
    report.show(report.json_line({"card": str(card), "folder_bytes": total}))
    return 0


def _json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); give the file that training wrote") from None


def _whole(paths: list[str]) -> dict[str, Any]:
    """One log of a training and of those that went on from it: the last one's facts; runs, steps, tokens and seconds of all."""
    logs = [_json(path) for path in paths]
    try:
        sums = {key: sum(log[key] for log in logs) for key in ("steps", "tokens", "trained_seconds") if key in logs[-1]}
        return {**logs[-1], **sums, "runs": len(logs)}
    except (KeyError, TypeError) as missing:
        raise ConfigError(
            f"{' '.join(paths)}: not all are logs of one kind of training ({missing}); give the right files"
        ) from None


def _facts(scores: Any, target: Any, drafter: Any, meta: Any, packages: Any) -> dict[str, Any]:
    greedy = scores["chat"]["0.0"]
    plain = next(a for a in scores["accept"] if a["temperature"] == 0 and a["block"] == 8 and not a["table"])
    kinds = "; ".join(
        f"{kind} chain {plain[name]['chain']:.2f}, budget 16 {plain[name]['16']:.2f}"
        for kind, name in (("text", "before_loops_text"), ("chats", "before_loops_chat"))
    )
    return {
        **{k: scores[k] for k in ("held", "held_pairs", "chain7", "tree16", "tree16_table", "table_gain", "alpha")},
        "beta": scores["beta"][1], "bits": scores["bits_per_char"], "gain": scores["tree16_over_chain"], "kinds": kinds,
        "closed": greedy["closed"], "looping": greedy["looping"], "limit": greedy["limit"],
        "prompts": scores["prompts_of_each_kind"], "accept": _accept(scores["accept"]),
        "steps": target["steps"], "tokens": target["tokens"] / 1e6, "seconds": target["trained_seconds"],
        "runs": target["runs"], "draft_runs": drafter["runs"],
        "draft_steps": drafter["steps"], "draft_seconds": drafter["trained_seconds"],
        "corpus_tokens": meta["corpus"]["tokens"] / 1e6, "pair_tokens": meta["pairs"]["tokens"] / 1e6,
        "count": len(packages), "files": sum(p["files"] for p in packages),
        "held_names": ", ".join(sorted(p["name"] for p in packages if p["split"] == "held")),
        "licences": _licences(packages),
    }  # fmt: skip


def _accept(rows: list[dict[str, Any]]) -> str:
    """One line for each temperature, block, noise and table; budgets across."""
    head = "| T | block | noise | table | " + " | ".join(BUDGETS) + " |"
    lines = [head, "|---" * (4 + len(BUDGETS)) + "|"]
    for row in rows:
        cells = [f"{row['all'][b]:.2f} / {row['before_loops'][b]:.2f}" for b in BUDGETS]
        what = [f"{row['temperature']:g}", str(row["block"]), row["noise"], "yes" if row["table"] else "no"]
        lines.append("| " + " | ".join(what + cells) + " |")
    return "\n".join(lines)


def _licences(packages: list[dict[str, Any]]) -> str:
    """Packages by what they state as their licence, the most frequent statement first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        groups[_licence(package["licence"])].append(f"{package['name']} {package['version']}".strip())
    lines = [f"- {licence}: {', '.join(sorted(names))}" for licence, names in sorted(groups.items(), key=lambda g: -len(g[1]))]
    return "\n".join(lines)


def _licence(stated: str) -> str:
    """The first statement if it is a name; of a whole licence text the classifier that follows it, else its first words."""
    name, _, classifier = stated.partition(" | ")
    if classifier and ("\n" in name or len(name) > 60):
        name = classifier
    return " ".join(name.removeprefix("License :: ").removeprefix("OSI Approved :: ").split())[:100]
