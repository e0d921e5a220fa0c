"""nano on a cache of a few pages: hits, misses and preemptions give the text, the logprobs and the drafts of a run alone."""

import dataclasses
import importlib.util

import pytest

from draftwood import nano
from draftwood.engine.request import SamplingParams
from draftwood.engine.scheduler import Scheduler
from draftwood.llm import LLM

HEAD = '"""Lists."""\n\nimport os\n\n\ndef mean(values):\n    total = 0\n    for value in values:\n        total += value\n'
HEAD += "    return total / len(values)\n\n\n"
TAILS = ("def median(values):\n", "class Stack:\n    def push(", "def is_even(n):\n")
FORM = {"type": "regex", "regex": r"(\w{1,12} = \[[0-9, ]{6,40}\]\n){2,6}"}
FORMED = importlib.util.find_spec("xgrammar") is not None
PAGES = {0: 5, 16: 5, 64: 7}
"""By tree budget: too few for two of these requests together, enough for one."""


@pytest.fixture(scope="module")
def plain():
    """Plain decoding with all the memory it could want and no cache."""
    with LLM(str(nano.path()), tree_budget=0, max_num_seqs=1, max_model_len=512, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def cached():
    with LLM(str(nano.path()), tree_budget=64, max_num_seqs=4, max_model_len=512, device="cpu", enable_prefix_caching=True) as made:
        yield made


def squeezed(llm: LLM, pages: int, prefix: bool) -> Scheduler:
    """Give an idle engine a new pool of so few pages."""
    options = dataclasses.replace(llm.plan.options, enable_prefix_caching=prefix)
    llm.engine.scheduler = Scheduler(dataclasses.replace(llm.plan, options=options, num_pages=pages), llm.engine.parts.vocab)
    return llm.engine.scheduler


def asked(temperature, budget=None):
    """Parameters of the prompts: one with penalties, one with a form, one bare."""
    some = {"temperature": temperature, "max_tokens": 40, "tree_budget": budget, "logprobs": 0, "ignore_eos": True}
    special = {"frequency_penalty": 0.2, "repetition_penalty": 1.1}, {"response_format": FORM if FORMED else None}, {}
    return [SamplingParams(seed=n, **some, **mine) for n, mine in enumerate(special)]


def seen(completion):
    return completion.token_ids, completion.text, completion.finish_reason, len(completion.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemptions_and_hits_give_the_text_of_plain_decoding(temperature, plain, cached):
    prompts = [plain.encode(HEAD * 3)[:100] + plain.encode(tail) for tail in TAILS]
    alone = [plain.generate(p, one)[0] for p, one in zip(prompts, asked(temperature), strict=True)]
    hits = preempted = 0
    for budget, pages in PAGES.items():
        for prefix in (False, True):
            scheduler, before = squeezed(cached, pages, prefix), cached.engine.totals.prefix_hits
            found = cached.generate(prompts, asked(temperature, budget))
            assert [seen(c) for c in found] == [seen(c) for c in alone]
            for mine, one in zip(found, alone, strict=True):
                assert mine.logprobs == pytest.approx(one.logprobs, abs=1e-3)
            assert scheduler.available == pages
            hits += cached.engine.totals.prefix_hits - before
            preempted += scheduler.preemptions > 0
    assert hits and preempted >= len(PAGES)


def test_streams_and_stop_texts_go_on_where_a_row_was_preempted(plain, cached):
    prompts = [plain.encode(HEAD * 3)[:100] + plain.encode(tail) for tail in TAILS[:2]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    stops = [plain.generate(p, params)[0].text.rstrip()[-3:] for p in prompts]
    asks = [dataclasses.replace(params, stop=(stop,)) for stop in stops]
    alone = [plain.generate(p, one)[0] for p, one in zip(prompts, asks, strict=True)]
    scheduler = squeezed(cached, 5, True)
    answers = [cached.start(p, dataclasses.replace(one, tree_budget=0)) for p, one in zip(prompts, asks, strict=True)]
    pieces: dict[int, str] = {answer.id: "" for answer in answers}
    while any(answer.reason is None for answer in answers):
        for answer in cached.advance():
            pieces[answer.id] += answer.take()
    assert scheduler.preemptions > 0
    for answer, one in zip(answers, alone, strict=True):
        assert pieces[answer.id] == answer.text == one.text
        assert (answer.token_ids, answer.reason, answer.usage.completion_tokens) == (one.token_ids, "stop", one.completion_tokens)


@pytest.mark.parametrize("window", [64, 2048])
def test_a_hit_drafts_as_well_as_a_miss(window):
    options = {"tree_budget": 16, "max_num_seqs": 1, "max_model_len": 512, "draft_window": window}
    with LLM(str(nano.path()), device="cpu", enable_prefix_caching=True, **options) as some:
        ids = some.encode(HEAD * 4 + TAILS[0])
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
            squeezed(some, 8, True)  # forgets what was read before
            miss, hit = some.generate([ids], params)[0], some.generate([ids], params)[0]
            assert hit.token_ids == miss.token_ids
            assert (hit.steps, hit.accept_length) == (miss.steps, miss.accept_length) and hit.accept_length > 1.5
        assert some.engine.totals.prefix_hits == 2 * ((len(ids) - 1) // 64 * 64) > 128


def test_what_is_kept_for_the_cache_is_what_the_plan_says(plain, cached):
    memory, kept = dict(cached.plan.memory), cached.engine.parts.draft_kv
    assert (kept.kept_keys.numel() + kept.kept_values.numel()) * kept.kept_keys.element_size() == memory["draft pages"] > 0
    assert "draft pages" not in dict(plain.plan.memory)
