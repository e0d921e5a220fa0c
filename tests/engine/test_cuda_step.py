"""The device's step, run on the CPU by the kernels' references: the CPU engine's tokens whatever the tree, batch and loop."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import samples
from draftwood.engine.cuda.stepper import likeliest
from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.kernels.rows import op as rows_op
from draftwood.kernels.rows import ref as rows_ref
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes import ref as sizes_ref
from draftwood.llm import LLM
from draftwood.model.cuda.keys import Key, Sizes
from tests import cuda_refs
from tests.engine.cuda_nano import decode, engine, made_plan

NEAR_TIE = 0.6
"""Logits between the best two choices that bfloat16 may swap: nano's, with a standard deviation of 6, then differ by 0.1 (standard
deviation; 0.7 at most among 8192) from those in float32."""


@pytest.fixture(scope="module", autouse=True)
def references():
    patch = pytest.MonkeyPatch()
    cuda_refs.replace(patch)
    for name in ("begin", "select", "advance", "synthetic", "guesses"):
        patch.setattr(rows_op, name, getattr(rows_ref, name))
    for name in ("fit", "learn"):
        patch.setattr(sizes_op, name, getattr(sizes_ref, name))
    yield
    patch.undo()


@cache
def host() -> LLM:
    return LLM("nano", device="cpu", tree_budget=0)


def text(n: int) -> tuple[int, ...]:
    """The first n tokens of the built-in prompts, one after another."""
    ids = [i for sample in samples.SAMPLES for i in samples.encode(sample, host())]
    return tuple(ids[:n])


@cache
def expected(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], list[float]]:
    """What the CPU engine decodes without trees, and how far ahead each token was."""
    llm = host()
    llm.engine.records = []
    (completion,) = llm.generate(list(prompt), dataclasses.replace(params, tree_budget=None))
    gaps = [gap for record in llm.engine.records for row in record.rows for gap in row.gaps]
    llm.engine.records = None
    return completion.token_ids, gaps


def agree(got: list[int], prompt: tuple[int, ...], params: SamplingParams) -> int:
    """Assert that tokens are the CPU engine's up to the first near-tie; return how many were compared."""
    want, gaps = expected(prompt, params)
    for place, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            assert gaps[place] <= NEAR_TIE, f"token {place} is {a}, not {b}, which was {gaps[place]:.3f} ahead"
            return place
    assert len(got) == len(want)
    return len(want)


class Hashable(SamplingParams):
    """Parameters that a cache can have as key."""

    def __hash__(self) -> int:
        return hash(repr(self))


def ask(**values) -> SamplingParams:
    return Hashable(**values)


@pytest.mark.parametrize(
    "budget",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        8,
        pytest.param(16, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
    ],
)
def test_greedy_and_sampled_tokens_are_the_cpu_engines(budget):
    some = engine(tree_budget=budget)
    asks = [
        (text(30), ask(max_tokens=14)),
        (text(65), ask(max_tokens=12, temperature=0.8, seed=7, top_p=0.95)),
        (text(9), ask(max_tokens=10, temperature=1.0, seed=-3, top_k=40, min_p=0.02)),
    ]
    compared = sum(agree(got, *one) for got, one in zip(decode(some, asks), asks, strict=True))
    assert compared >= 24
    if budget >= 8:
        assert some.totals.decoded > 1.3 * some.totals.row_steps, "trees must be of use"


MIXED = [
    (text(1), ask(max_tokens=9, tree_budget=0)),
    (text(63), ask(max_tokens=5, tree_budget=8)),
    (text(64), ask(max_tokens=7, temperature=0.7, seed=11)),
    (text(65), ask(max_tokens=1)),
    (text(200), ask(max_tokens=8, tree_budget=3, repetition_penalty=1.2, frequency_penalty=0.4)),
    (text(130), ask(max_tokens=6, temperature=1.2, seed=5, logit_bias={11: 4.0, 220: -100.0}, presence_penalty=0.5)),
    (text(20), ask(max_tokens=12, tree_budget=16, stop_token_ids=(11,))),
]


@cache
def alone() -> tuple[tuple[int, ...], ...]:
    """Each of MIXED by itself, without trees."""
    return tuple(
        tuple(decode(engine(tree_budget=16), [(prompt, ask(**{**vars(params), "tree_budget": 0}))])[0]) for prompt, params in MIXED
    )


