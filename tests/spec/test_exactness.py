"""Law 1: the text is a function of target, prompt, parameters and seed; trees change speed and nothing else."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from draftwood.spec.bigram import Bigram
from draftwood.spec.tree import GrowOptions

from .toy import Markov, Params, decode, honest, hostile, noisy, probabilities

DRAFTERS = {"honest": honest, "noisy": noisy, "hostile": hostile}


def _chi_squared(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value; cells expected below 5 are put together. A token the law forbids fails at once."""
    assert counts[law == 0].sum() == 0, "a token of probability zero was committed"
    expected = law * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 1:  # too few to judge on their own
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    return 1.0 if len(observed) < 2 else float(chisquare(observed, expected).pvalue)


CASES = [
    ("honest", 8, 4, Params(1.0), True, {}),
    ("honest", 8, 4, Params(1.0), False, {}),
    ("honest", 3, 3, Params(0.6), True, {"spine": True}),
    ("noisy", 16, 4, Params(1.5), True, {"topk_cap": 2}),
    ("noisy", 1, 1, Params(1.0), True, {}),
    ("hostile", 8, 4, Params(1.0), True, {}),
    ("hostile", 16, 3, Params(0.7), False, {}),
    ("honest", 8, 4, Params(1.0, top_k=2), True, {}),
    ("noisy", 8, 4, Params(1.0, top_p=0.8), True, {}),
    ("noisy", 8, 4, Params(0.9, min_p=0.2), True, {}),
    ("noisy", 8, 4, Params(1.2, top_p=0.9, top_k=4, min_p=0.05, logit_bias={1: 1.5, 2: -100.0}), True, {}),
]


@pytest.mark.parametrize(("drafter", "budget", "depth", "params", "share", "options"), CASES)
def test_committed_tokens_follow_the_targets_filtered_law(drafter, budget, depth, params, share, options):
    """Joint law of the first three tokens over 4000 seeds, against the product of filtered softmaxes."""
    vocab, count, rows = 5, 3, 4000
    target = Markov(vocab, seed=1, scale=1.2)
    run = decode(
        target, [[0, 3]] * rows, count, [params] * rows, range(900, 900 + rows),
        DRAFTERS[drafter], budget, depth, GrowOptions(**options), share,
    )  # fmt: skip
    law = np.zeros((vocab,) * count)
    for tokens in itertools.product(range(vocab), repeat=count):
        text, p = [0, 3], 1.0
        for token in tokens:
            p *= probabilities(target, text, params)[token]
            text.append(token)
        law[tokens] = p
    seen = np.zeros_like(law)
    for tokens, times in Counter(map(tuple, run.tokens)).items():
        seen[tokens] = times
    for kept in range(1, count + 1):  # the first token, the first two, all
        axes = tuple(range(kept, count))
        assert _chi_squared(seen.sum(axes).ravel(), law.sum(axes).ravel()) > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_choice_at_every_depth_of_a_tree_follows_the_law(drafter, temperature):
    """Within one step: given the accepted path to depth d, the next choice is a draw from the target there."""
    vocab, rows, depth = 4, 7000, 3
    target, params = Markov(vocab, seed=2, scale=1.0), Params(temperature, top_p=0.95)
    run = decode(
        target, [[1, 2]] * rows, 1, [params] * rows, range(rows), DRAFTERS[drafter], 12, depth, keep=True
    )  # fmt: skip
    _, path = run.trees[0]
    groups: dict[tuple[int, ...], Counter] = {}
    for tokens, n in zip(path.tokens.tolist(), path.emitted.tolist(), strict=True):
        for d in range(n):
            groups.setdefault(tuple(tokens[:d]), Counter())[tokens[d]] += 1
    tested = Counter()
    for context, counter in groups.items():
        if counter.total() >= 300:
            seen = np.array([counter[t] for t in range(vocab)], float)
            assert _chi_squared(seen, probabilities(target, [1, 2, *context], params)) > 1e-4
            tested[len(context)] += 1
    assert set(tested) >= ({0, 1, 2} if drafter == "honest" else {0})


