"""Masks of grammars at the nodes of trees: the same as along each path by itself, whatever the tree."""

import json
import random
import re
import time

import numpy as np
import pytest
import torch

pytest.importorskip("xgrammar")

from draftwood import nano
from draftwood.errors import RequestError
from draftwood.spec.formats import response_grammar, tool_grammar
from draftwood.spec.grammar import Grammars, permits
from draftwood.spec.judge import allowed_ids
from draftwood.spec.tree import Tree, chain, join
from draftwood.text.tokenizer import Tokenizer

WORDS = Tokenizer.load(nano.path())
VOCAB = WORDS.vocab_size
STOPS = WORDS.eos_ids
THINK, CLOSE = WORDS.special["<think>"], WORDS.special["</think>"]
SECTION = WORDS.special["<|tool_calls_section_begin|>"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PERSON}}
JSON = {"type": "json_schema", "json_schema": {"schema": PERSON}}
FORMATS = [JSON, {"type": "regex", "regex": "[a-f]{2,9}(é|日本)?"}, {"type": "ebnf", "ebnf": 'root ::= "(" root ")" | "x"+'}]


@pytest.fixture(scope="module")
def grammars():
    found = Grammars(lambda: ([WORDS.token_bytes(i) for i in range(VOCAB)], WORDS.special), STOPS, VOCAB)
    yield found
    found.close()


def test_what_was_warmed_is_ready_and_without_xgrammar_there_is_nothing_to_warm(monkeypatch):
    warm = Grammars(lambda: ([WORDS.token_bytes(i) for i in range(VOCAB)], WORDS.special), STOPS, VOCAB)
    warm.begin()
    warm.warm()
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process is started for the first request"))
    monkeypatch.setattr("draftwood.spec.grammar.compiler", lambda _: pytest.fail("the first request imports"))
    try:
        assert allowed(begin(warm, {"type": "regex", "regex": "q"})) == set(WORDS.encode("q"))
    finally:
        warm.close()
    monkeypatch.setattr("draftwood.spec.grammar._installed", lambda: False)
    bare = Grammars(lambda: pytest.fail("the vocabulary is read for nothing"), STOPS, VOCAB)
    bare.begin()
    bare.warm()
    with pytest.raises(RequestError, match=r"draftwood\[grammar\]"):
        begin(bare, JSON)
    bare.close()


def begin(grammars, form, reasoning=False):
    grammar = tool_grammar([TOOL], WORDS.special) if form == "tools" else response_grammar(form)
    return grammars.start(grammars.check(grammar, [THINK] if reasoning else [1]))


def allowed(constraint, path=()):
    """The tokens allowed after a path below the committed tokens, None where the grammar refuses the path."""
    tokens = [0, *path]
    nodes, bits = constraint.masks(tokens, range(-1, len(path)))
    return set(allowed_ids(bits[-1]).tolist()) if len(nodes) == len(tokens) else None


def grow(constraint, rng, count, wrong=0.3):
    """A random tree whose nodes mostly follow the grammar: tokens, parents."""
    tokens, parents, paths = [0], [-1], [()]
    for _ in range(count):
        parent = rng.randrange(len(tokens))
        choices = allowed(constraint, paths[parent])
        token = rng.choice(sorted(choices)) if choices and rng.random() > wrong else rng.randrange(VOCAB)
        tokens.append(token)
        parents.append(parent)
        paths.append((*paths[parent], token))
    return tokens, parents, paths


@pytest.mark.parametrize("form", [*FORMATS, "tools"], ids=["json", "regex", "ebnf", "tools"])
@pytest.mark.parametrize("reasoning", [False, True], ids=["at once", "after reasoning"])
def test_every_node_of_a_tree_is_masked_as_its_path_alone_would_be(grammars, form, reasoning):
    rng = random.Random(3)
    for _ in range(6):
        tree, alone = begin(grammars, form, reasoning), begin(grammars, form, reasoning)
        for _ in range(8):
            tokens, parents, paths = grow(alone, rng, 12)
            nodes, bits = tree.masks(tokens, parents)
            assert nodes[0] == 0 and len(set(nodes)) == len(nodes)
            for node, path in enumerate(paths):
                expected = allowed(alone, path)
                assert (node in nodes) == (expected is not None)
                if expected is not None:
                    assert set(allowed_ids(bits[nodes.index(node)]).tolist()) == expected
            step = rng.choice(sorted(allowed(alone)))
            for constraint in (tree, alone):
                constraint.commit([step])


