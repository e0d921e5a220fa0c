"""What clients may ask: OpenAI's bodies with vLLM's and our own additions, as checked models.

Types are checked here, strictly; ranges by SamplingParams. Either way the field at fault is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.server import fields
from draftwood.spec.formats import Grammar, tool_grammar
from draftwood.text.tools import CALL_END

MAX_CHOICES = 128
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; a chat may go on to the end of the context."""
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_RESERVED = ("messages", "tools", "add_generation_prompt", "self")
_TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}

Stops = Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)]
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                *_TEXT_OR_LIST["anyOf"],
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        },
        "required": ["role", "content"],
    },
}
Messages = Annotated[list[Any], WithJsonSchema(_MESSAGES)]
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
Tools = Annotated[list[Any] | None, WithJsonSchema({"type": "array", "items": _TOOL})]
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]
Budget = Annotated[Any, WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 0, "maximum": 64}]})]


class Body(BaseModel):
    """Strict about types: "0.5" is no number and 1.0 no whole number. Extra fields are kept for `fields.unknown`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(Body):
    """What both kinds of request share."""

    known: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stops = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tree_budget: Budget = None
    timings: bool | None = None
    """Add steps, accept length and times to each choice."""
    return_token_ids: bool | None = None

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return how the tokens are chosen; `defaults` count where the request says nothing. Raises RequestError."""
        values = dict(defaults)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "min_tokens",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "tree_budget",
            "response_format",
        ):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        if self.logit_bias:
            values["logit_bias"] = _biases(self.logit_bias)
        values["max_tokens"] = self.limit()
        values["logprobs"] = self.wanted_logprobs()
        return SamplingParams(**values)

    def limit(self) -> int | None:
        """Most new tokens; None: as the context allows."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """As SamplingParams.logprobs."""
        return None

    def unknown(self) -> list[str]:
        """Names of fields nobody knows. Raises RequestError as `fields.unknown`, and for stream options alone."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options are for streams; set stream to true or leave them out", "stream_options")
        return fields.unknown(self.model_extra or {}, self.known)

    @property
    def stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class Conversation(Body):
    """Messages and what the chat template is told besides."""

    messages: Messages
    tools: Tools = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    thinking: Any = None
    """As in Moonshot's API: {"type": "enabled"} or {"type": "disabled"}; or true, false."""
    reasoning_effort: str | None = None

    def rendered_messages(self) -> list[Any]:
        """The messages for the template: OpenAI's developer is K2's system."""
        return [{**m, "role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m for m in self.messages]

    def template(self) -> dict[str, Any]:
        """Arguments of the template. Raises RequestError for names that are the request's own."""
        given = dict(self.chat_template_kwargs or {})
        for name in _RESERVED:
            if name in given:
                raise RequestError(f"chat_template_kwargs cannot hold {name}", "chat_template_kwargs")
        if "enable_thinking" in given:
            given.setdefault("thinking", given.pop("enable_thinking"))
        if (thinking := self._thinking()) is not None:
            given.setdefault("thinking", thinking)
        if self.add_generation_prompt is not None:
            given["add_generation_prompt"] = self.add_generation_prompt
        return given

    def _thinking(self) -> bool | None:
        if self.reasoning_effort not in (None, "none"):
            raise RequestError(
                "reasoning_effort other than none is not supported: this model reasons or does not; "
                'use "thinking": {"type": "enabled"}',
                "reasoning_effort",
                code="unsupported_parameter",
            )
        value = self.thinking
        if isinstance(value, dict):
            value = {"enabled": True, "disabled": False}.get(str(value.get("type")), value)
        if value is None:
            return None if self.reasoning_effort is None else False
        if not isinstance(value, bool):
            raise RequestError('thinking is neither {"type": "enabled"} nor {"type": "disabled"}', "thinking")
        return value


class ChatRequest(Asked, Conversation):
    """Body of /v1/chat/completions."""

    known: ClassVar = fields.CHAT

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def offered_tools(self) -> list[Any] | None:
        """Return the tools the model is told of: none where the choice is none. Raises RequestError for a malformed one."""
        for i, tool in enumerate(self.tools or ()):
            function = tool.get("function") if isinstance(tool, dict) else None
            named = isinstance(function, dict) and isinstance(function.get("name"), str) and tool.get("type") == "function"
            if not named:
                raise RequestError(f'tools[{i}] is not {{"type": "function", "function": {{"name": ...}}}}', f"tools[{i}]")
        return None if self.tool_choice == "none" or not self.tools else self.tools

    def required_tools(self, special: Mapping[str, int]) -> Grammar | None:
        """Return the grammar that makes the answer call tools, None where the model may choose.

        `special`: the vocabulary's special tokens. Raises RequestError for a choice that cannot be kept.
        """
        choice, name = self.tool_choice, None
        if choice in (None, "auto", "none"):
            return None
        if choice != "required":
            function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str):
                fault = 'tool_choice is not auto, none, required or {"type": "function", "function": {"name": ...}}'
                raise RequestError(fault, "tool_choice")
        if self.response_format not in (None, {"type": "text"}):
            raise RequestError("tool_choice requires a call, which response_format forbids; give one of them", "tool_choice")
        parallel = self.parallel_tool_calls is not False
        return tool_grammar(self.offered_tools() or (), special, name, parallel, first=self._calls_so_far())

    def ends(self, special: Mapping[str, int]) -> tuple[int, ...]:
        """Return tokens that end the answer beside the model's own: the end of a call where only one is wanted.

        Raises RequestError with min_tokens, which would keep the call from ending.
        """
        if self.parallel_tool_calls is not False or not self.offered_tools() or CALL_END not in special:
            return ()
        if self.min_tokens:
            fault = f"min_tokens {self.min_tokens} does not go with parallel_tool_calls false; leave one of them out"
            raise RequestError(fault, "min_tokens")
        return (special[CALL_END],)

    def _calls_so_far(self) -> int:
        """Tool calls that the conversation holds: K2 numbers on from there."""
        calls = [message.get("tool_calls") for message in self.messages if isinstance(message, dict)]
        return sum(len(made) for made in calls if isinstance(made, list))

    def wanted_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
            return None
        return self.top_logprobs or 0


class CompletionRequest(Asked):
    """Body of /v1/completions."""

    known: ClassVar = fields.COMPLETION

    prompt: Prompts
    logprobs: int | None = None

    def limit(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[Any]:
        """Return each prompt, a text or a list of token ids. Raises RequestError for anything else."""
        prompt = self.prompt
        many = prompt if isinstance(prompt, list) and prompt and not _is_id(prompt[0]) else [prompt]
        if len(many) * (self.n or 1) > MAX_CHOICES:
            raise RequestError(f"{len(many)} prompts with n {self.n or 1} are more than {MAX_CHOICES} answers", "prompt")
        for i, one in enumerate(many):
            if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
                raise RequestError(
                    f"prompt {i} is neither a text nor a list of token ids; texts and lists may also come in a list", "prompt"
                )
            if not one:
                raise RequestError(f"prompt {i} is empty", "prompt")
        return many


class TokenizeRequest(Body):
    """Body of /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Any] | None, WithJsonSchema(_MESSAGES)] = None
    tools: Tools = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    allow_special: bool | None = None
    """Names of control tokens in `prompt` are those tokens."""


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


Model = TypeVar("Model", bound=Body)


def read(kind: type[Model], body: Mapping[str, Any]) -> Model:
    """Return `body` as a checked model. Raises RequestError naming the first field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = _path(first["loc"])
        count = error.error_count()
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise RequestError(f"{name}: {first['msg']}{more}", name) from None


def _path(location: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).lstrip(".") or "body"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not _TOKEN_ID.fullmatch(name):
            raise RequestError(f"logit_bias has the key {name[:40]!r}, which is no token id", "logit_bias")
    return {int(name): value for name, value in given.items()}
