"""Measure a trained pair: held-out loss, how often chat answers loop, and accept lengths of every kind of tree.

Text is made once by plain decoding on held-out prompts (stretches of held-out packages, and held-out chat requests);
every tree is then scored on it offline (see `train.offline`). "Before loops" stops a text 8 tokens before its final
loop (`generate.loop_start`). Accept length counts the token that the target itself adds in each step.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood import report
from draftwood.errors import ConfigError
from draftwood.model.config import read_drafter_config
from draftwood.train import export, offline
from draftwood.train.data import Tokens, load_tokens, prompts, read_meta, windows
from draftwood.train.generate import Decoder, Fixed, loop_start
from draftwood.train.network import DrafterNet, TargetNet
from draftwood.train.offline import Roots
from draftwood.train.piece import device_of, say
from draftwood.train.target import held_out_losses

BUDGETS = (4, 7, 8, 16, 32, 64)
ALPHA = 0.4  # weight of the previous-token table
BETA = (1.0, 0.75)  # scale of the drafter's noise at depth 1 and below
OWN_SEEDS = 1 << 30  # added to the texts' seeds for noise that is the drafter's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder with draft/ inside")
    parser.add_argument("--data", type=Path, required=True, help="data folder with held-out text")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--bigram", type=Path, help="previous-token table (default: MODEL/draft, then DATA)")
    parser.add_argument("--rows", type=int, default=128, help="held-out prompts of each kind")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a text prompt, most of a request")
    parser.add_argument("--new", type=int, default=384, help="most tokens of an answer; text rows are scored on 2/3 of it")
    parser.add_argument("--held-rows", type=int, default=256, help="windows of 1024 tokens for each held-out loss")
    parser.add_argument("--temperatures", default="0,0.6,1", help="comma-separated")
    parser.add_argument("--blocks", default="8,16", help="comma-separated, up to the drafter's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=5)


# ---------------------------------------------------------------- text
@dataclass
class Text:
    """Plain decoding of all prompts at one temperature. Rows [S]: text prompts first, then chat requests."""

    ids: Tensor  # [S, L]
    first: np.ndarray  # position of the first token that was chosen
    stop: np.ndarray  # position of the last one that counts
    loop: np.ndarray  # first position of a final loop, `stop` + 8 when there is none
    ended: np.ndarray  # whether the row wrote <|im_end|>

    def until(self, what: str) -> np.ndarray:
        """Stop positions: of all text, or 8 tokens before a loop."""
        return self.stop if what == "all" else np.clip(self.loop - 8, self.first, self.stop)


def draw_prompts(held: Tokens, rows: int, longest: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """[2 * rows, length] prompts (zeros after them) and their lengths: held-out stretches, then chat requests."""
    device = held.corpus.device
    generator = torch.Generator().manual_seed(seed)
    if len(held.corpus) <= longest:
        raise ConfigError(f"held-out text holds {len(held.corpus)} tokens, a prompt {longest}; lower --prompt")
    starts = torch.randint(0, len(held.corpus) - longest, (rows,), generator=generator).to(device)
    out = torch.zeros(2 * rows, length, dtype=torch.long, device=device)
    out[:rows, :longest] = windows(held.corpus, starts, longest)
    requests = prompts(held.index, longest).cpu()
    chosen = requests[torch.randint(0, len(requests), (rows,), generator=generator)]
    for i, (start, answer) in enumerate(chosen.tolist()):
        out[rows + i, : answer - start] = held.pairs[start:answer].long()
    sizes = torch.cat([torch.full((rows,), longest), chosen[:, 1] - chosen[:, 0]])
    return out, sizes.to(device)


def write_text(
    net: TargetNet, prompt: Tensor, sizes: Tensor, seeds: Tensor, temperature: float, args: argparse.Namespace, dtype: torch.dtype
) -> Text:
    """Decode all rows and find where each ends and loops."""
    decoder = Decoder(net, Fixed(prompt, sizes, seeds, temperature, net.shape.vocab), dtype)
    ids = decoder.run().clone()
    rows = len(ids) // 2
    first = sizes.cpu().numpy()
    end = first + np.where(np.arange(2 * rows) < rows, args.new * 2 // 3, args.new)
    stop, loop, ended = end.copy(), np.zeros(2 * rows, np.int64), np.zeros(2 * rows, bool)
    closing = (ids == net.shape.im_end).cpu().numpy()
    for i, text in enumerate(ids.cpu()):
        found = np.flatnonzero(closing[i, first[i] : end[i]])
        if len(found):
            stop[i], ended[i] = first[i] + found[0], True
        start = loop_start(text[first[i] : stop[i]])
        loop[i] = stop[i] + 8 if first[i] + start >= stop[i] else first[i] + start
    return Text(ids, first, stop, loop, ended)


def chat_facts(text: Text, new: int) -> dict[str, Any]:
    """How chat answers end: closed by <|im_end|>, in a loop, or cut off."""
    rows = len(text.first) // 2
    ended, looping = text.ended[rows:], text.loop[rows:] < text.stop[rows:]
    size = (text.stop - text.first)[rows:]
    return {
        "closed": round(float(ended.mean()), 4), "looping": round(float((~ended & looping).mean()), 4),
        "cut": round(float((~ended & ~looping).mean()), 4), "mean_tokens": round(float(size.mean()), 1),
        "text_rows_looping": round(float((text.loop < text.stop)[:rows].mean()), 4), "limit": new,
    }  # fmt: skip


# ---------------------------------------------------------------- scores
def score(found: dict[str, np.ndarray], roots: Roots, text: Text) -> dict[str, dict[str, float]]:
    """`found`: reached arrays of "tree" and "chain". -> {"all" | "before_loops": {budget: accept length}} by source."""
    rows = len(text.first) // 2
    out: dict[str, dict[str, float]] = {}
    for until in ("all", "before_loops"):
        for source, members in (("", slice(0, 2 * rows)), ("_text", slice(0, rows)), ("_chat", slice(rows, 2 * rows))):
            inside = np.zeros(2 * rows, bool)
            inside[members] = True
            stop = np.where(inside, text.until(until), text.first)
            line = {}
            for name, reached, budget in [("chain", found["chain"], found["chain"].shape[1])] + [
                (str(b), found["tree"], b) for b in BUDGETS
            ]:
                tokens, steps = offline.walk(offline.accepted(reached, budget), roots, text.first, stop)
                line[name] = round(tokens / max(1, steps), 3)
            out[until + source] = line
    return out


def study(
    net: TargetNet, drafter: DrafterNet, text: Text, temperature: float, seeds: Tensor, width: int,
    bigram: Tensor | None, dtype: torch.dtype,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every kind of tree of one block size at one temperature. Noises have the names of --noise."""
    spans = [np.arange(a, b) for a, b in zip(text.first, text.stop, strict=True)]
    roots = Roots(np.repeat(np.arange(len(spans)), [len(s) for s in spans]), np.concatenate(spans))
    noises: dict[str, offline.Noise | None] = {"none": None}
    if temperature > 0:
        noises |= {"own": (seeds + OWN_SEEDS, BETA), "shared": (seeds, BETA)}
    guesses = offline.guess(net, drafter, text.ids, roots, width, temperature, noises, dtype)
    out = []
    for noise, g in guesses.items():
        for table in (None, bigram) if bigram is not None else (None,):
            alpha = ALPHA / (temperature or 1.0)
            found = {
                "tree": offline.grow(g, max(BUDGETS), table, alpha),
                "chain": offline.grow(g, width - 1, table, alpha, chain=True),
            }
            line = {"temperature": temperature, "block": width, "noise": noise, "table": table is not None}
            out.append({**line, **score(found, roots, text)})
    return out


