"""The one door to the engine: text or messages in, completions out. Server, commands and Python users all come here.

from draftwood.llm import LLM
print(LLM("nano").generate("def fibonacci(n):")[0].text)
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from draftwood import env
from draftwood.config import Options, Plan
from draftwood.devices import detect
from draftwood.engine.loop import Engine
from draftwood.engine.request import Output, SamplingParams, Usage
from draftwood.engine.step import Parts
from draftwood.engine.totals import Totals
from draftwood.errors import ConfigError, RequestError
from draftwood.kv.store import DraftStore, LatentStore
from draftwood.model.drafter import Drafter
from draftwood.model.kimi import Target
from draftwood.model.layers import guesses
from draftwood.model.weights import dummy_drafter, dummy_target, load_drafter, load_target
from draftwood.parallel.comm import Comm, connect
from draftwood.parallel.layout import Layout
from draftwood.plan import Checkpoint, decide, find
from draftwood.spec.bigram import Bigram
from draftwood.spec.grammar import Grammars
from draftwood.spec.tree import WORTH, GrowOptions
from draftwood.text.chat import ChatTemplate
from draftwood.text.stream import TextStream
from draftwood.text.tokenizer import VOCAB_FILE, Tokenizer

if TYPE_CHECKING:
    from draftwood.text.tools import AnswerStream, Event

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None
Messages = Sequence[Mapping[str, Any]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Completion:
    """A finished answer. `token_ids`, `logprobs` and `text` end together; a stop string is not part of the text."""

    request_id: int
    """The engine's name of the request in its step records."""
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    """"stop": the model's end, a stop token or a stop string; "length": max_tokens or the context."""
    seed: int
    steps: int
    """Target forwards that decoded; the prompt's are not counted."""
    accept_length: float
    """Tokens per decoding step, the finally chosen one included."""
    tree_budget: int | str
    tok_s: float
    """Tokens of the answer per second from the request's first step to its last."""
    stage_ms: dict[str, float]
    """Milliseconds of the decoding steps by stage; steps shared with other requests count for each. All zero on a GPU, where a
    step is one graph: `bench step` times its stages."""
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    """Of the prompt's: found in the prefix cache."""


