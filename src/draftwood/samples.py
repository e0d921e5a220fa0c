"""The built-in prompts of `check` and `bench step`: written for this project, in no training text.

Three kinds in turn, so that any first few are a mixture: the beginning of a Python file, a question for one function
in chat form, and the beginning of a page of documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.text.chat import ChatTemplate
    from draftwood.text.tokenizer import Tokenizer

Kind = Literal["code", "chat", "prose"]


@dataclass(frozen=True)
class Sample:
    """One prompt. `kind` "chat" is a user's message for the chat template, the others are plain text."""

    name: str
    kind: Kind
    text: str


_CODE = (
    '''"""Read the log of a weather station and report the warmest hour of each day."""

import csv
import datetime
from collections import defaultdict


def read_rows(path):
    """Yield (time, temperature) for every line of the file."""
''',
    """import asyncio
import logging

logger = logging.getLogger(__name__)


class RateLimiter:
    \"\"\"Allows at most `limit` calls in any period of `seconds`.\"\"\"

    def __init__(self, limit, seconds):
""",
    '''class Matrix:
    """A dense matrix stored as a list of rows."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]

    def __add__(self, other):
''',
    '''import json
import os
import sys
from pathlib import Path


def load_settings(path: Path) -> dict:
    """Return the settings stored in the JSON file, or the defaults when it does not exist."""
''',
    '''from __future__ import annotations

import threading
from typing import Any, Callable


class LazyValue:
    """Computes a value at its first use, once, even when threads ask together."""

    def __init__(self, compute: Callable[[], Any]) -> None:
''',
    '''import unittest

from inventory import Item, Store


class StoreTest(unittest.TestCase):
    def setUp(self):
        self.store = Store()
        self.store.add(Item("nut", 12))

    def test_count_of_a_missing_item_is_zero(self):
''',
    '''def parse_duration(text):
    """Turn a text like "1h 20m" into seconds.

    Raises ValueError for a unit that is not known.
    """
    units = {"s": 1, "m": 60, "h": 3600}
''',
    '''import argparse


def build_parser():
    parser = argparse.ArgumentParser(description="Find files that have the same content.")
    parser.add_argument("folders", nargs="+", help="where to look")
    parser.add_argument("--minimum", type=int, default=1, help="smallest size in bytes")
''',
    '''import heapq


class Scheduler:
    """Runs functions at given times, the earliest first."""

    def __init__(self, clock):
        self._clock = clock
        self._queue = []

    def at(self, time, function):
''',
    '''import numpy as np


def moving_average(values, width):
    """Average of each `width` neighbouring values; the result is shorter by width - 1."""
    values = np.asarray(values, dtype=float)
''',
    '''import socket
import struct

HEADER = struct.Struct("!HI")


def send_message(connection, kind, payload):
    """Send one message: its kind, its length, then the bytes."""
''',
    '''from dataclasses import dataclass, field


@dataclass
class Node:
    """One entry of a table of contents."""

    title: str
    level: int = 0
    children: list["Node"] = field(default_factory=list)

    def walk(self):
''',
)
_CHAT = (
    "Write a Python function to count the vowels of each word in a sentence.",
    "Write a function `chunks(items, size)` that splits a list into lists of at most `size` items.",
    "How do I read a CSV file into a list of dictionaries in Python?",
    "Implement `is_leap_year(year)` in Python: tell whether a year has 366 days.",
    "Write a Python class `Counter` with methods to add an item and to get the most frequent one.",
    "Complete this function:\n```python\ndef flatten(tree):\n"
    '    """Return the leaves of a nested list, from left to right."""\n```',
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Can you write a Python function that checks whether brackets in a text are balanced?",
    'What does this code do?\n```python\ndef f(xs):\n    return {x: xs.count(x) for x in set(xs)}\n```',
    "Write a function `retry(function, times)` that calls a function again when it raises an exception.",
    "Please write a function `roman(number)`.\n\nReturn the number in Roman numerals.",
    "I need Python code to find the longest common prefix of a list of words.",
)
_PROSE = (
    """Getting started
===============

This guide shows how to install the package, create your first project and run it. You need Python 3.9 or newer.

Installation
------------
""",
    """Configuration
=============

The application reads its settings from a file in the project's folder. Every option can also be set on the command
line; the command line takes precedence. The following options are available:

""",
    """# Change log

All notable changes are listed here.

## 2.4.0

- Added a `timeout` argument to
""",
    """Frequently asked questions
--------------------------

**Why is the first request slow?**

The first request has to open a connection
""",
    """Contributing
============

Thank you for your interest in the project. Before you send a change, please run the tests and
""",
    """Error handling
==============

When a request fails, the client raises an exception. The base class of all exceptions is
""",
    """# tabula

A small library for reading and writing tables of text.

## Usage

```python
from tabula import Table

table =
""",
    """Caching
=======

A cache keeps the results of expensive functions so that they are computed only once. To use it, decorate the
function with
""",
    """Threads and processes
=====================

Threads share memory, which makes it easy to exchange data between them. On the other hand,
""",
    """Security considerations
-----------------------

Never store passwords in plain text. The module provides functions to
""",
    """Writing plugins
===============

A plugin is a Python class with a method called ``run``. The method is called with
""",
    """Dates and times
===============

All times are stored in UTC. To convert a time to the user's time zone, use
""",
)

SAMPLES: tuple[Sample, ...] = tuple(
    sample
    for n, (code, chat, prose) in enumerate(zip(_CODE, _CHAT, _PROSE, strict=True), 1)
    for sample in (Sample(f"code-{n}", "code", code), Sample(f"chat-{n}", "chat", chat), Sample(f"prose-{n}", "prose", prose))
)
"""36 prompts: code-1, chat-1, prose-1, code-2 and so on."""


def first(count: int) -> tuple[Sample, ...]:
    """Return the first `count` prompts. Raises ConfigError when there are not so many."""
    if not 1 <= count <= len(SAMPLES):
        raise ConfigError(f"--prompts {count} is outside 1..{len(SAMPLES)}; there are {len(SAMPLES)} built-in prompts")
    return SAMPLES[:count]


class Words(Protocol):
    """What turns a prompt into token ids; llm.LLM does."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def template(self) -> ChatTemplate | None: ...


def encode(sample: Sample, words: Words) -> list[int]:
    """Return a prompt as token ids; questions go through the chat template where there is one.

    Raises ConfigError for a model without a tokenizer.
    """
    if words.tokenizer is None:
        raise ConfigError("this model has no tokenizer for the built-in prompts; give a whole checkpoint")
    if sample.kind == "chat" and words.template is not None:
        return words.template.encode([{"role": "user", "content": sample.text}])
    return words.tokenizer.encode(sample.text)
