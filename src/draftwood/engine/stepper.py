"""What runs the steps that a loop plans: `launch` begins one, `read` waits for what came of it.

A CPU has done a step when `launch` returns. A GPU takes the next one before the last one is read, so a loop may be `ahead`
by a step, and lengths of rows that decode are then known only within bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from draftwood.engine.request import SamplingParams
from draftwood.engine.rows import Rows
from draftwood.engine.scheduler import StepPlan
from draftwood.engine.step import Parts, StepResult, step
from draftwood.errors import ConfigError


class Pending(Protocol):
    """A step that was launched."""

    def read(self) -> StepResult:
        """Wait for the step and return its result, on the host. Call once, in the order of launches."""


class Stepper(Protocol):
    """Advances rows by steps, in the order they are launched."""

    @property
    def ahead(self) -> int:
        """How many steps may be launched before the oldest of them is read."""

    def launch(self, plan: StepPlan, trace: bool = False) -> Pending:
        """Begin a step. With `trace` its result tells all nodes."""

    def refuse(self, params: SamplingParams) -> None:
        """Raise RequestError, by name, for a parameter that these steps do not know."""

    def warm(self) -> None:
        """Do now what the first steps of each size would wait for."""

    def tell_bits(self, tell: bool) -> None:
        """Have results tell the bits of the logits behind every committed token (`StepResult.prints`), or no longer. Raises
        ConfigError where steps do not promise the same bits for any tree."""


@dataclass(frozen=True)
class Done:
    """A step that ended before it could be asked for."""

    result: StepResult

    def read(self) -> StepResult:
        """Return the result."""
        return self.result


class HostStepper:
    """Steps on a CPU, one after another, by torch."""

    ahead = 0

    def __init__(self, parts: Parts, rows: Rows) -> None:
        self.parts, self.rows = parts, rows

    def launch(self, plan: StepPlan, trace: bool = False) -> Done:
        """Run the step to its end."""
        return Done(step(self.parts, self.rows, plan, trace))

    def refuse(self, params: SamplingParams) -> None:
        """A CPU's steps know every parameter."""

    def warm(self) -> None:
        """A CPU's first steps wait for nothing."""

    def tell_bits(self, tell: bool) -> None:
        """A CPU's sums depend on the number of rows. Raises ConfigError when asked for their bits."""
        if tell:
            raise ConfigError("the bits of logits are the same for any tree on a GPU only; add --device cuda")