def test_below_a_refused_node_nothing_is_reached(grammars):
    constraint = begin(grammars, JSON)
    brace = WORDS.encode("{")[0]
    nodes, _ = constraint.masks([0, WORDS.encode("[")[0], brace, brace], [-1, 0, 1, 0])
    assert nodes == [0, 3]


def test_end_tokens_are_allowed_exactly_where_the_grammar_is_complete(grammars):
    for form, text, complete in [
        (JSON, '{"name": "a", "age": 3', False),
        (JSON, '{"name": "a", "age": 3}', True),
        (FORMATS[1], "a", False),
        (FORMATS[1], "ab", True),
        (FORMATS[2], "((x)", False),
        (FORMATS[2], "((x))", True),
    ]:
        constraint = begin(grammars, form)
        constraint.commit(WORDS.encode(text))
        assert (set(STOPS) <= allowed(constraint)) == complete == bool(set(STOPS) & allowed(constraint))
    assert allowed(constraint, STOPS[:1]) == allowed(constraint, [STOPS[0], STOPS[0]]) == set(STOPS)
    constraint.commit([STOPS[1], 5, 6])
    assert allowed(constraint) == set(STOPS)


@pytest.mark.parametrize("depth", range(6))
def test_the_grammar_starts_where_reasoning_ends_at_any_depth(grammars, depth):
    first = allowed(begin(grammars, JSON))
    thought = WORDS.encode("some thoughts about braces { and so on, at length")[:depth]
    for committed in range(depth + 1):
        constraint = begin(grammars, JSON, reasoning=True)
        constraint.commit(thought[:committed])
        path = thought[committed:]
        for ahead in range(len(path) + 1):
            here = allowed(constraint, path[:ahead])
            assert not here & {*STOPS, SECTION} and CLOSE in here and len(here) > VOCAB - 10
        assert allowed(constraint, [*path, CLOSE]) == first
        assert allowed(constraint, [*path, CLOSE, WORDS.encode("x")[0]]) is None
        constraint.commit([*path, CLOSE])
        assert allowed(constraint) == first