@pytest.mark.slow
def test_the_cpu_engine_agrees_on_each_alone():
    for got, (prompt, params) in zip(alone(), MIXED, strict=True):
        agree(list(got), prompt, params)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_prompts_of_any_length_beside_rows_that_come_and_go(rows):
    """Rows beyond the few that run wait; pieces of prompts run beside trees; the loop is a step ahead."""
    some = engine(tree_budget=16, max_num_seqs=rows, max_num_batched_tokens=128)
    assert [tuple(t) for t in decode(some, MIXED)] == list(alone())


@pytest.mark.slow
def test_the_plain_loop_gives_the_same():
    some = engine(tree_budget=16, max_num_batched_tokens=64)
    some.ahead = 0
    assert [tuple(t) for t in decode(some, MIXED)] == list(alone())


@pytest.mark.slow
def test_what_a_prompt_commits_does_not_depend_on_its_chunks():
    caches = []
    for chunk in (64, 128, 512):
        some = engine(tree_budget=8, max_num_batched_tokens=chunk)
        some.add(text(200), ask(max_tokens=1))
        while not some.idle:
            some.step()
        slots = [int(p) * 64 + i for p in some.stepper.rows._pages[0][:4] for i in range(64)][:200]
        window = some.parts.draft_kv
        caches.append((some.parts.kv.cache[:, slots], window.keys[:, 0, :200], window.values[:, 0, :200]))
    for other in caches[1:]:
        assert all(bool((a == b).all()) for a, b in zip(caches[0], other, strict=True))


@pytest.mark.slow
def test_aborted_rows_leave_the_others_alone():
    some = engine(tree_budget=8, max_num_seqs=3)
    ids = [some.add(prompt, params) for prompt, params in MIXED[:5]]
    out = {i: [] for i in ids}
    for tick in range(200):
        if tick == 2:
            some.abort(ids[1])
        if tick == 4:
            some.abort(ids[4])
        if some.idle:
            break
        for output in some.step():
            out[output.request_id] += output.token_ids
    assert some.scheduler.available == some.plan.num_pages
    assert [tuple(out[ids[i]]) for i in (0, 2, 3)] == [alone()[i] for i in (0, 2, 3)]


@pytest.mark.slow
def test_hits_in_the_prefix_cache_and_preemption_change_nothing():
    some = engine(tree_budget=8, max_num_seqs=2, enable_prefix_caching=True, pages=7)
    first, second = (text(170), ask(max_tokens=24, ignore_eos=True)), (text(175)[::-1], ask(max_tokens=22, ignore_eos=True))
    want = [decode(engine(tree_budget=8), [one])[0] for one in (first, second)]
    assert decode(some, [first, second]) == want
    assert some.scheduler.preemptions > 0
    before = some.totals.prompt_tokens
    assert decode(some, [second]) == want[1:]
    assert some.totals.prompt_tokens - before < 64, "two pages of the prompt are in the cache"


def test_results_tell_trees_log_probabilities_and_steps():
    some = engine(tree_budget=8)
    some.records = []
    prompt, params = text(70), ask(max_tokens=8, logprobs=0, ignore_eos=True)
    some.add(prompt, params)
    scores, tokens = [], []
    while not some.idle:
        for output in some.step():
            scores += output.logprobs
            tokens += output.token_ids
    assert len(scores) == len(tokens) == 8 and all(s <= 0 for s in scores)
    rows = [row for record in some.records for row in record.rows]
    assert rows[0].forced and rows[0].tokens == list(prompt) and rows[0].committed == tokens[:1]
    at = len(prompt)
    for row in rows[1:]:
        n = len(row.tokens)
        assert row.length == at and row.tokens[0] == tokens[at - len(prompt)] and n in (1, 9)
        assert all(row.parents[i] < i and row.depths[i] == row.depths[row.parents[i]] + 1 for i in range(1, n))
        assert [row.tokens[i] for i in row.path[1:]] == row.committed[:-1] and len(row.logprob) == n
        at += len(row.path)
    assert max(len(row.tokens) for row in rows[1:]) == 9


@pytest.mark.slow
def test_synthetic_acceptance_returns_what_was_asked_for():
    some = engine(tree_budget=8, tree_spine=True, synthetic_accept=3.5)
    decode(some, [(text(20), ask(max_tokens=120, ignore_eos=True)), (text(30), ask(max_tokens=120, ignore_eos=True))])
    assert abs(some.totals.decoded / some.totals.row_steps - 3.5) < 0.4


