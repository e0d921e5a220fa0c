"""Messages to tokens by the checkpoint's own jinja2 template.

What a user writes is data: it is never run as a template, and control tokens spelled in it stay text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwood.errors import ConfigError, RequestError
from draftwood.text.tokenizer import CONFIG_FILE, Tokenizer, check_text, read_config
from draftwood.text.typescript import declare, sort_keys

TEMPLATE_FILE = "chat_template.jinja"
DECLARATION = "tools_ts_str"
"""What K2.5 and later templates call the tools in TypeScript form."""
ROLES = ("system", "user", "assistant", "tool")
# What a template can fail with on messages it was not written for.
_RENDER_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template and the tokenizer it belongs to."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None, name: str = "(given)"
    ) -> None:
        """`variables` are seen by the template besides the call's own (bos_token and the like).

        Raises ConfigError if `source` is not a jinja2 template.
        """
        self.tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._source_characters = set(source)
        self._declares = DECLARATION in source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.heeds: frozenset[str] = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """Names of the variables that it reads."""
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"chat template {name} does not compile: {_line(error)}") from None

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """Read `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

        Raises ConfigError if there is none or it cannot be read.
        """
        folder = Path(folder)
        path = folder / CONFIG_FILE
        config = read_config(path) if path.exists() else {}
        source, name = _find_source(folder, config)
        variables = {k: _token_text(v) for k, v in config.items() if k.endswith("_token")}
        return cls(source, tokenizer or Tokenizer.load(folder), variables, name)

    @classmethod
    def find(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """As `load`, but None where the checkpoint has no template: it can still complete text."""
        path = Path(folder) / CONFIG_FILE
        stated = path.exists() and read_config(path).get("chat_template") is not None
        if not stated and not (Path(folder) / TEMPLATE_FILE).exists():
            return None
        return cls.load(folder, tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt as text. `kwargs` go to the template (thinking, preserve_thinking, ...).

        A template that takes tools in TypeScript form gets them so unless `kwargs` has tools_ts_str itself (None: JSON).
        Raises RequestError naming the field for messages the template cannot hold.
        """
        return self._render(self._inputs(messages, tools, add_generation_prompt, kwargs))

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the prompt as token ids: only control tokens that the template itself wrote are control tokens.

        Otherwise equal to encoding the rendered text as a whole. Raises RequestError as `render`.
        """
        inputs = self._inputs(messages, tools, add_generation_prompt, kwargs)
        plain = self._render(inputs)
        mask = self._mask(inputs)
        if not mask:
            return self.tokenizer.encode(plain, allow_special=True, param="messages")
        restore = {v: k for k, v in mask.items()}
        masked = self._render(_translate(inputs, mask))
        if masked.translate(restore) != plain:
            raise RequestError(
                "this chat template looks into the text of messages, so control tokens typed there cannot be told from "
                "its own; render the prompt and send it as text",
                param="messages",
            )
        ids: list[int] = []
        for piece in self.tokenizer.split_special(masked):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self.tokenizer.encode(piece.translate(restore), param="messages"))
        return ids

    def _inputs(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check what a caller gave and return the template's variables."""
        inputs = {
            **kwargs,
            "messages": check_messages(messages),
            "tools": check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if self._declares and DECLARATION not in kwargs and inputs["tools"]:
                inputs |= declared(inputs["tools"])
            for text in _strings(inputs):
                check_text(text, "messages")
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply", param="messages") from None
        return inputs

    def _render(self, inputs: Mapping[str, Any]) -> str:
        try:
            return self._template.render(**{**self._variables, **inputs})
        except RequestError:
            raise
        except _RENDER_FAULTS as error:
            fault = f"the chat template cannot render these messages: {_line(error)}"
            raise RequestError(fault, param="messages") from None

    def _mask(self, inputs: Mapping[str, Any]) -> dict[int, int]:
        """Return stand-ins for the characters that special tokens begin with, where the inputs hold any.

        A stand-in is a private-use character found neither in the inputs nor in the template, so text with it replaced
        spells no special token, not even together with its neighbours, and replacing back is exact.
        """
        seen: set[str] = set()
        for text in _strings(inputs):
            seen.update(text)
        firsts = sorted({name[0] for name in self.tokenizer.special} & seen)
        if not firsts:
            return {}
        taken = seen | self._source_characters
        spare = (c for c in range(0xF0000, 0x10FFFE) if chr(c) not in taken and c & 0xFFFE != 0xFFFE)
        mask = dict(zip(map(ord, firsts), spare, strict=False))
        if len(mask) < len(firsts):
            raise RequestError("the messages use every private-use character of Unicode; remove some", param="messages")
        return mask


def _environment() -> jinja2.Environment:
    """The environment Hugging Face transformers renders chat templates in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, Unicode as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {' '.join(str(message).split())}", param="messages")


def _find_source(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return (template text, where it is from)."""
    path = folder / TEMPLATE_FILE
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the chat template {path} is not UTF-8 text") from None
    source = config.get("chat_template")
    if isinstance(source, list):
        # A list of named templates; the one called default is meant for chat.
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"{folder} has no chat template (neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}); "
            "use a plain prompt"
        )
    return source, str(folder / CONFIG_FILE)


def _token_text(value: Any) -> Any:
    """A token of tokenizer_config.json is its text or an object with `content`."""
    return value.get("content", "") if isinstance(value, dict) else value


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of `messages` in the form K2's templates read: no null reasoning, no empty tool calls.

    Raises RequestError naming the field at fault.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{at} is {type(message).__name__}, not an object with role and content", param=at)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{at}.role {role!r} is not one of {', '.join(ROLES)}", param=f"{at}.role")
    # Null would be written as the word None by some templates: absent and null are the same here.
    clean = {k: v for k, v in message.items() if v is not None}
    for key in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if not isinstance(clean.get(key, ""), str):
            raise RequestError(f"{at}.{key} is {type(clean[key]).__name__}, not text", param=f"{at}.{key}")
    if "tool_calls" in clean:
        clean["tool_calls"] = _check_calls(clean["tool_calls"], f"{at}.tool_calls")
        if role != "assistant" and clean["tool_calls"]:
            fault = f"{at}.tool_calls belong to an assistant message, not to {role}"
            raise RequestError(fault, param=f"{at}.tool_calls")
    if role == "tool" and not clean.get("tool_call_id"):
        raise RequestError(f"{at}.tool_call_id is missing: a tool message answers one call", param=f"{at}.tool_call_id")
    if "content" not in clean and role != "assistant":
        raise RequestError(f"{at}.content is missing", param=f"{at}.content")
    clean["content"] = _check_content(clean.get("content"), f"{at}.content")
    return clean


def _check_content(content: Any, at: str) -> Any:
    """Text, null (assistant only), or a list of text parts. Vision and audio are refused by name."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{at} is {type(content).__name__}, not text or a list of parts", param=at)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise RequestError(f"{at}[{i}] has type {kind!r}; only text is supported", param=f"{at}[{i}]")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{at}[{i}].text is not text", param=f"{at}[{i}].text")
    return list(content)


def _check_calls(calls: Any, at: str) -> list[Any]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{at} is {type(calls).__name__}, not a list", param=at)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{at}[{i}] is not an object with id and function.name", param=f"{at}[{i}]")
        if not isinstance(call.get("id"), str) or not call["id"]:
            raise RequestError(f"{at}[{i}].id is missing or not text", param=f"{at}[{i}].id")
        if not isinstance(function.get("arguments"), (str, Mapping)):
            where = f"{at}[{i}].function.arguments"
            raise RequestError(f"{where} is neither text nor an object", param=where)
    return list(calls)


def check_tools(tools: Any) -> list[Any] | None:
    """Return `tools` as a list of objects, or None. Raises RequestError for anything else."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", param="tools")
    return list(tools)


def declared(tools: list[Any]) -> dict[str, Any]:
    """Return the variables that K2's own tokenizers give a template for tools: sorted, and in TypeScript form.

    Tools whose schemas have no such form are declared as JSON, as they do.
    """
    tools = sort_keys(tools)
    try:
        return {"tools": tools, DECLARATION: declare(tools)}
    except ValueError:
        return {"tools": tools}


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in `value`, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _translate(value: Any, table: Mapping[int, int]) -> Any:
    """Return `value` with the characters of every string replaced."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translate(k, table): _translate(v, table) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_translate(item, table) for item in value]
    return value


def _line(error: BaseException) -> str:
    """Return the error's message on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    at = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return text + at
