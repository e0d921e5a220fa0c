"""Between the routes and the engine: what a request's fields become, and what is refused before it is queued."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from draftwood.engine.request import SamplingParams
from draftwood.errors import ConfigError, RequestError
from draftwood.server.exchange import Exchange
from draftwood.server.metrics import Metrics
from draftwood.server.protocol import Asked, ChatRequest, CompletionRequest
from draftwood.server.runner import Runner, Ticket, Update
from draftwood.text.tools import AnswerStream, opens_reasoning

if TYPE_CHECKING:
    from draftwood.llm import LLM

BYTES_PER_TOKEN = 16
"""Of a request's body, generously: JSON escapes of three-byte characters, and the object around the text."""
BASE_BYTES = 1 << 20
DEFAULTS_FILE = "generation_config.json"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """How a server was started."""

    names: tuple[str, ...]
    """What the model is called; answers carry the first name."""
    api_keys: tuple[str, ...] = ()
    max_queue: int = 256
    """Requests that may wait beyond those that run."""
    max_request_bytes: int | None = None
    """None: what the context could hold, generously."""
    keep_alive: float = 10.0
    """Seconds of silence before a stream sends a comment."""
    shutdown_timeout: float = 30.0
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call."""


class Service:
    """One server: its settings, its engine's runner and its metrics."""

    def __init__(self, settings: Settings, load: Callable[[], LLM]) -> None:
        self.settings = settings
        self.created = int(time.time())
        self._defaults: dict[str, Any] = {}
        """Sampling where a request says nothing: the checkpoint's generation_config.json, else OpenAI's temperature 1."""
        self.runner = Runner(lambda: self._load(load), lambda llm: llm.plan.max_num_seqs + settings.max_queue)
        self.metrics = Metrics(self.runner, settings.names[0])
        # Tokenizing and trying grammars are slow; these threads keep the event loop free of them. Grammars are tried in
        # a process of their own, one at a time, so there are enough threads that waiting for it holds nobody else up.
        self._workers = ThreadPoolExecutor(8, thread_name_prefix="prepare")

    def _load(self, load: Callable[[], LLM]) -> LLM:
        llm = load()
        try:
            self._defaults = {"temperature": 1.0, **_stated(llm)}
        except ConfigError:
            llm.close()
            raise
        return llm

    @property
    def max_bytes(self) -> int:
        """Most bytes of a body."""
        if self.settings.max_request_bytes is not None:
            return self.settings.max_request_bytes
        llm = self.runner.llm
        return BASE_BYTES + (0 if llm is None else BYTES_PER_TOKEN * llm.plan.max_model_len)

    async def work(self, call: Callable[[], Result]) -> Result:
        """Run `call` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    def check_model(self, name: str | None) -> None:
        """Raise RequestError for a model that is not served."""
        if name is not None and name not in self.settings.names:
            raise RequestError(
                f"the model {name[:80]!r} does not exist here; served: {', '.join(self.settings.names)}",
                "model",
                code="model_not_found",
            )

    async def chat(self, ask: ChatRequest, llm: LLM) -> tuple[Exchange, list[Ticket]]:
        """Open the answers of a chat. Raises RequestError, Overloaded or HttpError before anything is queued."""
        self._common(ask)
        tools = ask.offered_tools()
        template = ask.template()
        heeds = frozenset() if llm.template is None else llm.template.heeds
        unheeded = template.keys() - heeds - {"add_generation_prompt"}
        self.metrics.saw_unknown([f"chat_template_kwargs.{name}" for name in sorted(unheeded)])

        def prepare() -> tuple[list[int], SamplingParams, frozenset[int]]:
            ids = llm.chat_ids(ask.rendered_messages(), tools, **template)
            special = {} if llm.tokenizer is None else llm.tokenizer.special
            params = replace(ask.sampling(self._defaults), grammar=ask.required_tools(special))
            asked = params.stop_token_ids
            if params.grammar is None:
                params = replace(params, stop_token_ids=(*asked, *ask.ends(special)))
            llm.check(ids, params)
            return ids, params, frozenset(params.stop_token_ids) - frozenset(asked)

        with _named({"prompt": "messages", "max_tokens": _limit_name(ask)}):
            ids, params, ends = await self.work(prepare)
        tokenizer = llm.tokenizer
        assert tokenizer is not None, "a chat template comes with a tokenizer"
        inside = opens_reasoning(ids, tokenizer)
        readers = [AnswerStream(tokenizer, params.stop, inside, tools) for _ in range(ask.n or 1)]
        return self._open([(ids, choice_params(params, i), reader) for i, reader in enumerate(readers)], ends)

    async def complete(self, ask: CompletionRequest, llm: LLM) -> tuple[Exchange, list[Ticket]]:
        """Open the answers of a completion: `n` for each prompt, in order. Raises as `chat`."""
        self._common(ask)
        prompts = ask.prompts()

        def prepare() -> tuple[list[list[int]], SamplingParams]:
            params = ask.sampling(self._defaults)
            each = [llm.encode(prompt) for prompt in prompts]
            for ids in each:
                llm.check(ids, params)
            return each, params

        each, params = await self.work(prepare)
        return self._open([(ids, choice_params(params, i), None) for ids in each for i in range(ask.n or 1)])

    def _common(self, ask: Asked) -> None:
        self.check_model(ask.model)
        self.metrics.saw_unknown(ask.unknown())

    def _open(
        self, asks: Sequence[tuple[list[int], SamplingParams, AnswerStream | None]], ends: frozenset[int] = frozenset()
    ) -> tuple[Exchange, list[Ticket]]:
        exchange = Exchange(self.runner, self._observe, self.metrics.left)
        if len(asks) > (most := self.runner.most()):
            raise RequestError(f"{len(asks)} answers are more than the {most} that may be open here; ask for fewer", "n")
        tickets = [Ticket(i, ids, params, exchange, reader, ends) for i, (ids, params, reader) in enumerate(asks)]
        exchange.open(tickets)
        return exchange, tickets

    def _observe(self, ticket: Ticket, update: Update) -> None:
        self.metrics.observe(ticket, update)

    def close(self) -> None:
        """Let go of the threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice `index`: its seed counts up from the request's, so the first is as without n."""
    if params.seed is None:
        return params.seeded()
    low, span = -(1 << 63), 1 << 64
    return replace(params, seed=(params.seed + index - low) % span + low) if index else params


@contextlib.contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields as the client knows them."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), names.get(error.param, error.param), error.code) from None


def _limit_name(ask: ChatRequest) -> str:
    return "max_tokens" if ask.max_completion_tokens is None else "max_completion_tokens"


def _stated(llm: LLM) -> dict[str, Any]:
    """Read what the checkpoint says of sampling. Raises ConfigError for a file that cannot be read or used."""
    folder = llm.checkpoint.folder
    path = None if folder is None else folder / DEFAULTS_FILE
    if path is None or not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
        found = {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, AttributeError, RequestError) as error:
        raise ConfigError(f"{path} does not say how to sample: {error}") from None
    return found