# ---------------------------------------------------------------- report
def headline(lines: list[dict[str, Any]], chat: dict[str, Any], losses: dict[str, float]) -> dict[str, Any]:
    """The numbers that a model card leads with. Greedy, block 8, before loops."""

    def get(temperature: float, noise: str, table: bool, until: str, name: str, block: int = 8) -> float | None:
        for line in lines:
            if (line["temperature"], line["block"], line["noise"], line["table"]) == (temperature, block, noise, table):
                return float(line[until][name])
        return None

    def ratio(a: float | None, b: float | None) -> float | None:
        return round(a / b, 3) if a and b else None

    chain, tree, table = (get(0.0, "none", t, "before_loops", n) for t, n in ((False, "chain"), (False, "16"), (True, "16")))
    return {
        **losses, "chain7": chain, "tree16": tree, "tree16_table": table, "tree16_over_chain": ratio(tree, chain),
        "table_gain": ratio(table, tree), "chat_looping": chat.get("0.0", {}).get("looping"),
        "shared_over_own_t1": ratio(get(1.0, "shared", False, "all", "16"), get(1.0, "own", False, "all", "16")),
        "shared_over_own_t06": ratio(get(0.6, "shared", False, "all", "16"), get(0.6, "own", False, "all", "16")),
    }  # fmt: skip


