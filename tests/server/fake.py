"""A model without a network: each step gives every request the next token, when the test lets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

from draftwood.engine.request import Output, SamplingParams, Usage
from draftwood.engine.totals import Totals
from draftwood.errors import RequestError
from draftwood.llm import Answer, State
from tests.text import vocabulary

TOKEN = 97


class FakeLLM:
    """As LLM, where the server uses it. Answers are `aaa...`, or the runs of a script; `go` lets steps run."""

    def __init__(self, rows: int = 4, seconds: float = 0.0, script: Sequence[Sequence[int]] = (), thinks: bool = False):
        """`script`: the tokens of each step, the last of them ending the answer; `thinks`: prompts end with <think>."""
        self.script = script
        self.thinks = thinks
        self.asked: list[dict] = []
        """Messages, tools and template arguments of each conversation."""
        self.plan = SimpleNamespace(max_num_seqs=rows, max_model_len=512)
        self.checkpoint = SimpleNamespace(folder=None)
        self.tokenizer = vocabulary.tokenizer()
        self.template = SimpleNamespace(heeds=frozenset({"thinking"}))
        self.seconds = seconds
        self.crash: BaseException | None = None
        self.go = threading.Event()
        self.go.set()
        self.live: list[Answer] = []
        self.dropped: list[int] = []
        self.rests = 0
        self.closed = False
        self._ids = 0
        self._steps: dict[int, int] = {}

    def encode(self, prompt, allow_special=False):
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def chat_ids(self, messages, tools=None, **template):
        self.asked.append({"messages": messages, "tools": tools, **template})
        ids = self.encode("".join(str(message["content"]) for message in messages))
        return [*ids, self.tokenizer.special["<think>"]] if self.thinks else ids

    def check(self, ids, params: SamplingParams) -> None:
        if len(ids) >= self.plan.max_model_len:
            raise RequestError("too long", "prompt", code="context_length_exceeded")

    def start(self, ids, params, reader=None) -> Answer:
        self._ids += 1
        self.live.append(Answer(self._ids, params, self.tokenizer, reader, usage=Usage(prompt_tokens=len(ids))))
        return self.live[-1]

    def advance(self) -> list[Answer]:
        time.sleep(self.seconds or 0.001)
        if not self.go.wait(0.01):
            return []
        if self.crash is not None:
            raise self.crash
        grown = self.live[: self.plan.max_num_seqs]
        for answer in grown:
            step = self._steps.get(answer.id, 0)
            self._steps[answer.id] = step + 1
            run = tuple(self.script[step]) if self.script else (TOKEN,)
            stop = next((i for i, token in enumerate(run) if token in answer.params.stop_token_ids), None)
            run = run if stop is None else run[: stop + 1]
            count = len(answer.token_ids) + len(run)
            usage = Usage(prompt_tokens=answer.usage.prompt_tokens, completion_tokens=count, started=1.0)
            ended = "length" if count == answer.params.max_tokens else None
            if stop is not None or self.script and step + 1 == len(self.script):
                ended = "stop"
            answer.add(Output(answer.id, run, None, ended, usage))
            if answer.reason is not None:
                self.live.remove(answer)
        return grown

    def drop(self, answer: Answer) -> None:
        if answer in self.live:
            self.live.remove(answer)
            self.dropped.append(answer.id)

    def rest(self) -> None:
        self.rests += 1

    def state(self) -> State:
        running = min(len(self.live), self.plan.max_num_seqs)
        return State(running, len(self.live) - running, 10, 10 - running, Totals())

    def close(self) -> None:
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *ended) -> None:
        self.close()
