"""Answers with a form: always of that form, and the same with any tree, drafter, batch and number of ranks."""

import json
import queue
import re
import threading

import pytest

pytest.importorskip("xgrammar")

from draftwood import nano
from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.llm import LLM
from draftwood.spec.grammar import Grammars
from tests.fakes import VOCAB, FakeDrafter, Toy, fake_engine, fake_plan, run

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]",: '
SPECIAL = {"<think>": 44, "</think>": 45, "<|tool_calls_section_begin|>": 46, "[EOS]": 47}
CLOSE, EOS = 45, 47
WORDS = [c.encode() for c in LETTERS] + [name.encode() for name in SPECIAL]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
REGEX = {"type": "regex", "regex": "([a-m]{2}[0-9]+){1,4}:"}
LIST = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}}}
FITS = {
    "regex": lambda text: re.fullmatch("([a-m]{2}[0-9]+){1,4}:", text),
    "json_schema": lambda text: isinstance(json.loads(text), list),
}


@pytest.fixture(scope="module")
def grammars():
    found = Grammars(lambda: (WORDS, SPECIAL), (EOS,), VOCAB)
    found.check(SamplingParams(response_format=REGEX).grammar, PROMPT)
    yield found
    found.close()


def engine(kind, budget, grammars, **plan):
    return fake_engine(kind, fake_plan(budget, **plan), stop_ids=(EOS,), grammars=grammars)


def ask(form, prompt=PROMPT, **params):
    return prompt, SamplingParams(max_tokens=60, response_format=form, **params)


def text(tokens):
    return "".join(WORDS[t].decode() for t in tokens)


