"""A small tiktoken vocabulary for tests: 256 bytes and some merges, with K2's special tokens after it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from draftwood.text.tokenizer import Tokenizer, special_tokens

WORDS = (
    "the",
    " the",
    "def",
    " def",
    "return",
    "im",
    "user",
    "Hi",
    "  ",
    "\n\n",
    "é",
    "世界",
    "end",
    " x",
    "<|",
    "|>",
    "##",
    "ok",
    "xy",
)


def ranks() -> dict[bytes, int]:
    """256 single bytes, then every prefix of WORDS so that byte pairs can merge up to the whole word."""
    table = {bytes([i]): i for i in range(256)}
    for word in WORDS:
        raw = word.encode()
        for end in range(2, len(raw) + 1):
            table.setdefault(raw[:end], len(table))
    return table


def tokenizer() -> Tokenizer:
    special, silent = special_tokens({}, len(ranks()), "K2")
    return Tokenizer(ranks(), special, silent)


def write(folder: Path, config: dict | None = None, table: dict[bytes, int] | None = None) -> Path:
    """Write tiktoken.model (and tokenizer_config.json) as a checkpoint has them."""
    table = ranks() if table is None else table
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in table.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
