"""Write the target's own text for the drafter: rows of forced prompts and sampled answers, several per row.

A row is a chat row or a text row. It holds segments: a prompt (a request up to <think></think>, or a stretch of a
document) that is forced, then tokens the target samples at the row's temperature until it ends the turn or document,
repeats itself, or reaches --new tokens; then the next segment begins, as in the training windows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from draftwood.errors import ConfigError
from draftwood.train import export
from draftwood.train.data import Tokens, load_tokens, prompts
from draftwood.train.files import report
from draftwood.train.generate import Decoder
from draftwood.train.piece import device_of, say
from draftwood.train.shapes import NANO, SMOKE, Shape

FILE = "captured.safetensors"
#: Of the rows, in turn: more than half are greedy.
TEMPERATURES = (0.0, 0.6, 0.0, 1.0, 0.0, 0.0, 0.3, 0.0, 0.6, 0.0, 1.0, 0.0, 0.0, 0.6, 0.0, 1.0)
PERIOD = 64  # longest repetition that counts as a loop


class Writer:
    """Policy: endless segments. `kind` [B, L] uint8 = 2 * (segment number mod 128) + (1 if sampled)."""

    def __init__(self, tokens: Tokens, shape: Shape, rows: int, length: int, chat_share: float, longest: int, new: int) -> None:
        device = tokens.pairs.device
        chats = prompts(tokens.index, longest)
        self.chats = chats[chats[:, 0] > 0] if len(chats) > 1 else chats
        self.stream = torch.cat([tokens.pairs, tokens.corpus])
        self.base, self.documents = len(tokens.pairs), tokens.documents
        self.shape, self.new, self.longest = shape, new, min(128, longest)
        row = torch.arange(rows, device=device)
        self.chat = (row % 20) < round(20 * chat_share)
        self.temperatures = torch.tensor(TEMPERATURES, device=device)[(row // 20 + row) % len(TEMPERATURES)]
        self.ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.kind = torch.zeros(rows, length, dtype=torch.uint8, device=device)
        self.source, self.left, self.used, self.segment = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4))
        self.recent = torch.zeros(rows, PERIOD, dtype=torch.long, device=device)
        self.run = torch.zeros_like(self.recent)
        self.enough = torch.arange(1, PERIOD + 1, device=device).mul(2).clamp_min(24)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """A prompt for every row: start in the stream, length, and whether an end token stands before it."""
        rows, device = len(self.chat), self.chat.device
        pick = self.chats[torch.randint(len(self.chats), (rows,), device=device)]
        room = len(self.stream) - self.base - self.longest - 1
        anywhere = torch.randint(room, (rows,), device=device)
        document = self.documents[torch.randint(len(self.documents), (rows,), device=device)].clamp(1, room)
        begin = torch.rand(rows, device=device) < 0.5
        text = torch.where(begin, document, anywhere) + self.base
        size = torch.randint(self.longest // 4, self.longest + 1, (rows,), device=device)
        start = torch.where(self.chat, pick[:, 0], text)
        return start, torch.where(self.chat, pick[:, 1] - pick[:, 0], size), (self.chat | begin) & (start > 0)

    def reset(self) -> None:
        start, size, _ = self.draw()
        self.ids.zero_()
        self.kind.zero_()
        for state in (self.used, self.segment, self.run):
            state.zero_()
        self.recent.fill_(-1)
        self.ids[:, 0] = self.stream[start].long()
        self.source.copy_(start + 1)
        self.left.copy_(size - 1)

    def next(self, logits: Tensor, position: Tensor) -> Tensor:
        """Forced token or a sample of softmax(logits / T) by the Gumbel trick; then plan the next segment."""
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-10).log_()
        sampled = (logits - noise * self.temperatures[:, None]).argmax(-1)
        forced = self.left > 0
        token = torch.where(forced, self.stream[self.source.clamp(max=len(self.stream) - 1)].long(), sampled)
        self.ids.index_copy_(1, position + 1, token[:, None])
        kind = (self.segment % 128 * 2 + (~forced).long()).to(torch.uint8)
        self.kind.index_copy_(1, position + 1, kind[:, None])

        closed = (token == self.shape.im_end) | (token == self.shape.eos)
        self.used.copy_((self.used + 1) * ~forced)
        self.run.copy_((self.run + 1) * (token[:, None] == self.recent) * (~forced)[:, None])
        self.recent.copy_(torch.cat([token[:, None], self.recent[:, :-1]], 1))
        loops = (self.run >= self.enough).any(1)
        over = ~forced & (closed | loops | (self.used >= self.new))

        start, size, ended_before = self.draw()
        extra = (ended_before & ~closed).long()  # the end token that the target did not write
        self.source.copy_(torch.where(over, start - extra, self.source + 1))
        self.left.copy_(torch.where(over, size + extra, (self.left - 1).clamp_min(0)))
        self.segment.add_(over.long())
        return token


@dataclass
class Captured:
    """Own text: ids [N, L] int16 (uint16 bits), kind [N, L] uint8 (see Writer), temperatures [N] fp32."""

    ids: Tensor
    kind: Tensor
    temperatures: Tensor

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"ids": self.ids, "kind": self.kind, "temperatures": self.temperatures}, folder / FILE)

    @staticmethod
    def load(folder: Path) -> Captured:
        """ConfigError when the file is missing or damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = folder / FILE
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; run `draftwood train capture --out {folder}` first")
        try:
            t = load_file(path)
            return Captured(t["ids"], t["kind"], t["temperatures"])
        except (SafetensorError, KeyError) as error:
            raise ConfigError(f"{path} is not a capture ({error}); run `draftwood train capture` again") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder that `train target` wrote")
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the captured text")
    parser.add_argument("--seconds", type=float, default=60, help="start no new round after this long")
    parser.add_argument("--rows", type=int, default=2048, help="rows decoded together")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument("--new", type=int, default=384, help="most sampled tokens per segment")
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--chat-share", type=float, default=0.6)
    parser.add_argument("--corpus", type=Path, nargs="+", metavar="FILE", help="corpus token files (default: DATA's)")
    parser.add_argument("--data-tokens", type=int, default=24_000_000, help="tokens of each stream to take prompts from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes for tests")