@pytest.mark.parametrize("budget", [0, 1, 7, 33])
@pytest.mark.parametrize("kind", FakeDrafter.KINDS)
def test_greedy_text_is_the_best_allowed_token_each_time(kind, budget, grammars):
    toy, (prompt, params) = Toy(), ask(REGEX)
    constraint = grammars.start(grammars.check(params.grammar, prompt))
    expected, state = [], toy.state(prompt)
    while len(expected) < 60 and EOS not in expected:
        _, bits = constraint.masks([0], [-1])
        logits = toy.logits(state)
        expected.append(max(range(VOCAB), key=lambda t: (bits[0, t // 32] >> t % 32 & 1, float(logits[t]))))
        constraint.commit(expected[-1:])
        state = toy.extend(state, expected[-1])
    assert list(run(engine(kind, budget, grammars), [(prompt, params)]).values()) == [expected]


@pytest.mark.parametrize("form", [REGEX, LIST], ids=lambda form: form["type"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_answers_have_their_form_whatever_the_tree(form, temperature, grammars):
    requests = [ask(form, temperature=temperature, seed=seed, logit_bias={LETTERS.index(":"): 2, EOS: 2}) for seed in range(6)]
    plain = [list(run(engine(None, 0, grammars), [one]).values())[0] for one in requests]
    for kind, budget in (("good", 8), ("blurred", 33), ("random", 16)):
        assert list(run(engine(kind, budget, grammars), requests).values()) == plain
    ended = [tokens for tokens in plain if tokens[-1] == EOS]
    assert ended
    assert all(FITS[form["type"]](text(tokens[:-1])) for tokens in ended)


def test_the_form_holds_after_the_reasoning_wherever_it_ends(grammars):
    prompt = [*PROMPT, SPECIAL["<think>"]]
    requests = [ask(REGEX, prompt, temperature=1, seed=seed, logit_bias={CLOSE: 5, 42: 2}) for seed in range(12)]
    plain = [list(run(engine(None, 0, grammars), [one]).values())[0] for one in requests]
    assert list(run(engine("blurred", 24, grammars), requests).values()) == plain
    ends = {tokens.index(CLOSE) for tokens in plain if CLOSE in tokens}
    assert len(ends) > 4
    for tokens in plain:
        thought = tokens[: tokens.index(CLOSE)] if CLOSE in tokens else tokens
        assert EOS not in thought and SPECIAL["<|tool_calls_section_begin|>"] not in thought
        if tokens[-1] == EOS:
            assert FITS["regex"](text(tokens[len(thought) + 1 : -1]))


def test_rows_without_a_form_are_not_touched_by_those_with_one(grammars):
    free = [(PROMPT[:n], SamplingParams(max_tokens=20, temperature=n % 2, seed=n)) for n in range(2, 6)]
    alone = [list(run(engine("blurred", 8, grammars), [one]).values())[0] for one in free]
    mixed = [one for pair in zip(free, [ask(REGEX, temperature=1, seed=s) for s in range(4)], strict=True) for one in pair]
    assert list(run(engine("blurred", 8, grammars, prefill_chunk=2), mixed).values())[::2] == alone


def test_a_form_goes_on_past_its_end_with_end_tokens_only(grammars):
    prompt, params = ask({"type": "regex", "regex": "ab"}, ignore_eos=True)
    (tokens,) = run(engine("good", 8, grammars), [(prompt, params)]).values()
    assert text(tokens[:2]) == "ab" and set(tokens[2:]) == {EOS} and len(tokens) == 60


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("budget", [0, 16])
def test_a_form_goes_on_where_a_preempted_row_was_interrupted(budget, prefix, grammars):
    long = {"type": "regex", "regex": "([a-m]{2}[0-9]+){4,9}:"}
    prompts = [PROMPT * 4 + [SPECIAL["<think>"]] * (n % 2) for n in range(4)]
    requests = [ask(long, prompt, temperature=1, seed=n, logit_bias={CLOSE: 5}) for n, prompt in enumerate(prompts)]
    plain = [list(run(engine(None, 0, grammars), [one]).values())[0] for one in requests]
    some = engine("blurred", budget, grammars, num_pages=10 if budget else 8, max_model_len=120, enable_prefix_caching=prefix)
    for _ in range(2):  # the second time on what the first has left
        assert list(run(some, requests).values()) == plain
    assert some.scheduler.preemptions > 0 and (some.totals.prefix_hits > 0) == prefix


def test_every_rank_follows_the_same_grammar(grammars):
    class Pair:
        def __init__(self, rank):
            self.rank, self.world = rank, 2

        def broadcast(self, x, src=0):
            if self.rank == 0:
                line.put(x)
                return x
            return line.get(timeout=60)

    line = queue.Queue()
    first, second = engine("blurred", 9, grammars), engine("blurred", 9, grammars)
    first.parts.comm, second.parts.comm = Pair(0), Pair(1)
    follower = threading.Thread(target=second.follow)
    follower.start()
    out = run(first, [ask(REGEX, temperature=1, seed=s) for s in range(3)])
    line.put(None)
    follower.join(timeout=60)
    assert not follower.is_alive() and len(out) == 3
    assert first.stepper.rows.lengths.tolist() == second.stepper.rows.lengths.tolist()
    assert first.stepper.rows.roots.tolist() == second.stepper.rows.roots.tolist()


def test_what_cannot_be_followed_is_refused_before_it_is_queued(grammars):
    some = engine("good", 8, grammars)
    with pytest.raises(RequestError, match="cannot be used") as refused:
        some.add(*ask({"type": "regex", "regex": "(a"}))
    assert refused.value.param == "response_format" and some.idle
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine("good", 8, None).add(*ask(REGEX))
    with pytest.raises(RequestError, match="min_tokens"):
        ask(REGEX, min_tokens=3)
    with pytest.raises(RequestError, match="not a Grammar"):
        SamplingParams(grammar="a+")


def test_nano_answers_in_json_with_its_trees():
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}, "colour": {"enum": ["red", "green"]}},
        "required": ["age", "colour"],
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with LLM(model=str(nano.path()), tree_budget=16) as llm:
        for temperature in (0.0, 1.0):
            answers = [
                llm.generate("The ball is", SamplingParams(temperature=temperature, seed=1, tree_budget=b, response_format=form))[0]
                for b in (0, 16)
            ]
            assert answers[0].token_ids == answers[1].token_ids
            found = json.loads(answers[0].text)
            assert set(found) == {"age", "colour"} and 0 <= found["age"] <= 99
            assert answers[1].accept_length > 1.5 and answers[0].finish_reason == "stop"