def show(lines: list[dict[str, Any]]) -> None:
    """The table for people: all text / text before loops."""
    names = ["chain", *map(str, BUDGETS)]
    print(f"{'T':>4} {'block':>5} {'noise':>6} {'table':>5} " + " ".join(f"{n:>11}" for n in names))
    for line in lines:
        cells = " ".join(f"{line['all'][n]:5.2f}/{line['before_loops'][n]:<5.2f}" for n in names)
        table = "yes" if line["table"] else "no"
        print(f"{line['temperature']:>4} {line['block']:>5} {line['noise']:>6} {table:>5} {cells}")


def find_bigram(args: argparse.Namespace) -> Path | None:
    for path in (args.bigram, args.model / "draft" / "bigram.safetensors", args.data / "bigram.safetensors"):
        if path is not None and path.is_file():
            return Path(path)
    return None


def run(args: argparse.Namespace) -> int:
    device, dtype = device_of(args.device)
    torch.manual_seed(args.seed)
    taps = read_drafter_config(args.model / "draft").taps
    net = export.load_target(args.model, taps, device, dtype)
    drafter = export.load_drafter(args.model / "draft", net.shape, device)
    blocks = report.numbers("--blocks", args.blocks, int, 2, drafter.draft.block)
    temperatures = report.numbers("--temperatures", args.temperatures, float, 0.0, 100.0)
    held = load_tokens(args.data, net.shape, device, held=True)
    path = find_bigram(args)
    bigram = offline.dense_bigram(path, net.shape.vocab, device) if path else None
    length = (args.prompt + args.new + max(blocks) + 15) // 16 * 16
    if length > net.shape.max_position:
        raise ConfigError(f"--prompt {args.prompt} + --new {args.new} exceed {net.shape.max_position} positions; lower them")
    prompt, sizes = draw_prompts(held, args.rows, args.prompt, length, args.seed)
    seeds = torch.arange(len(prompt), device=device) + 1_000_000
    losses = held_out_losses(net, args.data, device, dtype, min(1024, net.shape.max_position // 2), args.held_rows)
    say(f"held-out losses {losses}")
    lines, chat = [], {}
    began = time.monotonic()
    for temperature in temperatures:
        text = write_text(net, prompt, sizes, seeds, temperature, args, dtype)
        chat[str(temperature)] = chat_facts(text, args.new)
        say(f"T={temperature}: {int((text.stop - text.first).sum())} roots, chat {chat[str(temperature)]}")
        for width in blocks:
            lines += study(net, drafter, text, temperature, seeds, width, bigram, dtype)
            say(f"T={temperature} block {width} scored")
    facts = headline(lines, chat, losses)
    everything = {
        **facts, "chat": chat, "accept": lines, "prompts_of_each_kind": args.rows, "seconds": round(time.monotonic() - began, 1),
        "bits_per_char": bits_per_char(losses["held"], args.data), "alpha": ALPHA, "beta": BETA,
    }  # fmt: skip
    export.write_json(args.out, everything)
    show(lines)
    print(json.dumps(facts))
    return 0


def bits_per_char(nats: float, data: Path) -> float | None:
    """Held-out loss per character, when the data folder knows its characters per token."""
    size = read_meta(data).get("held", {}).get("chars_per_token")
    return round(nats / np.log(2) / size, 4) if size else None