def test_sizes_cover_every_step_that_a_plan_allows():
    sizes = Sizes.of(made_plan(tree_budget=17, max_num_seqs=9)[0])
    assert sizes.rows == (1, 2, 4, 8, 16) and sizes.budgets == (0, 8, 16, 32) and sizes.pieces == 8
    assert sizes.key(9, 17, False) == Key(16, 32, False) and sizes.key(3, 17, True) == Key(4, 8, True)
    several = [(r, b, p, o) for r in range(1, 10) for b in range(18) for p in (False, True) for o in (False, True)]
    assert set(sizes.keys()) >= {sizes.key(*one) for one in several}
    assert not sizes.key(3, 0, False, False).observes and sizes.key(3, 1, False, False).observes
    every = sizes.keys()
    for key in every:
        bucket = sizes.bucket(key)
        assert bucket.nodes <= 65 and bucket.tokens >= key.rows * (1 + key.budget)
    assert {key.budget for key in every if key.prompts} == {0, 8}
    alone, wide = (Sizes.make(4096, 64, block, 64, 512) for block in (0, 8))
    assert max(b.tokens for b in wide.buckets()) == 64 * 65 and max(b.tokens for b in alone.buckets()) == 64 + 512
    assert Sizes.make(4096, 4, 8, 5, 512).key(2, 5, True) == Key(2, 8, True) and alone.key(2, 0, True).budget == 0


def test_trees_beside_a_prompt_are_small_and_the_tokens_those_of_each_alone():
    some = engine(tree_budget=64, max_num_seqs=2, max_num_batched_tokens=64)
    some.records = []
    asks = [(text(40), ask(max_tokens=40, ignore_eos=True)), (text(130), ask(max_tokens=2))]
    ids = [some.add(*asks[0])]
    out = {ids[0]: [], ids[0] + 1: []}
    for tick in range(60):
        if tick == 3:
            ids.append(some.add(*asks[1]))
        for output in some.step():
            out[output.request_id] += output.token_ids
    nodes = {beside: [] for beside in (False, True)}
    for record in some.records:
        forced = any(row.forced for row in record.rows)
        nodes[forced] += [len(row.tokens) for row in record.rows if not row.forced]
    assert max(nodes[True]) == 9 and max(nodes[False]) > 17
    for i, one in zip(ids, asks, strict=True):
        agree(out[i], *one)


@pytest.mark.slow
def test_the_bits_behind_every_token_are_those_of_plain_decoding():
    """With sums in float64 the references are as good as row-invariant; what is compared here is how the bits are told."""
    asks = [(text(40), ask(max_tokens=7)), (text(70), ask(max_tokens=6, temperature=0.9, seed=4))]

    def bits(budget: int) -> list[list[int]]:
        some = engine(tree_budget=budget, max_num_seqs=2)
        some.stepper.tell_bits(True)
        some.records = []
        ids = [some.add(*one) for one in asks]
        while not some.idle:
            some.step()
        rows = [row for record in some.records for row in record.rows]
        assert all(len(row.prints) == len(row.committed) for row in rows)
        return [[p for row in rows if row.request_id == i for p in row.prints][:6] for i in ids]

    plain = bits(0)
    assert bits(8) == plain and len({p for row in plain for p in row}) == 12


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.0, 0.08, 9.0])
def test_automatic_trees_are_as_large_as_they_pay_and_change_no_token(slope):
    """slope: what a node costs, as a share of a plain step."""
    some = engine(tree_budget="auto", max_num_seqs=2)
    some.stepper.auto.measure(lambda rows, nodes, context, trees: (1 + slope * rows * (nodes - 1), rows * nodes))
    asks = [
        (text(30), ask(max_tokens=30, ignore_eos=True)),
        (text(40), ask(max_tokens=24, temperature=0.7, seed=2, ignore_eos=True)),
    ]
    plain = [(prompt, ask(**{**vars(params), "tree_budget": 0})) for prompt, params in asks]
    want = [decode(engine(tree_budget=0), [one])[0] for one in plain]
    assert decode(some, asks) == want
    sizes = some.totals.trees
    mean = sum(n * count for n, count in enumerate(sizes)) / sum(sizes)
    assert mean > 12 if slope == 0 else mean < 1.5 if slope == 9 else 1 < mean < 12
    assert bool((some.stepper.auto.calibration.predicted > 0).any()) == (slope < 9)