def run(args: argparse.Namespace) -> int:
    device, dtype = device_of(args.device)
    torch.manual_seed(args.seed)
    taps = (SMOKE if args.smoke else NANO).taps
    net = export.load_target(args.model, taps, device, dtype)
    if args.length > net.shape.max_position:
        raise ConfigError(f"--length {args.length} exceeds the model's {net.shape.max_position} positions; lower it")
    tokens = load_tokens(args.data, net.shape, device, limit=args.data_tokens, corpus=args.corpus)
    if min(len(tokens.corpus), len(tokens.pairs)) <= args.longest_prompt + 2:
        raise ConfigError(f"{args.data} holds less text than one prompt of {args.longest_prompt} tokens; give more")
    writer = Writer(tokens, net.shape, args.rows, args.length, args.chat_share, args.longest_prompt, args.new)
    decoder = Decoder(net, writer, dtype)
    with torch.no_grad():
        decoder.prepare()
    say(f"capture: {args.rows} rows x {args.length}, ready")
    ids: list[Tensor] = []
    kinds: list[Tensor] = []
    began = time.monotonic()
    bar = tqdm(total=args.seconds, desc="capture", unit="s", disable=None, bar_format="{desc}: {n:.0f}/{total:.0f} s {postfix}")
    while not ids or time.monotonic() - began < args.seconds:
        text = decoder.run().to(torch.int32).to(torch.int16)
        ids.append(text.cpu())
        kinds.append(writer.kind.cpu())
        bar.n = time.monotonic() - began
        bar.set_postfix_str(f"{len(ids) * args.rows} rows")
    bar.close()
    spent = time.monotonic() - began
    out = Captured(torch.cat(ids), torch.cat(kinds), writer.temperatures.float().cpu().repeat(len(ids)))
    out.save(args.out)
    own = int((out.kind & 1).sum())
    rate = out.ids.numel() / spent
    ends = int(((out.ids.int() & 0xFFFF) == net.shape.im_end).logical_and(out.kind.bool() & (out.kind % 2 == 1)).sum())
    rows = [("rows", len(out.ids)), ("tokens", out.ids.numel()), ("sampled", own), ("turns ended", ends), ("tokens/s", round(rate))]
    report(rows, {"rows": len(out.ids), "tokens": out.ids.numel(), "sampled": own, "ended": ends, "seconds": round(spent, 1)})
    return 0