class LLM:
    """A loaded model. On ranks above 0 call `follow`, on rank 0 everything else; `close`, or use it in `with`."""

    def __init__(self, options: Options | str | None = None, **fields: Any) -> None:
        """Load what `options` describe, or Options(model, **fields). Raises ConfigError, one line, before loading."""
        if not isinstance(options, Options):
            options = Options(**fields) if options is None else Options(model=options, **fields)
        self.options = options
        self.checkpoint = find(options)
        self.tokenizer, self.template = _words(self.checkpoint)
        comm = connect(options.tp * options.ep)
        local = env.read_int("LOCAL_RANK")
        device = detect(options.device, comm.world, comm.rank if local is None else local)
        # Ranks may see different free memory; rank 0's decision is everybody's.
        self.plan: Plan = comm.broadcast(decide(options, self.checkpoint, device))
        self.engine = _engine(self.plan, self.checkpoint, comm)
        self._live: dict[int, Answer] = {}

    @property
    def rank(self) -> int:
        """This process's rank; only 0 takes requests."""
        return self.engine.parts.comm.rank

    def follow(self) -> None:
        """On ranks above 0: work for rank 0 until it closes."""
        self.engine.follow()

    def warm(self) -> None:
        """Do now what the first requests would wait for, seconds: a GPU's graphs of all sizes, the process that tries grammars."""
        grammars = self.engine.parts.grammars
        if grammars is not None and self.rank == 0:
            grammars.begin()
        self.engine.stepper.warm()
        if grammars is not None:
            grammars.warm()

    def close(self) -> None:
        """End the other ranks; the object is of no use afterwards."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] = None, allow_special: bool = False
    ) -> list[Completion]:
        """Complete one prompt or many together, each text or token ids; return completions in the same order.

        `params` are for all, or one for each. With `allow_special` the names of control tokens in a text are those
        tokens. Raises RequestError, before anything runs, when one of them cannot be served.
        """
        if not isinstance(prompts, Sequence):
            raise RequestError(f"prompts is {type(prompts).__name__}; give a text, token ids, or a list of these", "prompt")
        one = isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], int)
        many: list[Any] = [prompts] if one else list(prompts)
        each: list[Any] = [params] * len(many)
        if isinstance(params, Sequence):
            each = list(params)
            if len(each) != len(many):
                raise RequestError(f"{len(many)} prompts came with {len(each)} sampling parameters", "params")
        return self._run([(self.encode(prompt, allow_special), p) for prompt, p in zip(many, each, strict=True)])

    def chat(
        self, messages: Messages | Sequence[Messages], params: Params = None, tools: Any = None, **template: Any
    ) -> list[Completion]:
        """Answer one conversation or many together; `template` goes to the chat template (thinking and the like).

        Raises RequestError when a conversation cannot be rendered or served.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        many: list[Any] = [messages] if one else list(messages)
        return self._run([(self.chat_ids(m, tools, **template), params) for m in many])

    def chat_ids(self, messages: Messages, tools: Any = None, **template: Any) -> list[int]:
        """Return the token ids of a conversation, ready for the answer."""
        if self.template is None:
            raise RequestError(f"{self.plan.model_path} has no chat template; use generate with a text", "messages")
        return self.template.encode(messages, tools, **template)

    def stream(self, prompt: Prompt, params: Params = None, allow_special: bool = False) -> Generator[str | Completion]:
        """Yield the answer's text as it grows, then the Completion. Closing the iterator aborts the request."""
        answer = self.start(self.encode(prompt, allow_special), params)
        try:
            while True:
                if text := answer.take():
                    yield text
                elif answer.reason is not None:
                    break
                else:
                    self.advance()
            yield self.finish(answer)
        finally:
            self.drop(answer)

    def encode(self, prompt: Any, allow_special: bool = False) -> list[int]:
        """Return a prompt, text or token ids, as token ids. Raises RequestError."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{self.plan.model_path} has no tokenizer; give the prompt as token ids", "prompt")
            return self.tokenizer.encode(prompt, allow_special)
        if not isinstance(prompt, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in prompt):
            raise RequestError("the prompt is neither a text nor a list of token ids", "prompt")
        return list(prompt)

    def _run(self, asks: Sequence[tuple[list[int], Any]]) -> list[Completion]:
        answers: list[Answer] = []
        try:
            for ids, params in asks:
                answers.append(self.start(ids, params))
            while any(answer.reason is None for answer in answers):
                self.advance()
            return [self.finish(answer) for answer in answers]
        finally:
            for answer in answers:
                self.drop(answer)

    def check(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError for what `start` would refuse. Changes nothing, so any thread may ask."""
        self._check_stops(params)
        self.engine.check(ids, params)

    def _check_stops(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer, and this model has none; use stop_token_ids", "stop")

    def start(self, ids: Sequence[int], params: Params = None, reader: AnswerStream | None = None) -> Answer:
        """Queue a prompt of token ids; `advance` makes its answer grow. Raises RequestError.

        With a `reader` the answer consists of events, else of text. It has to be told of `params.stop` itself.
        """
        if not isinstance(params, SamplingParams):
            params = SamplingParams() if params is None else SamplingParams.of(params)
        params = params.seeded()
        self._check_stops(params)
        answer = Answer(self.engine.add(ids, params), params, self.tokenizer, reader)
        self._live[answer.id] = answer
        return answer

    def advance(self) -> list[Answer]:
        """Run one engine step; return the answers that grew, those that ended among them."""
        grown = []
        for output in self.engine.step():
            answer = self._live.get(output.request_id)
            if answer is None:
                continue
            answer.add(output)
            grown.append(answer)
            if answer.reason is not None:
                self.drop(answer)
        return grown

    def drop(self, answer: Answer) -> None:
        """Forget an answer, whether it has ended or not."""
        if self._live.pop(answer.id, None) is not None:
            self.engine.abort(answer.id)

    def rest(self) -> None:
        """Keep the other ranks waiting while there is nothing to do; call it more often than DRAFTWOOD_RANK_TIMEOUT."""
        self.engine.rest()

    def state(self) -> State:
        """Return how busy the engine is. Any thread may ask."""
        scheduler = self.engine.scheduler
        return State(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=scheduler.pool.num_pages,
            free_pages=scheduler.available,
            preemptions=scheduler.preemptions,
            totals=self.engine.totals,
        )

    def finish(self, answer: Answer) -> Completion:
        """Return an answer that has ended as a Completion. Raises the RequestError that ended it, if one did."""
        if answer.error is not None:
            raise answer.error
        usage, count = answer.usage, len(answer.token_ids)
        asked = answer.params.tree_budget
        budget = self.options.tree_budget if asked is None else asked
        seconds = usage.ended - usage.started
        return Completion(
            request_id=answer.id,
            text=answer.text,
            token_ids=answer.token_ids,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=count,
            finish_reason=answer.reason or "abort",
            seed=answer.params.seed or 0,
            steps=usage.steps,
            accept_length=round(usage.accept_length, 4),
            tree_budget=budget if self.plan.block else 0,
            tok_s=round(count / seconds, 2) if seconds > 0 else 0.0,
            stage_ms={stage: round(1000 * s, 3) for stage, s in usage.stage_seconds.items()},
            logprobs=answer.logprobs if answer.params.logprobs is not None else None,
            top_logprobs=answer.top_logprobs if answer.params.logprobs else None,
            cached_tokens=usage.cached_tokens,
        )


@contextlib.contextmanager
def leading(options: Options) -> Iterator[LLM | None]:
    """The model that `options` describe, on rank 0; ranks above it work for rank 0 until it closes, and then get None."""
    with LLM(options) as llm:
        if llm.rank > 0:
            llm.follow()
            yield None
        else:
            yield llm


@dataclass(frozen=True)
class Delta:
    """What came of one request since it was last asked. Text that stop strings or UTF-8 hold back comes later."""

    text: str
    events: list[Event]
    """Reasoning, content and tool calls, in place of `text` for an answer that is read by an AnswerStream."""
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class State:
    """How busy an engine is. Counts are of requests and pages."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    """Pages that can be had, those that only the prefix cache holds among them."""
    totals: Totals
    preemptions: int = 0
    """Rows that gave up their pages to older ones, since the beginning."""


@dataclass
class Answer:
    """What has come of one request so far, as text and as tokens."""

    id: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    reader: AnswerStream | None = None
    """Takes the place of plain text where reasoning and tool calls are told apart."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    events: list[Event] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None
    """The caller's stop string or stop token that ended the answer."""
    usage: Usage = field(default_factory=Usage)
    error: RequestError | None = None
    _shown: int = 0
    _told: tuple[int, int] = (0, 0)
    _stream: TextStream | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.reader is None:
            self._stream = TextStream(self.tokenizer, self.params.stop, self.tokenizer.silent)

    def add(self, output: Output) -> None:
        """Take a step's tokens; a stop string ends the answer with the token that completes it."""
        try:
            used = self._words(output)
        except RequestError as error:  # this answer's own fault; the others go on
            self.error, self.reason = error, "error"
            return
        self.token_ids += output.token_ids[:used]
        self.logprobs += (output.logprobs or ())[:used]
        self.top_logprobs += [list(place) for place in (output.top_logprobs or ())[:used]]
        self.usage = output.usage
        if used < len(output.token_ids):
            cut = len(output.token_ids) - used
            self.usage.completion_tokens -= cut
            self.usage.decoded -= cut if self.usage.steps else 0

    def _words(self, output: Output) -> int:
        """Extend the text and the reason; return how many of the tokens belong to the answer.

        The token that ends an answer is one of them but gives no text, whatever it spells.
        """
        self.reason, ids = output.finish_reason, output.token_ids
        if self._stream is None and self.reader is None:
            return len(ids)
        ended = self.reason == "stop"
        used, stop = self._read(ids[:-1] if ended else ids)
        if self.reason is None and stop is None:
            return used
        if ended and stop is None:
            used += 1
            self.stop = ids[-1] if ids[-1] in self.params.stop_token_ids else None
        stop = self._end(self.reason if stop is None else "stop") or stop
        if stop is not None:
            self.reason, self.stop = "stop", stop
        return used

    def _read(self, ids: Sequence[int]) -> tuple[int, str | None]:
        """Turn tokens into text or events; return how many were used and the stop string found."""
        if self.reader is not None:
            part = self.reader.push(ids)
            self.events += part.events
            return part.used, part.stop
        assert self._stream is not None
        piece = self._stream.push(ids)
        self.text += piece.text
        return piece.used, piece.stop

    def _end(self, reason: str | None) -> str | None:
        """Give out what was held back; return the stop string that it completes."""
        if self.reader is not None:
            part = self.reader.finish(reason)
            self.events += part.events
            return part.stop
        assert self._stream is not None
        last = self._stream.finish()
        self.text += last.text
        return last.stop

    def take(self) -> str:
        """Return the text that was not taken yet."""
        new, self._shown = self.text[self._shown :], len(self.text)
        return new

    def news(self) -> Delta:
        """Return everything that was not taken yet."""
        tokens, events = self._told
        self._told = len(self.token_ids), len(self.events)
        return Delta(
            text=self.take(),
            events=self.events[events:],
            token_ids=self.token_ids[tokens:],
            logprobs=self.logprobs[tokens:],
            top_logprobs=self.top_logprobs[tokens:],
        )


def _engine(plan: Plan, checkpoint: Checkpoint, comm: Comm) -> Engine:
    """The engine of a plan, on its device. Raises ConfigError for a bad checkpoint and for what a GPU cannot run."""
    stop_ids = checkpoint.config.stop_ids
    if plan.device != "cuda":
        return Engine(build(plan, checkpoint, comm), plan, stop_ids)
    from draftwood.engine.cuda.build import start  # what a CPU has no use for

    bigram = _bigram(plan.options, checkpoint) if plan.block else None
    folders = checkpoint.folder, checkpoint.draft_folder
    parts, stepper = start(plan, checkpoint.config, checkpoint.drafter, folders, bigram, comm, _grammars(checkpoint))
    return Engine(parts, plan, stop_ids, stepper)


def build(plan: Plan, checkpoint: Checkpoint, comm: Comm) -> Parts:
    """Load the weights of this rank and allocate exactly what `plan` says. Raises ConfigError for a bad checkpoint."""
    options, config, drafter_config = plan.options, checkpoint.config, checkpoint.drafter
    layout = Layout(options.tp, options.ep, comm.rank)
    dtype, device = DTYPES[plan.dtype], plan.device
    dummy = options.load_format == "dummy" or checkpoint.folder is None
    if dummy or checkpoint.folder is None:
        weights = dummy_target(config, layout, dtype, device)
    else:
        weights = load_target(checkpoint.folder, config, layout, dtype, device)
    drafts = plan.block > 0 and drafter_config is not None
    taps = drafter_config.taps if drafts and drafter_config else ()
    target = Target(config, weights, layout, comm, taps, dtype)
    parts = Parts(
        target=target,
        kv=LatentStore(config.num_layers, plan.num_pages, plan.page_size, config.latent_width, dtype, device),
        comm=comm,
        vocab=config.vocab_size,
        positions=config.max_position,
        block=plan.block,
        options=GrowOptions(topk_cap=options.topk_cap, spine=options.tree_spine, worth=WORTH),
        bigram=_bigram(options, checkpoint) if drafts else None,
        noise=options.noise,
        device=device,
        grammars=_grammars(checkpoint),
    )
    if drafts and drafter_config is not None:
        if dummy or checkpoint.draft_folder is None:
            own = dummy_drafter(drafter_config, layout, dtype, device)
        else:
            own = load_drafter(checkpoint.draft_folder, drafter_config, layout, dtype, device)
        head = guesses(weights.lm_head, target.lm_head)
        parts.drafter = Drafter(drafter_config, own, layout, comm, target.embed, head, dtype, coarse=True)
        heads = len(layout.kv_heads(drafter_config.num_heads, drafter_config.num_kv_heads))
        parts.draft_kv = DraftStore(
            drafter_config.num_layers, plan.max_num_seqs, plan.window, heads, drafter_config.head_dim, dtype, device,
            slots=(plan.num_pages + 1) * plan.page_size if options.enable_prefix_caching else 0,
        )  # fmt: skip
    return parts


def _grammars(checkpoint: Checkpoint) -> Grammars | None:
    """Return the grammars of a checkpoint with a vocabulary, which is read when one is first asked for."""
    folder, config = checkpoint.folder, checkpoint.config
    if folder is None or not (folder / VOCAB_FILE).exists():
        return None

    def load() -> tuple[list[bytes], dict[str, int]]:
        words = Tokenizer.load(folder)
        return [words.token_bytes(id) for id in range(words.vocab_size)], words.special

    return Grammars(load, config.stop_ids, config.vocab_size)


def _bigram(options: Options, checkpoint: Checkpoint) -> Bigram | None:
    """Load the previous-token table: the one beside the drafter if there is one, the named one, or none."""
    if options.bigram == "none":
        return None
    if options.bigram != "auto":
        return Bigram.load(options.bigram, checkpoint.config.vocab_size)
    beside = Path(checkpoint.draft_folder or "") / "bigram.safetensors"
    if checkpoint.draft_folder is None or not beside.exists():
        return None
    return Bigram.load(beside, checkpoint.config.vocab_size)


def _words(checkpoint: Checkpoint) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Load tokenizer and chat template; random weights do without the files they lack."""
    folder = checkpoint.folder
    if folder is None:
        return None, None
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens but config.json says vocab_size "
            f"{checkpoint.config.vocab_size}; use the files of one checkpoint"
        )
    return tokenizer, ChatTemplate.find(folder, tokenizer)
