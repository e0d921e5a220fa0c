"""Commands that run a model on several ranks: who starts them, who writes."""

from __future__ import annotations

import argparse

from draftwood import env, plan
from draftwood.config import Options
from draftwood.parallel import launch

_ANY_MEMORY = plan.Device("cpu", "any device", 1 << 60)


def start(args: argparse.Namespace, options: Options, drains: bool = False) -> int | None:
    """Run the command again as the ranks that `options` ask for; return its exit code, None where this process is to
    do the work itself. With `drains`, rank 0 decides when SIGTERM ends it. Options that no rank could accept are
    refused here, before any rank starts."""
    world = options.tp * options.ep
    if world == 1 or launch.is_rank():
        return None
    plan.decide(options, plan.find(options), _ANY_MEMORY, strict=False)
    return launch.run_ranks(args.argv, world, drains=drains)


def is_first() -> bool:
    """Tell whether this process is rank 0 or the only one: it reads stdin, decides, and writes the results."""
    return not launch.is_rank() or env.read_int("RANK") == 0
