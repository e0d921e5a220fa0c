"""The step on a GPU: graphs, no waiting inside a step, and the same bits whatever the tree, the batch, the loop and the replay."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from draftwood.engine.request import SamplingParams
from tests.engine.cuda_nano import decode, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def text(n: int, seed: int = 0) -> tuple[int, ...]:
    """Random ordinary tokens."""
    return tuple(torch.randint(20, 7000, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


MIXED = [
    (text(1), SamplingParams(max_tokens=40, tree_budget=0)),
    (text(63, 1), SamplingParams(max_tokens=25, tree_budget=8)),
    (text(64, 2), SamplingParams(max_tokens=37, temperature=0.7, seed=11)),
    (text(65, 3), SamplingParams(max_tokens=1)),
    (text(200, 4), SamplingParams(max_tokens=28, tree_budget=3, repetition_penalty=1.2, frequency_penalty=0.4)),
    (text(130, 5), SamplingParams(max_tokens=26, temperature=1.2, seed=5, logit_bias={11: 4.0, 220: -100.0}, top_p=0.9)),
    (text(20, 6), SamplingParams(max_tokens=42, tree_budget=16, temperature=1.0, seed=-9, top_k=50, min_p=0.01)),
    (text(300, 7), SamplingParams(max_tokens=42, tree_budget=64)),
]


def plain(params: SamplingParams) -> SamplingParams:
    """The same without trees."""
    return SamplingParams(**{**vars(params), "tree_budget": 0, "grammar": None})


@cache
def alone() -> tuple[tuple[int, ...], ...]:
    """Each of MIXED by itself, without trees or graphs."""
    some = engine("cuda", graphs=False, tree_budget=64)
    return tuple(tuple(decode(some, [(prompt, plain(params))])[0]) for prompt, params in MIXED)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_tokens_depend_on_no_tree_batch_graph_or_loop(graphs, ahead, rows):
    some = engine("cuda", graphs=graphs, tree_budget=64, max_num_seqs=rows, max_num_batched_tokens=128)
    some.ahead = ahead
    assert [tuple(t) for t in decode(some, MIXED)] == list(alone())
    assert [tuple(t) for t in decode(some, MIXED[::-1])] == list(alone())[::-1], "in other slots, on used pages"


@pytest.mark.parametrize("budget", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 5])
def test_logits_behind_every_token_have_the_bits_of_plain_decoding(budget, rows):
    asks = [(text(30 + 17 * i, i), SamplingParams(max_tokens=48, temperature=0.5 * (i % 2), seed=i)) for i in range(5)]

    def bits(size: int, together: int) -> list[list[int]]:
        some = engine("cuda", graphs=True, tree_budget=64, max_num_seqs=together)
        some.stepper.tell_bits(True)
        some.records = []
        ids = [some.add(p, SamplingParams(**{**vars(s), "tree_budget": size, "grammar": None})) for p, s in asks]
        while not some.idle:
            some.step()
        found: dict[int, list[int]] = {i: [] for i in ids}
        for row in itertools.chain.from_iterable(record.rows for record in some.records):
            found[row.request_id] += row.prints
        return [found[i] for i in ids]

    ours, theirs = bits(budget, rows), bits(0, 1)
    for a, b in zip(ours, theirs, strict=True):
        shared = min(len(a), len(b))
        assert shared >= 40 and a[:shared] == b[:shared]


def test_a_thousand_replays_give_the_same_bits():
    some = engine("cuda", graphs=True, tree_budget=16, max_num_seqs=2)
    for i in range(2):
        some.add(text(70 + i, i), SamplingParams(max_tokens=200, temperature=float(i), seed=3))
    for _ in range(6):
        some.step()
    torch.cuda.synchronize()
    stepper, (key, launch) = some.stepper, list(some.stepper._launches.items())[-1]
    state, step = stepper.rows.state, stepper.step_of(key)
    before = (state.lengths.clone(), state.roots.clone())
    first, odd = None, torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        state.lengths.copy_(before[0])
        state.roots.copy_(before[1])
        launch()
        shown = torch.cat((step.results.raw, step.logits[: int(key.rows)].view(torch.uint8).view(-1)))
        first = shown.clone() if first is None else first
        odd += (shown != first).sum()
    assert int(odd) == 0


def test_nothing_waits_for_the_device_between_launch_and_read():
    some = engine("cuda", graphs=True, tree_budget=8, max_num_seqs=4)
    for key in some.stepper.sizes.keys():  # noqa: SIM118
        some.stepper.prepare(key)
    for prompt, params in MIXED[:7]:
        some.add(prompt, SamplingParams(**{**vars(params), "tree_budget": None, "grammar": None}))
    launched = 0
    launch = some.stepper.launch

    def watched(*given, **named):
        nonlocal launched
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched += 1
            return launch(*given, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    some.stepper.launch = watched
    while not some.idle:
        some.step()
    assert launched > 20


def test_the_device_holds_what_the_plan_says():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    some = engine("cuda", graphs=True, tree_budget=16, max_num_seqs=4)
    torch.cuda.synchronize()
    held, memory = torch.cuda.memory_allocated() - before, dict(some.plan.memory)
    planned = sum(n for name, n in memory.items() if name != "graphs")
    assert abs(held - planned) < 0.02 * planned + (4 << 20), (held, planned, memory)
    free = torch.cuda.mem_get_info()[0]
    for key in some.stepper.sizes.keys():  # noqa: SIM118
        some.stepper.prepare(key)
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0]
    assert taken < memory["graphs"] + (512 << 20), (taken, memory["graphs"])


def test_hits_in_the_prefix_cache_and_preemption_change_nothing():
    some = engine("cuda", graphs=True, tree_budget=8, max_num_seqs=2, enable_prefix_caching=True, pages=7)
    first, second = (text(170), SamplingParams(max_tokens=24, ignore_eos=True)), (text(175, 1), SamplingParams(max_tokens=22))
    want = [decode(engine("cuda", graphs=True, tree_budget=8), [one])[0] for one in (first, second)]
    assert decode(some, [first, second]) == want
    before = some.totals.prompt_tokens
    assert decode(some, [second]) == want[1:]
    assert some.totals.prompt_tokens - before < 64


def test_the_likeliest_tokens_are_those_of_plain_decoding_and_min_tokens_wait():
    asks = [
        (text(70, 1), SamplingParams(max_tokens=20, logprobs=5, ignore_eos=True)),
        (text(30, 2), SamplingParams(max_tokens=20, logprobs=2, temperature=0.9, seed=4, ignore_eos=True)),
        (text(40, 3), SamplingParams(max_tokens=40, min_tokens=30, stop_token_ids=tuple(range(20, 1000)))),
    ]

    def told(budget: int, rows: int) -> dict[int, list[object]]:
        some = engine("cuda", graphs=True, tree_budget=16, max_num_seqs=rows)
        ids = [some.add(p, SamplingParams(**{**vars(s), "tree_budget": budget, "grammar": None})) for p, s in asks]
        found: dict[int, list[object]] = {i: [] for i in ids}
        while not some.idle:
            for output in some.step():
                tops = output.top_logprobs or (None,) * len(output.token_ids)
                found[output.request_id] += zip(output.token_ids, tops, strict=True)
        return found

    plain = told(0, 1)
    assert told(16, 3) == plain
    assert all(len(top) == 5 and top[0][0] == token for token, top in plain[0]) and len(plain[2]) >= 30


def test_answers_with_a_form_are_those_of_plain_decoding():
    pytest.importorskip("xgrammar")
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    forms = ({"type": "regex", "regex": "(yes|no), [0-9]{3,9}"}, {"type": "json_schema", "json_schema": {"schema": number}})
    asks = []
    for i, form in enumerate(forms):
        asks.append((text(30 + i, i), {"max_tokens": 30, "response_format": form, "temperature": 0.5 * i, "seed": i}))
    asks.append((text(50, 9), {"max_tokens": 25, "temperature": 0.7, "seed": 3}))

    def told(budget: int, rows: int) -> list[list[int]]:
        some = engine("cuda", graphs=True, tree_budget=16, max_num_seqs=rows)
        out = decode(some, [(prompt, SamplingParams(**values, tree_budget=budget)) for prompt, values in asks])
        some.close()
        return out

    plain = told(0, 1)
    assert told(16, 3) == plain and all(plain)


def test_automatic_trees_change_no_token_and_are_cut_where_they_do_not_pay():
    some = engine("cuda", graphs=True, tree_budget="auto", max_num_seqs=8)
    some.stepper.calibrate()
    for rows, told in some.stepper.auto._told.items():
        assert some.stepper.auto.plain_seconds(rows) > 1e-5
        assert all(seconds[0] > 1e-5 and seconds[-1] >= seconds[0] for seconds in told.seconds)
    asks = [(prompt, SamplingParams(**{**vars(params), "tree_budget": None, "grammar": None})) for prompt, params in MIXED]
    assert [tuple(t) for t in decode(some, asks)] == list(alone())
    some.stepper.auto.measure(lambda rows, nodes, context, trees: (0.001 * (1 + 9.0 * rows * (nodes - 1)), rows * nodes))
    before = list(some.totals.trees)
    assert [tuple(t) for t in decode(some, asks)] == list(alone())
    steps = sum(some.totals.trees) - sum(before)
    grown = sum(n * (now - then) for n, (now, then) in enumerate(zip(some.totals.trees, before, strict=True)))
    assert grown < steps, "beside a prompt, whose nodes cost as much, a node or two still pay"
