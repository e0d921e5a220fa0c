"""Grammars at every node of a tree: which tokens the target may choose, and how far along each row is.

A row's Constraint is in one of three states: it waits for the end of the reasoning, where only the tokens that would
end the answer or begin a tool section are forbidden; it follows its grammar, which allows the tokens that end the
answer exactly where it is complete; or it has ended, and nothing but those tokens is allowed. At a tree the state walks
from the committed tokens through the nodes and back: accept a token, read the mask, roll back. Nodes whose token is
refused are left out with all below them: the choice at their parent cannot be that token, so no path reaches them.

Drafts are kept to the grammar as far as that is cheap: along the drafter's likeliest path. It only saves nodes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.spec.formats import Grammar
from draftwood.spec.judge import Judge, Vocabulary, compile_text, compiler, words

KEPT, KEPT_BYTES = 64, 1 << 30
"""Compiled grammars that are kept, and their size together."""
_TOOL_MARKERS = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")


class Matcher(Protocol):
    """What is used of xgrammar's GrammarMatcher."""

    def accept_token(self, token_id: int) -> bool: ...
    def rollback(self, num_tokens: int) -> None: ...
    def is_terminated(self) -> bool: ...
    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> bool: ...


@dataclass(frozen=True)
class Edges:
    """Where a grammar begins and ends. Words are masks [W] of 32 tokens each."""

    close: int | None
    """The token that ends the reasoning."""
    opens: int | None
    """A token that does so and is the grammar's own first one."""
    waiting: NDArray[np.int32]
    """What is allowed in the reasoning."""
    ended: NDArray[np.int32]
    """The tokens that end an answer."""
    tokens: NDArray[np.int32]
    """All tokens. Bits behind the last one are padding, and xgrammar sets them."""
    stops: frozenset[int]