def test_a_step_of_no_request_can_be_timed():
    some = engine(tree_budget="auto", max_num_seqs=2)
    launch = some.stepper.prepare(some.stepper.sizes.key(2, 4, False))
    some.stepper.rows.rehearse([4, 4], 100, some.plan.num_pages)
    with torch.inference_mode():
        launch()
    step = some.stepper.step_of(some.stepper.sizes.key(2, 4, False))
    assert int(step.flat.total) == 10 and step.results.lengths.tolist() == [100, 100]
    ((prompt, params),) = [(text(30), ask(max_tokens=5, tree_budget=4))]
    agree(decode(some, [(prompt, params)])[0], prompt, params)


def test_automatic_trees_are_refused_where_nothing_was_measured():
    with pytest.raises(RequestError, match="started with --tree-budget auto") as refused:
        engine(tree_budget=8).add(text(5), SamplingParams(tree_budget="auto"))
    assert refused.value.param == "tree_budget"


@pytest.mark.parametrize("budget", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_an_answer_waits_for_min_tokens(budget):
    """text(70) ends by itself after six tokens."""
    some = engine(tree_budget=budget)
    for least, temperature in ((5, 0.0), (12, 0.0), (9, 0.8)):
        prompt, params = text(70), ask(max_tokens=16, min_tokens=least, stop_token_ids=(11,), temperature=temperature, seed=3)
        (got,) = decode(some, [(prompt, params)])
        assert agree(got, prompt, params) > 4 and len(got) >= least


def test_the_likeliest_tokens_of_the_rows_that_ask_are_those_of_the_cpu_engine():
    some = engine(tree_budget=8, max_num_seqs=2)
    prompt, params = text(70), ask(max_tokens=6, logprobs=3)
    first, second = some.add(prompt, params), some.add(text(30), ask(max_tokens=6))
    told = []
    while not some.idle:
        for output in some.step():
            if output.request_id == second:
                assert output.top_logprobs is None
            else:
                told += zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True)
    (want,) = host().generate(list(prompt), params)
    assert first != second and len(told) == 6
    for (token, score, top), others in zip(told, want.top_logprobs, strict=True):
        assert top[0] == (token, pytest.approx(score, abs=1e-4)) and [v for _, v in top] == sorted(
            (v for _, v in top), reverse=True
        )
        assert {i for i, _ in top[:1]} <= {i for i, _ in others}
        assert all(abs(v - dict(others).get(i, v)) < 0.5 for i, v in top)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(
        st.lists(st.sampled_from([-3.5, -0.0, 0.0, 1e-30, 2.0, 2.0000002, 1e30]), min_size=20, max_size=20), min_size=1, max_size=4
    ),
)
def test_the_likeliest_of_equal_logits_have_the_lowest_ids(most, values):
    logits = torch.tensor(values)
    assert torch.equal(likeliest(logits, most), logits.sort(dim=-1, descending=True, stable=True).indices[:, :most])


FORMS = (
    {"type": "regex", "regex": r"(yes|no), [0-9]{3,5}\."},
    {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    },
)


@pytest.mark.parametrize("budget", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_answers_with_a_form_have_it_beside_rows_without_one(budget):
    pytest.importorskip("xgrammar")
    some = engine(tree_budget=budget, max_num_seqs=3)
    asks = [
        (text(40), ask(max_tokens=20, response_format=FORMS[0])),
        (text(30), ask(max_tokens=12)),
        (text(70), ask(max_tokens=24, response_format=FORMS[1], temperature=0.8, seed=2)),
        (text(20), ask(max_tokens=15, response_format=FORMS[0], temperature=1.0, seed=5)),
    ]
    got = decode(some, asks)
    for tokens, one in zip(got, asks, strict=True):
        agree(tokens, *one)
    words = host().tokenizer
    for tokens, (_, params) in zip(got, asks, strict=True):
        answer = words.decode([t for t in tokens if t < 7936])
        if params.response_format == FORMS[0]:
            assert re.fullmatch(r"(yes|no), [0-9]{3,5}\.", answer)
    some.close()
