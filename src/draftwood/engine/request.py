"""What a caller asks of one request, and what comes back. Token ids and numbers; no text, no torch."""

from __future__ import annotations

import argparse
import dataclasses
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwood.config import MAX_BUDGET, STAGES
from draftwood.errors import RequestError
from draftwood.spec.formats import Grammar, response_grammar

MAX_TOKENS = 1 << 22
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 100.0
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
LOW_SEED, HIGH_SEED = -(1 << 63), (1 << 63) - 1


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Every value is checked; RequestError names the field at fault.

    Fields whose metadata has `help` are command-line flags of the same name.
    """

    max_tokens: int | None = _flag(256, "most new tokens (the context is always a limit)", parse=int)
    temperature: float = _flag(0.0, "0: always the best token; above: sampling", parse=float)
    top_p: float = _flag(1.0, "sample from the best tokens that hold this share of probability", parse=float)
    top_k: int = _flag(0, "sample from the best K tokens, 0: all", parse=int)
    min_p: float = _flag(0.0, "leave out tokens below this share of the best one's probability", parse=float)
    seed: int | None = _flag(None, "seed of the sampling noise (default: a random one, reported)", parse=int)
    stop: tuple[str, ...] = _flag((), "end before this text; may be given again", parse=str, action="append")
    presence_penalty: float = _flag(0.0, "subtract from tokens that were generated already", parse=float)
    frequency_penalty: float = _flag(0.0, "subtract for each time a token was generated", parse=float)
    repetition_penalty: float = _flag(1.0, "divide tokens of prompt and answer by this", parse=float)
    ignore_eos: bool = _flag(False, "go on after the model's end tokens")
    min_tokens: int = _flag(0, "no end token and no stop token before this many", parse=int)
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """None: none; n: log-probability of the chosen token and of the n most likely ones."""
    tree_budget: int | str | None = None
    """None: the engine's; else this request's own, "auto" or 0..64."""
    response_format: Mapping[str, Any] | None = None
    """What the answer has to look like, as spec.formats describes it."""
    grammar: Grammar | None = None
    """The same as a grammar: made from `response_format`, or given alone, as for a required tool call."""

    def __post_init__(self) -> None:
        self._whole("max_tokens", 1, MAX_TOKENS, optional=True)
        self._whole("min_tokens", 0, MAX_TOKENS if self.max_tokens is None else self.max_tokens)
        self._number("temperature", 0.0, MAX_TEMPERATURE)
        if 0 < self.temperature < MIN_TEMPERATURE:
            message = f"temperature {self.temperature} is between 0 and {MIN_TEMPERATURE}; use 0 for greedy"
            raise RequestError(message, "temperature")
        self._number("top_p", 0.0, 1.0, above=True)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._whole("top_k", 0, 1 << 31)
        self._number("min_p", 0.0, 1.0)
        self._whole("seed", LOW_SEED, HIGH_SEED, optional=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, 100.0, above=True)
        self._whole("logprobs", 0, MAX_LOGPROBS, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos {_show(self.ignore_eos)} is not true or false", "ignore_eos")
        if self.tree_budget != "auto":
            self._whole("tree_budget", 0, MAX_BUDGET, optional=True)
        self._stops()
        self._biases()
        self._form()

    def _form(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar {_show(self.grammar)} is not a Grammar; use response_format", "grammar")
        if self.grammar is None:
            object.__setattr__(self, "grammar", response_grammar(self.response_format))
        if self.grammar is not None and self.min_tokens:
            raise RequestError("min_tokens does not go with response_format, which says itself when to end", "min_tokens")

    def _number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} {_show(value)} is not a number", name)
        if isinstance(value, int) and abs(value) > 1 << 53 or not math.isfinite(value):
            raise RequestError(f"{name} {_show(value)} is not a finite number in {low:g}..{high:g}", name)
        if not low <= value <= high or above and value == low:
            bounds = f"above {low:g} and at most {high:g}" if above else f"in {low:g}..{high:g}"
            raise RequestError(f"{name} {_show(value)} is out of bounds; choose a value {bounds}", name)
        object.__setattr__(self, name, float(value))

    def _whole(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} {_show(value)} is not a whole number", name)
        if not low <= value <= high:
            raise RequestError(f"{name} {_show(value)} is out of bounds; choose a value in {low}..{high}", name)

    def _stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = () if stop is None else stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
            raise RequestError(f"stop {_show(self.stop)} is not a text or a list of texts", "stop")
        if len(stop) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_LENGTH for s in stop):
            raise RequestError(f"stop takes up to {MAX_STOPS} texts of 1..{MAX_STOP_LENGTH} characters each", "stop")
        object.__setattr__(self, "stop", tuple(stop))
        if self.min_tokens and stop:
            raise RequestError("min_tokens does not go with stop texts; use stop_token_ids", "min_tokens")
        ids = self.stop_token_ids
        if not isinstance(ids, list | tuple) or not all(_is_token(i) for i in ids) or len(ids) > MAX_BIASES:
            message = f"stop_token_ids {_show(ids)} is not a list of up to {MAX_BIASES} token ids"
            raise RequestError(message, "stop_token_ids")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _biases(self) -> None:
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or not all(_is_token(i) for i in bias) or len(bias) > MAX_BIASES:
            message = f"logit_bias {_show(bias)} does not map up to {MAX_BIASES} token ids to numbers"
            raise RequestError(message, "logit_bias")
        for token, value in bias.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                message = f"logit_bias of token {token} is {_show(value)}; choose a number in -100..100"
                raise RequestError(message, "logit_bias")
        object.__setattr__(self, "logit_bias", {int(i): float(v) for i, v in bias.items()})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from names and values. Raises RequestError for a name that is no field, too."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                message = f"{_show(name)} is not a sampling parameter; known: {', '.join(sorted(known))}"
                raise RequestError(message, str(name))
        return cls(**values)

    def seeded(self) -> SamplingParams:
        """Return these parameters with a seed: their own, or a random one."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(32))

    @property
    def counts_tokens(self) -> bool:
        """True when choosing depends on which tokens came before (penalties)."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _show(value: Any) -> str:
    """The value as a message shows it: short and on one line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"({type(value).__name__} too long to show)"
    return text if len(text) <= 60 else text[:57] + "..."


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of SamplingParams to a command's parser."""
    group = parser.add_argument_group("sampling")
    for f in dataclasses.fields(SamplingParams):
        if "help" not in f.metadata:
            continue
        flag = f"--{f.name.replace('_', '-')}"
        help = f.metadata["help"] + ("" if f.default in (None, (), False) else f" (default {f.default})")
        if f.default is False:
            group.add_argument(flag, action="store_true", help=help)
        else:
            # argparse appends to the default itself, so an appended flag starts from None
            extra = {k: f.metadata[k] for k in ("action",) if k in f.metadata}
            group.add_argument(flag, type=f.metadata["parse"], default=None if extra else f.default, help=help, **extra)


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """Build SamplingParams from parsed flags; fields the command did not offer keep their defaults."""
    names = {f.name for f in dataclasses.fields(SamplingParams) if "help" in f.metadata}
    given = {k: v for k, v in vars(args).items() if k in names and not (k == "stop" and v is None)}
    return SamplingParams(**given)


@dataclass(frozen=True)
class Request:
    """One prompt with its parameters; `params.seed` is set."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Usage:
    """What a request has cost so far.

    `steps` are the target forwards that decoded for it (prompt chunks are `prompt_steps`); seconds of a step that
    several requests share count for each of them.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt whose latents were in the cache already."""
    completion_tokens: int = 0
    prompt_steps: int = 0
    steps: int = 0
    decoded: int = 0
    """Tokens that the decoding steps returned; the prompt's last chunk returns the first token of the answer."""
    nodes: int = 0
    """Tree nodes beyond the root that were verified."""
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Of the decoding steps."""
    started: float = 0.0
    """Monotonic seconds of the first step; `ended` of the last one."""
    ended: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per decoding step, the finally chosen one included; 1 when nothing was decoded yet."""
        return self.decoded / self.steps if self.steps else 1.0


class Output(NamedTuple):
    """What one step added to one request. A tuple, which is made in a fifth of the time that a frozen dataclass takes: every row of
    every step has one."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Log-probability of each token under the target's raw logits, before any filter; None when not asked for."""
    finish_reason: str | None
    """None while it runs; "stop", "length" or "abort" with its last tokens."""
    usage: Usage
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
