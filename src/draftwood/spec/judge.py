"""Tries grammars in a process of their own, so that one that takes too long or too much can be ended.

A grammar is compiled and walked with random tokens. It is refused when compiling fails or takes too long, when it
allows no answer, when a single mask takes too long, or when masks become dear as the answer grows (ambiguity). Times are of
the CPU, so that a machine that is busy with answers refuses nothing that an idle one takes.
Run as a program, this module is that process. It forks for each grammar and stays, for its imports take seconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.env import inherit
from draftwood.errors import DraftwoodError

START_SECONDS = 120.0
TRY_SECONDS = 0.6
"""For one grammar, in all: a request that cannot be served is refused within a second of an idle machine."""
PATIENCE_SECONDS = 10.0
"""For the same by the clock on the wall."""
GRACE_SECONDS = 10.0
"""For the process to answer when the time of a grammar is over."""
WALK_SECONDS, WALK_TOKENS = 0.3, 256
MASK_SECONDS = 0.3
"""Most for one mask that is computed for the first time."""
KNOWN_MASK_SECONDS = 0.003
"""Most for one that is computed again, at the end of the walk."""
_LONGEST = 4096
"""Bytes of an answer: what a pipe takes at once."""
STATM = Path("/proc/self/statm")
MEMORY = 4 << 30
"""Bytes beyond what the process has when it starts."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of every token, none of which a special token shares with text; the tokens that end an answer."""

    tokens: list[bytes]
    stops: tuple[int, ...]


def compiler(vocabulary: Vocabulary) -> Any:
    """Return an xgrammar compiler whose masks are computed when they are first needed. Imports xgrammar: seconds."""
    import xgrammar

    info = xgrammar.TokenizerInfo(
        vocabulary.tokens,
        xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary.tokens),
        stop_token_ids=list(vocabulary.stops),
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True)


def compile_text(compiler: Any, kind: str, text: str) -> Any:
    """Return xgrammar's CompiledGrammar. Raises ValueError, on one line, for a grammar that does not compile."""
    try:
        if kind == "json":
            return compiler.compile_json_schema(text, any_whitespace=False)
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        return compiler.compile_structural_tag(text)
    except (RuntimeError, ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        # "[time] file:line: what": only what it says is of use
        raise ValueError(message.rsplit(".cc:", 1)[-1].partition(": ")[2] or message) from None


def words(vocab: int) -> int:
    """Return how many 32-bit words hold a bit for each token."""
    return (vocab + 31) // 32


def allowed_ids(bits: NDArray[np.int32], vocab: int | None = None) -> NDArray[np.int64]:
    """Return the tokens whose bit is set; bits [W], of which those from `vocab` on are padding and may be set."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little"))


def judge(compiled: Any, vocabulary: Vocabulary, seed: int = 0) -> str:
    """Walk a compiled grammar; return what is wrong with it, nothing if it can be used."""
    import xgrammar

    rng, stops = random.Random(seed), set(vocabulary.stops)
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = np.zeros((1, words(len(vocabulary.tokens))), np.int32)
    began = time.process_time()
    last = None
    for count in range(WALK_TOKENS):
        start = time.process_time()
        matcher.fill_next_token_bitmask(bits, 0)
        if time.process_time() - start > MASK_SECONDS:
            return "it takes too long to follow; make it simpler"
        ids = [int(id) for id in allowed_ids(bits[0], len(vocabulary.tokens)) if int(id) not in stops]
        if not ids:
            return "it allows no answer" if count == 0 and not matcher.is_completed() else ""
        last = rng.choice(ids)
        matcher.accept_token(last)
        if time.process_time() - began > WALK_SECONDS:
            break
    return _again(matcher, bits, last)


def _again(matcher: Any, bits: NDArray[np.int32], last: int | None) -> str:
    """Take the last step of a walk once more, now that its masks are known."""
    seconds = []
    for _ in range(3):
        matcher.rollback(1)
        start = time.process_time()
        matcher.accept_token(last)
        matcher.fill_next_token_bitmask(bits, 0)
        seconds.append(time.process_time() - start)
    # the first of them may still compute the mask of the last place
    return "it is too ambiguous to follow; make it simpler" if min(seconds[1:]) > KNOWN_MASK_SECONDS else ""


class Judge:
    """The process, started when it is first needed. Threads may share it; one grammar is tried at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        """True when the process has said that it has the vocabulary."""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start the process and do not wait for it: its imports take seconds."""
        with self._lock:
            self._launch()

    def wait(self) -> None:
        """Start the process, if it does not run, and wait until it can be asked. Raises DraftwoodError if it cannot start."""
        with self._lock:
            self._start()

    def ask(self, kind: str, text: str) -> str:
        """Return what is wrong with a grammar, nothing if it can be used. Raises DraftwoodError if it cannot start."""
        with self._lock:
            answer = self._exchange(self._start(), (kind, text, TRY_SECONDS), PATIENCE_SECONDS + GRACE_SECONDS)
            if answer is None:
                self._end()
                return "it ended the process that checks grammars; make it simpler"
            return str(answer)

    def _launch(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "draftwood.spec.judge"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=inherit(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
            )
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._launch()
        if not self._ready:
            if self._exchange(process, self.vocabulary, START_SECONDS) != "ready":
                self._end()
                raise DraftwoodError("the process that checks grammars did not start; see `python -m draftwood.spec.judge`")
            self._ready = True
        return process

    def _exchange(self, process: subprocess.Popen[bytes], message: Any, seconds: float) -> Any:
        """Send a message and return the answer, None when there is none in time."""
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], seconds)[0]:
                return None
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):  # the caller ends what is left of it
            return None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not sent is of no use
                        pipe.close()
            self._process, self._ready = None, False

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


def main() -> None:
    """Read the vocabulary and then grammars from stdin, answer on stdout, until stdin ends."""
    import xgrammar  # noqa: F401  # seconds, while the vocabulary is still to come

    read, write = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError):
        vocabulary = pickle.load(read)
        tool = compiler(vocabulary)
        answer: str = "ready"
        while True:
            pickle.dump(answer, write)
            write.flush()
            kind, text, seconds = pickle.load(read)
            answer = _apart(tool, vocabulary, kind, text, seconds)


def _apart(tool: Any, vocabulary: Vocabulary, kind: str, text: str, seconds: float) -> str:
    """Try a grammar in a child that ends with the answer, or is ended when it has used `seconds` of the CPU."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            os.write(send, _tried(tool, vocabulary, kind, text).encode()[:_LONGEST])
        finally:
            os._exit(0)
    os.close(send)
    late = not select.select([receive], [], [], PATIENCE_SECONDS)[0]
    if late:
        os.kill(child, signal.SIGKILL)
    said = os.read(receive, _LONGEST).decode(errors="replace")
    os.close(receive)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not said and (late or ended == -signal.SIGPROF):
        return f"it takes longer than {seconds:g} seconds to compile; make it simpler"
    return said[1:] if said else "it is too large"


def _tried(tool: Any, vocabulary: Vocabulary, kind: str, text: str) -> str:
    """What is wrong with a grammar after a mark; the mark alone for one that can be used."""
    if STATM.exists():
        used = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        return "." + judge(compile_text(tool, kind, text), vocabulary)
    except ValueError as error:
        return "." + (str(error) or "it does not compile")


if __name__ == "__main__":
    main()
