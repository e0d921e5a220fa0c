"""Train a small target of exactly the K2 architecture: MLA, sigmoid-routed MoE with INT4 experts, YaRN.

Routed experts are INT4 (group 32) from the first step, so the stored checkpoint is what was trained. The run may be
cut into pieces: `--seconds` for this piece, `--total-seconds` for all, `--resume` to go on. `--init` starts from a stored
checkpoint: its INT4 experts, dequantised, are the first weights, and the learning rate begins low.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.train import export, piece
from draftwood.train.data import Mixture, Tokens, load_tokens, read_meta, windows
from draftwood.train.files import report
from draftwood.train.network import TargetNet, cross_entropy
from draftwood.train.optim import Optimiser
from draftwood.train.piece import Piece, device_of, say
from draftwood.train.shapes import NANO, SMOKE, Shape

ADAM = ("embed", "head", "router")
BALANCE = 1e-3  # step of the router's selection bias
LONG_FROM = 0.8  # share of the run after which half of the steps use windows of twice the length
HELD_ROWS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="data folder that `train pack` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and state.pt")
    piece.add_arguments(parser, seconds=540)
    parser.add_argument("--rows", type=int, default=64, help="windows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per window")
    parser.add_argument("--pairs-share", type=float, default=0.3, help="share of the tokens that are chat pairs")
    parser.add_argument("--begin-share", type=float, default=0.25, help="share of corpus windows that begin a document")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--corpus", type=Path, nargs="+", metavar="FILE", help="corpus token files (default: DATA's)")
    parser.add_argument("--data-tokens", type=int, help="read only so many tokens of each stream")


def check(args: argparse.Namespace, shape: Shape) -> None:
    """ConfigError for options that do not fit together."""
    if args.length % 4 or args.length * 2 > shape.max_position or args.rows % 4:
        raise ConfigError(
            f"--rows {args.rows} x --length {args.length}: both must be multiples of 4 and twice the length within "
            f"{shape.max_position} positions; change them"
        )
    if not 0 < args.pairs_share < 1:
        raise ConfigError(f"--pairs-share {args.pairs_share} must lie between 0 and 1; change it")


def split(step: int, progress: float, rows: int, length: int) -> tuple[int, int]:
    """Rows and window length of a step, always rows * length tokens (so nothing is compiled again).

    Every fourth step takes half the length, so that beginnings are common; near the end half of the steps take twice
    the length, so that far positions are trained.
    """
    if step % 4 == 3:
        return rows * 2, length // 2
    if progress >= LONG_FROM and step % 2 == 0:
        return rows // 2, length * 2
    return rows, length


@torch.no_grad()
def held_out(net: TargetNet, stream: Tensor, starts: Tensor, length: int, dtype: torch.dtype, rows: int = 32) -> float:
    """Mean next-token loss in nats over windows of `length` tokens from `starts`."""
    total, count = 0.0, 0
    for some in starts.split(rows):
        ids = windows(stream, some, length + 1)
        hidden, _ = net(ids[:, :-1], dtype)
        total += float(cross_entropy(hidden.flatten(0, 1), net.head, ids[:, 1:].flatten())) * len(some)
        count += len(some)
    return total / max(1, count)


def held_out_losses(
    net: TargetNet, data: Path, device: torch.device, dtype: torch.dtype, length: int, rows: int = HELD_ROWS
) -> dict[str, float]:
    """Held-out loss of the stored precision, nats/token: packages never trained on, and chat pairs of such packages."""
    held = load_tokens(data, net.shape, device, held=True)
    generator = torch.Generator().manual_seed(1)
    out = {}
    for name, stream, starts in (("held", held.corpus, None), ("held_pairs", held.pairs, held.index[:, 0])):
        width = min(length, len(stream) - 2)
        last = len(stream) - width - 1
        if starts is None:
            chosen = torch.randint(0, last + 1, (rows,), generator=generator).to(device)
        else:
            usable = starts[starts <= last]
            chosen = usable[torch.randint(0, len(usable), (rows,), generator=generator).to(device)]
        out[name] = round(held_out(net, stream, chosen, width, dtype), 4)
    return out


def train(
    net: TargetNet, optimiser: Optimiser, mixture: Mixture, run_: Piece, args: argparse.Namespace, dtype: torch.dtype
) -> None:
    """The loop. Advances `run_` until its piece ends."""
    loss_of = cross_entropy
    if net.embed.is_cuda and not args.no_compile:
        net.compile_parts()
        loss_of = torch.compile(cross_entropy, dynamic=False)
    busiest = torch.zeros(())
    while run_.running():
        factor = run_.factor
        rows, length = split(run_.step, run_.progress, args.rows, args.length)
        ids = mixture.batch(rows, length + 1)
        hidden, _ = net(ids[:, :-1], dtype, count=True)
        loss = loss_of(hidden.flatten(0, 1), net.head, ids[:, 1:].reshape(-1))
        loss.backward()
        optimiser.step(factor)
        optimiser.zero()
        looks = run_.looks()
        if looks:
            busiest = torch.stack([b.load.max() / b.load.sum().clamp_min(1) for b in net.blocks if not b.dense]).max()
        net.balance(BALANCE * max(factor, 0.05))
        run_.tick(loss.detach(), f"lr {factor:.2f} busiest expert {float(busiest):.3f}" if looks else "")


def finish(net: TargetNet, run_: Piece, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Save the state, export the checkpoint, measure it as stored."""
    run_.save()
    say("state saved")
    size = export.save_target(net, args.out, args.data)
    say(f"checkpoint written, {size:,} bytes")
    stored = export.load_target(args.out, net.shape.taps, device, dtype)
    losses = held_out_losses(stored, args.data, device, dtype, args.length)
    meta = read_meta(args.data)
    facts = {
        "steps": run_.step, "tokens": run_.step * args.rows * args.length, "trained_seconds": round(run_.trained, 1),
        "progress": round(run_.progress, 4), "train_loss": round(run_.recent_loss(), 4), "checkpoint_bytes": size,
        **{f"{k}_nats": v for k, v in losses.items()}, "history": run_.history[:: max(1, len(run_.history) // 60)],
        "data": {k: meta[k] for k in ("corpus", "pairs", "held", "held_pairs") if k in meta},
    }  # fmt: skip
    export.write_json(args.out / "training.log.json", facts)
    return facts


def run(args: argparse.Namespace) -> int:
    shape: Shape = SMOKE if args.smoke else NANO
    if args.smoke:
        args.rows, args.length = min(args.rows, 8), min(args.length, 64)
    device, dtype = device_of(args.device)
    torch.manual_seed(args.seed)
    net = (export.read_target(args.init, shape.taps) if args.init else TargetNet(shape)).to(device)
    shape = net.shape
    check(args, shape)
    optimiser = Optimiser(net, ADAM, args.muon_lr, args.adam_lr)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens: Tokens = load_tokens(args.data, shape, device, limit=args.data_tokens, corpus=args.corpus)
    mixture = Mixture(tokens, args.pairs_share, args.begin_share, generator)
    mixture.check(args.length * 2)
    say(
        f"corpus {len(tokens.corpus):,} tokens in {len(tokens.documents):,} documents; "
        f"pairs {len(tokens.pairs):,} tokens in {len(tokens.index):,}"
    )
    run_ = Piece(args, args.out / "state.pt", "target", {"net": net, "optimiser": optimiser}, generator)
    train(net, optimiser, mixture, run_, args, dtype)
    run_.close()
    facts = finish(net, run_, args, device, dtype)
    rows = [(k, v) for k, v in facts.items() if isinstance(v, int | float)]
    report(rows, {k: v for k, v in facts.items() if k != "history"})
    return 0
