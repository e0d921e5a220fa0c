"""A training run in pieces: the clock that drives its schedule, its history, its saved state, its progress bar.

The schedule is a function of *trained* time over the whole planned time. Trained time starts after the first
steps of a piece, so that compiling costs no schedule, and goes on exactly where the last piece stopped.
"""

from __future__ import annotations

import argparse
import math
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from draftwood.errors import ConfigError, DraftwoodError
from draftwood.train.optim import continued, rate

STARTED = time.monotonic()  # of this module, a few seconds after the process's
SAVE_EVERY = 120.0
LOOK_EVERY = 25  # steps between two readings of the loss (each waits for the device)


def add_arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Options of a run in pieces."""
    parser.add_argument("--seconds", type=float, default=seconds, help="train this long in this piece (compiling excluded)")
    parser.add_argument("--total-seconds", type=float, help="length of the whole run (default: this piece, or what was said first)")
    parser.add_argument("--deadline", type=float, default=math.inf, help="stop training this many seconds after start-up")
    parser.add_argument("--resume", action="store_true", help="go on from OUT's saved state")
    parser.add_argument("--init", type=Path, metavar="FOLDER", help="begin with the weights of this checkpoint, not at random")
    parser.add_argument(
        "--lr-share", type=float, default=0.4, help="with --init: the learning rates begin at this share, end at 2 %%"
    )
    parser.add_argument("--steps", type=int, help="stop this piece after so many steps")
    parser.add_argument("--total-steps", type=int, help="drive the schedule by steps instead of seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="do not compile (CUDA only; the CPU never does)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes for tests")


def device_of(name: str) -> tuple[torch.device, torch.dtype]:
    """Device and the dtype to compute in: bf16 on CUDA, fp32 on the CPU."""
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not one of cpu, cuda; name one of them")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but no CUDA device is visible; use --device cpu")
    return torch.device(name), torch.bfloat16 if name == "cuda" else torch.float32


def say(text: str) -> None:
    """One line of progress on stderr, with the age of the process."""
    tqdm.write(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr)


class Piece:
    """Clock, history and state file of one piece. `parts` are objects with state_dict / load_state_dict."""

    def __init__(self, args: argparse.Namespace, path: Path, name: str, parts: dict[str, Any], generator: torch.Generator) -> None:
        if args.seconds <= 0 or (args.total_seconds is not None and args.total_seconds < args.seconds and not args.resume):
            raise ConfigError(
                f"--seconds {args.seconds} of --total-seconds {args.total_seconds}: both must be positive, the piece no "
                "longer than the whole; change them"
            )
        if args.init and (args.resume or not 0 < args.lr_share <= 1):
            raise ConfigError(
                f"--init with --lr-share {args.lr_share}{' and --resume' if args.resume else ''}: the share must lie in 0..1, "
                "and a resumed run already has weights; leave --init out"
            )
        self.share: float | None = args.lr_share if args.init else None
        self.args, self.path, self.parts, self.generator = args, path, parts, generator
        self.total = args.total_seconds or args.seconds
        self.step, self.trained, self.history = 0, 0.0, []  # type: ignore[var-annotated]
        self.first_step, self.before = 0, 0.0
        self.clock: float | None = None
        self.saved = time.monotonic()
        if args.resume:
            self.load()
        self.bar = tqdm(
            total=100, desc=name, file=sys.stderr, disable=None, bar_format="{desc}: {percentage:5.1f}% |{bar:20}| {postfix}"
        )  # fmt: skip

    @property
    def progress(self) -> float:
        """Share of the whole run that is done, 0..1."""
        if self.args.total_steps:
            return min(1.0, self.step / self.args.total_steps)
        return min(1.0, self.trained / self.total)

    @property
    def factor(self) -> float:
        """Factor on the learning rates at this step."""
        if self.share is None:
            return rate(self.progress, self.step)
        return continued(self.progress, self.step, self.share)

    def running(self) -> bool:
        """False when the piece or the run has ended."""
        done = self.step - self.first_step
        if self.progress >= 1 or (self.args.steps is not None and done >= self.args.steps):
            return False
        timed_out = not self.args.total_steps and self.trained - self.before >= self.args.seconds
        return not timed_out and time.monotonic() - STARTED < self.args.deadline

    def looks(self) -> bool:
        """Whether the next tick will read the loss (which waits for the device)."""
        done = self.step + 1 - self.first_step
        return done <= 3 or (self.step + 1) % LOOK_EVERY == 0 or bool(self.args.total_steps)

    def tick(self, loss: Tensor, note: str = "") -> bool:
        """Count one step; now and then read the loss and the clock, save, and say so. True when the loss was read."""
        looks = self.looks()
        self.step += 1
        if not looks:
            return False
        done = self.step - self.first_step
        value, now = float(loss), time.monotonic()
        if not math.isfinite(value):
            raise DraftwoodError(f"loss became {value} at step {self.step}; resume from {self.path} with another --seed")
        if done == 3:
            self.clock = now
            say(f"first 3 steps done, loss {value:.3f}")
        elif self.clock is not None:
            self.trained = self.before + now - self.clock
        self.history.append((self.step, round(self.trained, 1), round(value, 4)))
        pace = (done - 3) / max(self.trained - self.before, 1e-9)
        self.bar.n = round(100 * self.progress, 1)
        self.bar.set_postfix_str(f"step {self.step} loss {value:.4f} {pace:.1f} steps/s {note}")
        if self.step % 500 == 0:
            say(f"step {self.step} trained {self.trained:.0f} s loss {self.recent_loss(4):.4f} {1000 / pace:.1f} ms/step {note}")
        if now - self.saved > SAVE_EVERY:
            self.save()
        return True

    def recent_loss(self, count: int = 20) -> float:
        """Mean of the last readings."""
        values = [v for _, _, v in self.history[-count:]]
        return sum(values) / max(1, len(values))

    def save(self) -> None:
        """Write the whole state, replacing the old file only when the new one is complete."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        facts = {
            "step": self.step,
            "trained": self.trained,
            "total": self.total,
            "share": self.share,
            "history": self.history,
            "generator": self.generator.get_state(),
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save({**state, "piece": facts}, temporary)
        temporary.replace(self.path)
        self.saved = time.monotonic()

    def load(self) -> None:
        """Read the state of the last piece. ConfigError when missing, damaged or of other shapes."""
        if not self.path.is_file():
            raise ConfigError(f"--resume, but {self.path} does not exist; start without --resume or give the right --out")
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
        except (RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"{self.path} does not fit this run ({reason}); start again without --resume") from None
        facts = state["piece"]
        self.total, self.share = self.args.total_seconds or facts["total"], facts.get("share")
        self.step, self.trained, self.history = facts["step"], facts["trained"], list(facts["history"])
        self.first_step, self.before = self.step, self.trained
        self.generator.set_state(facts["generator"])

    def close(self) -> None:
        self.bar.close()