def _table(vocab: int, seed: int) -> Bigram:
    rng = np.random.default_rng(seed)
    cols = np.concatenate([np.sort(rng.choice(vocab, vocab // 2, replace=False)) for _ in range(vocab)])
    ptr = np.arange(vocab + 1) * (vocab // 2)
    return Bigram(ptr, cols, rng.normal(0, 2, len(cols)).astype(np.float32), rng.normal(0, 1, vocab).astype(np.float32))


PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 3]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([None, {0: 2.0, 5: -100.0}]),
)


@settings(max_examples=40, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    budget=st.sampled_from([0, 1, 4, 8, 16, 64]),
    depth=st.integers(1, 7),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    options=st.builds(
        GrowOptions,
        topk_cap=st.sampled_from([None, 1, 4, 64]),
        spine=st.booleans(),
        beta=st.sampled_from([(1.0, 0.75), (0.0,), (3.0, 1.0)]),
    ),
    share=st.booleans(),
    table=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_same_seed_same_tokens_whatever_tree_budget_and_drafter(params, budget, depth, drafter, options, share, table, seed):
    """Each row alone and plain = all rows together, mixed, with trees; penalties and filters included."""
    vocab, count = 11, 14
    target = Markov(vocab, seed=seed % 5)
    prompts = [[r % vocab, (r * 3 + 1) % vocab, 4] for r in range(len(params))]
    seeds = [(seed + r) % 2**64 for r in range(len(params))]
    spec = decode(
        target, prompts, count, params, seeds, DRAFTERS[drafter], budget, depth, options, share,
        bigram=_table(vocab, 1) if table else None,
    )  # fmt: skip
    for r, row in enumerate(spec.tokens):
        assert row == decode(target, prompts[r : r + 1], count, params[r : r + 1], seeds[r : r + 1]).tokens[0]


def test_temperature_one_is_not_greedy_and_seeds_matter():
    target = Markov(8)
    run = decode(target, [[0, 1]] * 50, 6, [Params(1.0)] * 50, range(50), honest)
    assert len(set(map(tuple, run.tokens))) > 30


def test_top_k_one_is_greedy_at_any_temperature():
    target = Markov(8)
    greedy = decode(target, [[0, 1]], 12, [Params(0.0)], [3], honest).tokens
    assert decode(target, [[0, 1]], 12, [Params(2.0, top_k=1)], [3], honest).tokens == greedy


def test_a_banned_token_never_appears_inside_an_accepted_run():
    target = Markov(6)
    free = decode(target, [[0, 1]], 40, [Params(1.0)], [3], honest).tokens[0]
    banned = Counter(free).most_common(1)[0][0]
    params = Params(1.0, logit_bias={banned: -100.0})
    assert banned not in decode(target, [[0, 1]], 200, [params], [3], honest, 16).tokens[0]


def test_shared_noise_and_good_drafts_raise_the_accept_length():
    """At budget 8: plain 1, hostile below own noise below shared noise; a greedy row accepts most."""
    target, rows = Markov(64, scale=1.5), 64

    def length(drafter, temperature, share):
        run = decode(
            target, [[r, 1] for r in range(rows)], 24, [Params(temperature)] * rows, range(rows), drafter, 8, 4, share=share
        )
        return run.committed / run.steps / rows

    assert length(None, 1.0, False) == 1
    assert 1 < length(honest, 1.0, False) < length(honest, 1.0, True) < length(honest, 0.0, True)
    assert length(hostile, 1.0, True) < length(honest, 1.0, False)


def test_log_probabilities_are_the_raw_models_own_for_every_committed_token():
    target = Markov(9)
    params = Params(0.8, top_k=3, frequency_penalty=0.5)
    run = decode(target, [[0, 1]], 20, [params], [5], honest, 8, keep=True)
    text = [0, 1]
    for _, path in run.trees:
        for i in range(int(path.emitted[0])):
            token = int(path.tokens[0, i])
            want = torch.log_softmax(target.logits(torch.tensor(text[-2]), torch.tensor(text[-1])), -1)[token]
            assert abs(float(path.logprobs[0, i]) - float(want)) < 1e-5
            text.append(token)