class Constraint:
    """How far along its grammar one row is."""

    def __init__(self, matcher: Matcher, edges: Edges, reasoning: bool) -> None:
        self._matcher = matcher
        self._edges = edges
        self._waiting = reasoning

    def commit(self, tokens: Iterable[int]) -> None:
        """Follow committed tokens. What a row commits beyond its end is not looked at."""
        for token in tokens:
            self._enter(token)

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], NDArray[np.int32]]:
        """Return the nodes [m] that the grammar reaches, the root first, and what it allows at each, bits [m, W].

        Node 0 is the last committed token; a parent comes before its children. The state is as before afterwards.
        """
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[parents[node]].append(node)
        bits = np.empty((len(tokens), len(self._edges.ended)), np.int32)
        reached: list[int] = []

        def visit(node: int) -> None:
            self._fill(bits, len(reached))
            reached.append(node)
            for child in children[node]:
                waiting = self._waiting
                entered = self._enter(tokens[child])
                if entered is not None:
                    visit(child)
                self._waiting = waiting
                if entered:
                    self._matcher.rollback(1)

        visit(0)
        return reached, bits[: len(reached)]

    @property
    def following(self) -> bool:
        """True once the reasoning has ended."""
        return not self._waiting

    def lead(self, scores: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return what is allowed [D, V] along the path of the best allowed tokens; scores [D, V], by depth from 1.

        The state is as before afterwards.
        """
        bits = np.empty((len(scores), len(self._edges.ended)), np.int32)
        allowed = np.ones(scores.shape, bool)
        steps = 0
        for depth in range(len(scores)):
            self._fill(bits, depth)
            allowed[depth] = unpack(bits[depth], scores.shape[1])
            best = int(np.where(allowed[depth], scores[depth], -np.inf).argmax())
            entered = self._enter(best)
            if entered is None:  # scores that are no numbers
                break
            steps += entered
        if steps:
            self._matcher.rollback(steps)
        return allowed

    def _enter(self, token: int) -> bool | None:
        """Follow one token: None if it is refused, else whether the matcher took a step."""
        edges = self._edges
        if self._waiting:
            if token == edges.close:
                self._waiting = False
            elif token == edges.opens:
                self._waiting = False
                return self._matcher.accept_token(token) or None
            elif not _has(edges.waiting, token):
                return None
            return False
        if self._matcher.is_terminated():
            return False if token in edges.stops else None
        return self._matcher.accept_token(token) or None

    def _fill(self, bits: NDArray[np.int32], at: int) -> None:
        if self._waiting:
            bits[at] = self._edges.waiting
        elif self._matcher.is_terminated():
            bits[at] = self._edges.ended
        else:
            self._matcher.fill_next_token_bitmask(bits, at)
            if not (bits[at] & self._edges.tokens).any():  # a grammar that led nowhere: the answer ends
                bits[at] = self._edges.ended


def _has(bits: NDArray[np.int32], token: int) -> bool:
    return bool(int(bits[token // 32]) >> (token % 32) & 1)


class Forest(Protocol):
    """What is read of a spec.tree.Tree: tensors [R, N] and [R]."""

    @property
    def tokens(self) -> Any: ...
    @property
    def parents(self) -> Any: ...
    @property
    def counts(self) -> Any: ...
    @property
    def forced(self) -> Any: ...


@dataclass(frozen=True)
class Permits:
    """What grammars allow at some of a step's verified nodes: places [m] in the list of them, bits [m, W]."""

    places: NDArray[np.int64]
    bits: NDArray[np.int32]

    def cut(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return logits [M, V] with what is not allowed at -inf. Padding of the vocabulary is never allowed."""
        out = logits.copy()
        out[self.places] = np.where(unpack(self.bits, logits.shape[1]), logits[self.places], np.float32(-np.inf))
        return out


def permits(
    constraints: Sequence[Constraint | None], emits: Sequence[bool], tree: Forest, verified: tuple[Any, Any]
) -> Permits | None:
    """Return what the rows' grammars allow at the verified nodes of a step; None where no row has one.

    Rows that do not emit (all but the last chunk of a prompt) are left alone. At a forced row the state is that of the
    whole prompt. Nodes that a grammar refuses keep their logits; they cannot be accepted.
    """
    places: list[int] = []
    parts = []
    for row, constraint in enumerate(constraints):
        if constraint is None or not emits[row]:
            continue
        first = int(np.searchsorted(verified[0].numpy(), row))
        if bool(tree.forced[row]):
            nodes, bits = constraint.masks([0], [-1])
        else:
            count = int(tree.counts[row])
            nodes, bits = constraint.masks(tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist())
        places += [first + node for node in nodes]
        parts.append(bits)
    if not parts:
        return None
    return Permits(np.array(places, np.int64), np.concatenate(parts))


class Grammars:
    """Compiled grammars of one rank. `check` may be called from any thread, `start` from the one that steps."""

    def __init__(self, load: Callable[[], tuple[Sequence[bytes], Mapping[str, int]]], stops: Sequence[int], vocab: int) -> None:
        """`load` returns the bytes of every token and the special tokens by name; it is called when first needed.

        `stops`: tokens that end an answer; `vocab`: width of the logits.
        """
        self._load = load
        self._stops = tuple(stops)
        self._vocab = vocab
        self._lock = threading.Lock()
        self._special: Mapping[str, int] = {}
        self._compiler: Any = None
        self._judge: Judge | None = None
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def begin(self) -> None:
        """Start the process that tries grammars beside whatever comes next; `warm` waits for it. Nothing without xgrammar."""
        if _installed():
            with self._lock:
                self._prepare().begin()

    def warm(self) -> None:
        """Do now what the first grammar would wait for, seconds: imports here and, if it was begun, in the process that tries
        grammars. Nothing without xgrammar. Raises DraftwoodError when the process does not start."""
        if not _installed():
            return
        with self._lock:
            begun = self._judge
            self._tool()
        if begun is not None:
            begun.wait()

    def check(self, grammar: Grammar, prompt: Sequence[int]) -> Grammar:
        """Return the grammar as the request needs it after `prompt`. Raises RequestError for one that cannot be used.

        A grammar that was not seen lately is tried first in a process of its own, for at most judge.TRY_SECONDS.
        """
        if not _installed():
            need = "needs xgrammar: install it with `pip install draftwood[grammar]`"
            raise RequestError(f"{grammar.param} {need}", grammar.param)
        with self._lock:
            judge, known = self._prepare(), (grammar.kind, grammar.text) in self._kept
            tool, think = self._tool(), self._special.get("<think>")
        if not known:
            fault = judge.ask(grammar.kind, grammar.text)  # seconds, in which rows may start
            if fault:
                raise RequestError(f"{grammar.param} cannot be used: {fault[:300]}", grammar.param)
            compiled = compile_text(tool, grammar.kind, grammar.text)
            with self._lock:
                self._keep(grammar, compiled)
        return dataclasses.replace(grammar, reasoning=think is not None and len(prompt) > 0 and prompt[-1] == think)

    def start(self, grammar: Grammar) -> Constraint:
        """Return the state of a row that begins; `grammar` as `check` returned it."""
        import xgrammar

        with self._lock:
            compiled = self._compiled(grammar)
        matcher = xgrammar.GrammarMatcher(compiled)
        return Constraint(matcher, self._edges(grammar.opens), grammar.reasoning)

    def close(self) -> None:
        """End the process that tries grammars, if it runs."""
        if self._judge is not None:
            self._judge.close()

    def _prepare(self) -> Judge:
        """Load the vocabulary, the first time."""
        if self._judge is None:
            tokens, self._special = self._load()
            # A byte that is in no UTF-8 text keeps grammars from spelling special tokens; they can only be named.
            special = set(self._special.values())
            marked = [b"\xff" + text if id in special else text for id, text in enumerate(tokens)]
            marked += [b""] * (self._vocab - len(marked))
            self._judge = Judge(Vocabulary(marked, self._stops))
        return self._judge

    def _tool(self) -> Any:
        """Return the compiler; import xgrammar, the first time."""
        if self._compiler is None:
            self._compiler = compiler(self._prepare().vocabulary)
        return self._compiler

    def _compiled(self, grammar: Grammar) -> Any:
        key = (grammar.kind, grammar.text)
        if key not in self._kept:
            self._keep(grammar, compile_text(self._tool(), *key))
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, grammar: Grammar, compiled: Any) -> None:
        self._kept[grammar.kind, grammar.text] = compiled
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self._bytes() > KEPT_BYTES):
            self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(compiled.memory_size_bytes for compiled in self._kept.values())

    def _edges(self, opens: int | None) -> Edges:
        width = words(self._vocab)
        ended = np.zeros(width * 32, bool)
        ended[list(self._stops)] = True
        waiting = np.ones(width * 32, bool)
        forbidden = [*self._stops, *(self._special[name] for name in _TOOL_MARKERS if name in self._special)]
        waiting[[id for id in forbidden if id != opens]] = False
        tokens = np.arange(width * 32) < self._vocab
        return Edges(self._special.get("</think>"), opens, _pack(waiting), _pack(ended), _pack(tokens), frozenset(self._stops))


def _installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


def unpack(bits: NDArray[np.int32], vocab: int) -> NDArray[np.bool_]:
    """Return bits [..., W] as bools [..., V]."""
    return np.unpackbits(bits.view(np.uint8), axis=-1, count=vocab, bitorder="little").view(bool)


def _pack(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    return np.packbits(allowed, bitorder="little").view(np.int32)
