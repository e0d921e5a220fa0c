"""Tokens of Kimi K2: a tiktoken vocabulary, K2's splitting pattern, and 256 special tokens after it.

Ids 0..base-1 are the byte strings of `tiktoken.model`; base..base+255 are special: named by the checkpoint's
`tokenizer_config.json`, otherwise by K2's own table, and `<|reserved_token_ID|>` where neither has a name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken

from draftwood.errors import ConfigError, RequestError

VOCAB_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
NUM_SPECIAL = 256

# The pattern of tokenization_kimi.py (the same from K2 to K2.6): `&&` intersects character classes.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# K2's names by distance from the first special id.
K2_NAMES: dict[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
END_OF_TURN = ("[EOS]", "<|im_end|>")
# Markers that carry structure a reader needs: never hidden, whatever a checkpoint's flags say.
VISIBLE = frozenset(
    {"<think>", "</think>"} | {name for name in K2_NAMES.values() if name.startswith(("<|tool_call", "<|tool_calls"))}
)

# tokenization_kimi.py cuts its input so that the pattern's backtracking stays bounded.
MAX_CHUNK = 400_000
MAX_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """Text to token ids and back. Immutable; make one with `load` or from a vocabulary in memory."""

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int], silent: Iterable[int] = ()) -> None:
        """`ranks`: byte string -> id 0..n-1 with every single byte; `special`: name -> id, ids n..n+255."""
        self.special: dict[str, int] = dict(special)
        self.base = len(ranks)
        self.vocab_size = self.base + NUM_SPECIAL
        self.silent = frozenset(silent)
        """Special ids a reader is not shown: turn markers and the like, but not <think> or tool calls."""
        self.eos_ids: tuple[int, ...] = tuple(self.special[name] for name in END_OF_TURN if name in self.special)
        self._bytes: list[bytes] = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for name, id in self.special.items():
            self._bytes[id] = name.encode()
        self._coder = tiktoken.Encoding("k2", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self.special)
        names = sorted(self.special, key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, names)))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `tiktoken.model` and, if present, `tokenizer_config.json`.

        Raises ConfigError for a missing, unreadable or inconsistent file.
        """
        ranks = read_ranks(Path(folder) / VOCAB_FILE)
        path = Path(folder) / CONFIG_FILE
        config = read_config(path) if path.exists() else {}
        special, silent = special_tokens(config, len(ranks), str(path))
        return cls(ranks, special, silent)

    def encode(self, text: str, allow_special: bool = False, param: str = "prompt") -> list[int]:
        """Return the ids of `text`. Names of special tokens stay ordinary text unless `allow_special`.

        Raises RequestError (naming `param`) for text that has no UTF-8 form.
        """
        check_text(text, param)
        if not allow_special:
            return self._encode_ordinary(text)
        ids: list[int] = []
        for piece in self.split_special(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._encode_ordinary(piece))
        return ids

    def split_special(self, text: str) -> Iterator[str | int]:
        """Yield the text between special tokens as str and each special token as its id, in order."""
        start = 0
        for match in self._special_re.finditer(text):
            if match.start() > start:
                yield text[start : match.start()]
            yield self.special[match.group()]
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) <= MAX_RUN:
            return self._coder.encode_ordinary(text)
        ids: list[int] = []
        for piece in chunks(text):
            ids.extend(self._coder.encode_ordinary(piece))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens by name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token. Raises RequestError for an id outside the vocabulary."""
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"token id {id} is outside 0..{self.vocab_size - 1}", param="token_ids")
        return self._bytes[id]


def check_text(text: Any, param: str) -> None:
    """Raise RequestError unless `text` is a str with a UTF-8 form (no lone surrogates)."""
    if not isinstance(text, str):
        raise RequestError(f"{param} is {type(text).__name__}, not text", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{param} has a lone surrogate U+{code:04X} at character {error.start}; send valid Unicode text",
            param=param,
        ) from None


def chunks(text: str) -> Iterator[str]:
    """Cut `text` where tokenization_kimi.py does: every MAX_CHUNK characters, and inside a piece every MAX_RUN
    characters of an unbroken run of whitespace or of non-whitespace."""
    for begin in range(0, len(text), MAX_CHUNK):
        piece = text[begin : begin + MAX_CHUNK]
        start = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield piece[start:cut]
                start = cut
        yield piece[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken vocabulary, one `base64 rank` a line. Raises ConfigError, naming the line, unless the ranks
    are exactly 0..n-1, the tokens differ, and all 256 single bytes are there."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the vocabulary {path}: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token, id = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise _damaged(path, f"line {number}, {_short(line)}, is not `base64 rank`") from None
        if not token or token in ranks:
            raise _damaged(path, f"line {number}: token {token!r} is {'there twice' if token else 'empty'}")
        ranks[token] = id
    _check_ranks(ranks, path)
    return ranks


def _check_ranks(ranks: dict[bytes, int], path: Path) -> None:
    ordered = sorted(ranks.values())
    for want, rank in enumerate(ordered):
        if rank != want:
            fault = f"rank {rank} is there twice" if rank < want else f"rank {want} is missing"
            raise _damaged(path, f"{fault} ({len(ranks)} tokens)")
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise _damaged(path, f"{len(missing)} of 256 single bytes have no token (first 0x{missing[0]:02X})")


def _damaged(path: Path, fault: str) -> ConfigError:
    return ConfigError(f"vocabulary {path}: {fault}; the file is damaged, fetch it again")


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if the file is not one."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {_short(str(error))}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object")
    return config


def special_tokens(config: Mapping[str, Any], base: int, source: str) -> tuple[dict[str, int], set[int]]:
    """Return (name -> id for base..base+255, silent ids) from a tokenizer_config.json object.

    Raises ConfigError for an id outside that range (a truncated vocabulary looks so) or a name used twice.
    """
    table = config.get("added_tokens_decoder")
    if table is None:
        names: dict[int, str] = {base + offset: name for offset, name in K2_NAMES.items()}
        silent = set(names)
    else:
        names, silent = _added_tokens(table, base, source)
    special: dict[str, int] = {}
    for id in range(base, base + NUM_SPECIAL):
        name = names.get(id, f"<|reserved_token_{id}|>")
        if name in special:
            raise ConfigError(f"{source}: special token {name!r} has two ids, {special[name]} and {id}")
        special[name] = id
    silent |= set(special.values()) - set(names)
    return special, silent - {special[name] for name in VISIBLE if name in special}


def _added_tokens(table: Any, base: int, source: str) -> tuple[dict[int, str], set[int]]:
    """Read `added_tokens_decoder`: {"ID": {"content": NAME, "special": bool}}; None is K2's own table."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: added_tokens_decoder is {type(table).__name__}, not an object")
    names: dict[int, str] = {}
    silent: set[int] = set()
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdecimal() or not isinstance(name, str) or not name:
            raise ConfigError(f"{source}: added_tokens_decoder[{key!r}] is not an id with a content")
        check_name(name, source)
        id = int(key)
        if not base <= id < base + NUM_SPECIAL:
            raise ConfigError(
                f"{source}: special token {name!r} has id {id}, outside {base}..{base + NUM_SPECIAL - 1} "
                f"after the {base} tokens of {VOCAB_FILE}; the two files do not belong together"
            )
        names[id] = name
        if entry.get("special", True):
            silent.add(id)
    return names, silent


def check_name(name: str, source: str) -> None:
    """Raise ConfigError for a special-token name without a UTF-8 form."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{source}: special token {name!r} is not valid Unicode") from None


def _short(text: str | bytes, limit: int = 60) -> str:
    """Return `text` quoted on one line, cut to `limit` characters."""
    shown = repr(text[:limit])
    return shown + ("..." if len(text) > limit else "")