def test_a_required_call_may_open_inside_the_reasoning(grammars):
    constraint = begin(grammars, "tools", reasoning=True)
    assert SECTION in allowed(constraint)
    inside = allowed(constraint, [5, SECTION])
    assert inside == allowed(constraint, [5, CLOSE, SECTION]) == {WORDS.special["<|tool_call_begin|>"]}
    assert allowed(constraint, [5, CLOSE]) == {SECTION}
    call = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"name": "a", "age": 1}<|tool_call_end|>'
    whole = WORDS.encode(f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>", allow_special=True)
    constraint.commit([5, *whole])
    assert allowed(constraint) == set(STOPS)


def test_text_that_spells_a_special_token_is_not_that_token(grammars):
    constraint = begin(grammars, {"type": "json_object"})
    constraint.commit(WORDS.encode('{"a": "'))
    here = allowed(constraint)
    assert not here & set(WORDS.special.values())
    assert set(WORDS.encode("<|im_end|>")) <= here


def test_permits_cut_the_logits_of_the_rows_that_have_a_grammar(grammars):
    constraint = begin(grammars, JSON)
    brace, other = WORDS.encode("{")[0], WORDS.encode("x")[0]
    free = Tree(
        tokens=torch.tensor([[9, brace, other]]),
        parents=torch.tensor([[-1, 0, 0]]),
        depths=torch.tensor([[0, 1, 1]]),
        counts=torch.tensor([3]),
        forced=torch.tensor([False]),
        logprob=torch.zeros(1, 3),
    )
    tree = join([free, free, chain([[1, 2, 3]]), chain([[1, 2]])])
    verified = tree.verified()
    logits = np.random.default_rng(0).normal(size=(len(verified[0]), VOCAB)).astype(np.float32)
    found = permits([None, constraint, constraint, constraint], [True, True, True, False], tree, verified)
    cut = found.cut(logits)
    places = list(zip(*(v.tolist() for v in verified), strict=True))
    first, after = allowed(constraint), allowed(constraint, [brace])
    for m, place in enumerate(places):
        kept = set(np.flatnonzero(cut[m] > -np.inf).tolist())
        expected = {(1, 0): first, (1, 1): after, (2, 2): first}.get(place, set(range(VOCAB)))
        assert kept == expected, place
        assert (cut[m, sorted(kept)] == logits[m, sorted(kept)]).all()
    assert permits([None] * 4, [True] * 4, tree, verified) is None


@pytest.mark.parametrize("form", [*FORMATS, "tools"], ids=["json", "regex", "ebnf", "tools"])
def test_a_lead_is_what_is_allowed_along_the_best_allowed_path_and_leaves_no_trace(grammars, form):
    rng = np.random.default_rng(5)
    constraint = begin(grammars, form)
    for _ in range(5):
        scores = rng.normal(size=(9, VOCAB)).astype(np.float32)
        found, path = constraint.lead(scores), []
        for depth in range(9):
            assert set(np.flatnonzero(found[depth]).tolist()) == allowed(constraint, path)
            path.append(int(np.where(found[depth], scores[depth], -np.inf).argmax()))
        constraint.commit(path[:2])
    assert constraint.lead(np.full((3, VOCAB), np.nan, np.float32)).shape == (3, VOCAB)
    waiting = begin(grammars, form, reasoning=True)
    assert not waiting.following
    waiting.commit([CLOSE])
    assert waiting.following


def test_random_answers_fit_their_format(grammars):
    rng = random.Random(0)
    for form, fits in [
        ({"type": "regex", "regex": "[a-c]{1,8}"}, lambda text: re.fullmatch("[a-c]{1,8}", text)),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 4}}},
            lambda text: set(json.loads(text)) <= {1, "a"},
        ),
    ]:
        for _ in range(10):
            constraint, out = begin(grammars, form), []
            while not out or out[-1] not in STOPS:
                out.append(rng.choice(sorted(allowed(constraint))))
                constraint.commit(out[-1:])
            assert fits(WORDS.decode(out[:-1]))


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "regex": "(a"},
        {"type": "regex", "regex": "(?=a)b"},
        {"type": "ebnf", "ebnf": "root := x"},
        {"type": "ebnf", "ebnf": 'foo ::= "x"'},
        {"type": "ebnf", "ebnf": "root ::= a\na ::= a"},
        {"type": "ebnf", "ebnf": 'root ::= root root | "a" | ""'},
        {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/none"}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}},
    ],
    ids=lambda form: str(form)[-30:],
)
def test_grammars_that_do_not_compile_allow_nothing_or_grow_dear_are_refused(grammars, form):
    grammars.check(response_grammar({"type": "json_object"}), [1])  # the process that tries them runs
    start = time.perf_counter()
    with pytest.raises(RequestError, match="cannot be used: ") as refused:
        begin(grammars, form)
    assert time.perf_counter() - start < 4  # 0.6 s of a CPU that others use too
    assert refused.value.param == "response_format" and "\n" not in str(refused.value)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_works(grammars, monkeypatch):
    grammars.check(response_grammar({"type": "json_object"}), [1])
    monkeypatch.setattr("draftwood.spec.judge.TRY_SECONDS", 0.001)
    with pytest.raises(RequestError, match="takes longer than"):
        begin(grammars, {"type": "regex", "regex": "(a|b|ab)*" * 100})
    monkeypatch.undo()
    assert allowed(begin(grammars, {"type": "regex", "regex": "q"})) == set(WORDS.encode("q"))
