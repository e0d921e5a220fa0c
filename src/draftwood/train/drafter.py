"""Train one DFlash drafter, for blocks of 8 and of 16 tokens, by distilling the target's own distribution.

The target runs once over all rows; its tapped features and final hidden states stay in device memory (the pool), so
that a training step is the drafter alone. Rows: the target's own text from `train capture`, and an eighth from the data.
Loss: soft cross-entropy to the target's distribution, sharpened as the row was sampled, decaying with depth; half of a
depth's weight falls with the chance that a chain gets there (`network.weighted`).
Steps alternate between blocks of 8 and 16; the past of a block is a random stretch of its row (a draft window).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from draftwood.errors import ConfigError
from draftwood.train import export, piece
from draftwood.train.capture import Captured
from draftwood.train.data import Mixture, load_tokens
from draftwood.train.files import report
from draftwood.train.network import DrafterNet, TargetNet, distil, weighted
from draftwood.train.optim import Optimiser
from draftwood.train.piece import Piece, device_of, say
from draftwood.train.shapes import NANO, NANO_DRAFT, SMOKE, SMOKE_DRAFT

GREEDY_SHARPNESS = 6.0  # exponent on the target's distribution for greedy rows: nearly its argmax, yet soft
DECAY = {8: 4.0, 16: 7.0}  # weight of depth k is exp(-(k - 1) / DECAY), DFlash's rule


@dataclass
class Pool:
    """Rows the drafter trains on, on the device. N rows, L positions, h hidden."""

    ids: Tensor  # [N, L] long
    kind: Tensor  # [N, L] uint8: 2 * segment + sampled (see capture.Writer)
    sharpness: Tensor  # [N] fp32, of sampled tokens
    taps: Tensor  # [N, L, taps * h]
    hidden: Tensor  # [N, L, h], after the final norm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--captured", type=Path, required=True, help="folder that `train capture` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter; its state is OUT-state.pt")
    piece.add_arguments(parser, seconds=450)
    parser.add_argument("--rows", type=int, default=256, help="rows per step")
    parser.add_argument("--window", type=int, default=512, help="past positions per row; a quarter of the steps take twice as many")
    parser.add_argument("--block-tokens", type=int, default=512, help="block tokens per row and step")
    parser.add_argument("--data-share", type=float, default=0.125, help="share of the pool that is corpus and pairs")
    parser.add_argument("--pool-gb", type=float, default=70.0, help="most device memory for the pool")
    parser.add_argument("--muon-lr", type=float, default=3e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--corpus", type=Path, nargs="+", metavar="FILE", help="corpus token files (default: DATA's)")
    parser.add_argument("--data-tokens", type=int, default=24_000_000, help="tokens of each stream to take rows from")


@torch.no_grad()
def build_pool(net: TargetNet, captured: Captured, extra: Tensor, limit_bytes: float, dtype: torch.dtype) -> Pool:
    """Run the target over captured rows and `extra` [M, L] rows; as many captured rows as fit `limit_bytes`."""
    device, s = extra.device, net.shape
    length = captured.ids.shape[1]
    row_bytes = length * s.hidden * (len(s.taps) + 1) * dtype.itemsize
    count = min(len(captured.ids), max(1, int(limit_bytes / row_bytes) - len(extra)))
    ids = torch.cat([(captured.ids[:count].to(device).long() & 0xFFFF), extra])
    kind = torch.cat([captured.kind[:count].to(device), torch.zeros_like(extra, dtype=torch.uint8)])
    t = torch.cat([captured.temperatures[:count].to(device), torch.ones(len(extra), device=device)])
    sharpness = torch.where(t > 0, 1 / t.clamp_min(0.1), GREEDY_SHARPNESS)
    taps = torch.empty(len(ids), length, s.hidden * len(s.taps), dtype=dtype, device=device)
    hidden = torch.empty(len(ids), length, s.hidden, dtype=dtype, device=device)
    for at in tqdm(range(0, len(ids), 64), desc="target features", unit="batch", disable=None):
        h, tapped = net(ids[at : at + 64], dtype)
        hidden[at : at + 64] = h
        torch.cat(tapped, -1, out=taps[at : at + 64])
    return Pool(ids, kind, sharpness, taps, hidden)


@dataclass
class Draw:
    """What one step trains on: rows [B], anchors [A] (shared), start [1] of the past, `past` positions, block width."""

    rows: Tensor
    anchors: Tensor
    start: Tensor
    past: int
    width: int


def draw(pool: Pool, step: int, args: argparse.Namespace, generator: torch.Generator) -> Draw:
    """Choose rows, a stretch of the past and anchors. All steps have the same numbers of past and block tokens."""
    device, length = pool.ids.device, pool.ids.shape[1]
    width, wide = (8, 16)[step % 2], step // 2 % 4 == 3
    rows, past, tokens = args.rows, args.window, args.block_tokens
    if wide:
        rows, past, tokens = rows // 2, past * 2, tokens * 2

    def integers(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator, device=device)

    start = integers(length - past + 1, 1)
    order = torch.randperm(past - 17, generator=generator, device=device)[: tokens // width]
    return Draw(integers(len(pool.ids), rows), start + 1 + order.sort().values, start, past, width)


def targets(pool: Pool, d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that predict the blocks' tokens [T, h], sharpness [T], weight [T]; T = rows * anchors * (width-1).

    A position counts only while the block stays in its anchor's segment: what follows the end of a turn is not drafted.
    """
    depth = torch.arange(1, d.width, device=d.rows.device)
    at = (d.anchors[:, None] + depth).flatten()
    rows = d.rows[:, None]
    kind = pool.kind[rows, at].view(len(d.rows), -1, d.width - 1)
    here = pool.kind[rows, d.anchors][..., None] // 2
    sharpness = 1 + (kind & 1) * (pool.sharpness[d.rows] - 1)[:, None, None]
    weight = torch.exp(-(depth - 1).float() / DECAY[d.width]) * (kind // 2 == here)
    return pool.hidden[rows, at - 1].flatten(0, 1), sharpness.flatten(), weight.flatten()


def drafted(drafter: DrafterNet, embed: Tensor, pool: Pool, d: Draw) -> Tensor:
    """The drafter's hidden states at the blocks' masked positions [T, h]."""
    seen = d.start + torch.arange(d.past, device=d.rows.device)
    features = pool.taps[d.rows[:, None], seen]
    roots = pool.ids[d.rows[:, None], d.anchors]
    return drafter(embed, roots, features, d.anchors[None], d.start, d.width)[:, :, 1:].flatten(0, 2)


def train(drafter: DrafterNet, net: TargetNet, pool: Pool, optimiser: Optimiser, run_: Piece, args: argparse.Namespace) -> None:
    """The loop. Advances `run_` until its piece ends."""
    loss_of = distil
    if pool.ids.is_cuda and not args.no_compile:
        drafter.compile_parts()
        loss_of = torch.compile(distil, dynamic=False)
    while run_.running():
        factor = run_.factor
        d = draw(pool, run_.step, args, run_.generator)
        hidden, sharpness, weight = targets(pool, d)
        losses, agreement = loss_of(drafted(drafter, net.embed, pool, d), hidden, net.head, sharpness)
        loss = weighted(losses, agreement, weight, d.width - 1)
        loss.backward()
        optimiser.step(factor)
        optimiser.zero()
        run_.tick(loss.detach(), f"block {d.width} lr {factor:.2f}")


def check(args: argparse.Namespace, length: int) -> None:
    """ConfigError for sizes that do not fit together."""
    if args.window * 2 > length or args.window < 32 or args.rows % 2 or args.block_tokens % 16:
        raise ConfigError(
            f"--window {args.window}, --rows {args.rows}, --block-tokens {args.block_tokens}: twice the window must fit "
            f"the captured length {length}, rows be even, block tokens a multiple of 16; change them"
        )
    if args.block_tokens // 8 > args.window - 17:
        raise ConfigError(f"--block-tokens {args.block_tokens} needs more anchors than --window {args.window} has; lower it")


def load_pool(net: TargetNet, args: argparse.Namespace, captured: Captured, dtype: torch.dtype) -> Pool:
    """The captured rows and a share of data rows (half pairs, half corpus), seen by the target."""
    device, length = net.embed.device, captured.ids.shape[1]
    tokens = load_tokens(args.data, net.shape, device, limit=args.data_tokens, corpus=args.corpus)
    mixture = Mixture(tokens, 0.5, 0.5, torch.Generator(device=device).manual_seed(args.seed + 1))
    mixture.check(length)
    limit = args.pool_gb * 1e9
    if device.type == "cuda":
        limit = min(limit, 0.6 * torch.cuda.mem_get_info()[0])
    most = limit / (length * net.shape.hidden * (len(net.shape.taps) + 1) * dtype.itemsize)
    extra = max(2, round(args.data_share * min(len(captured.ids), most)))
    return build_pool(net, captured, mixture.batch(extra, length), limit, dtype)


def run(args: argparse.Namespace) -> int:
    shape, draft = (SMOKE, SMOKE_DRAFT) if args.smoke else (NANO, NANO_DRAFT)
    device, dtype = device_of(args.device)
    torch.manual_seed(args.seed)
    net = export.load_target(args.model, shape.taps, device, dtype)
    captured = Captured.load(args.captured)
    check(args, captured.ids.shape[1])
    pool = load_pool(net, args, captured, dtype)
    say(f"pool: {len(pool.ids):,} rows x {pool.ids.shape[1]}, {(pool.taps.nbytes + pool.hidden.nbytes) / 1e9:.1f} GB")
    drafter = (export.read_drafter(args.init, net.shape) if args.init else DrafterNet(net.shape, draft)).to(device)
    optimiser = Optimiser(drafter, (), args.muon_lr, args.adam_lr)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out.with_name(args.out.name + "-state.pt")
    run_ = Piece(args, state, "drafter", {"net": drafter, "optimiser": optimiser}, generator)
    train(drafter, net, pool, optimiser, run_, args)
    run_.close()
    run_.save()
    size = export.save_drafter(drafter, args.out)
    facts = {
        "steps": run_.step, "trained_seconds": round(run_.trained, 1), "progress": round(run_.progress, 4),
        "pool_rows": len(pool.ids), "loss": round(run_.recent_loss(40), 4), "bytes": size,
        "checkpoint_bytes": size + export.folder_bytes(args.model),
    }  # fmt: skip
    history = run_.history[:: max(1, len(run_.history) // 60)]
    export.write_json(args.out.with_name(args.out.name + "-training.json"), {**facts, "history": history})
    report(list(facts.items()), facts)
    return 0
