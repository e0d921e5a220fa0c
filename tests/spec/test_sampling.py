"""Filters at every node of mixed batches against naive references and transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood.spec.sampling import History, Sampling, choose, filter_logits, gumbel, top_logprobs, truncate, uses_history
from draftwood.spec.tree import chain, grow, join, roots

from .toy import Params


def naive(raw: np.ndarray, path: list[int], prompt: list[int], generated: list[int], p: Params) -> np.ndarray:
    """One node, one token at a time, from the module's description; float32 where the values are kept."""
    x = raw.astype(np.float32).copy()
    for token, value in (p.logit_bias or {}).items():
        x[token] += np.float32(value)
    counts = {t: (generated + path).count(t) for t in generated + path}
    for token in set(prompt) | set(counts):
        r = np.float32(p.repetition_penalty)
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token, n in counts.items():
        x[token] -= np.float32(p.frequency_penalty) * np.float32(n)
        x[token] -= np.float32(p.presence_penalty)
    if p.temperature == 0:
        return x
    x /= np.float32(p.temperature)
    if p.min_p > 0:
        x[x < x.max() + np.log(np.float32(p.min_p))] = -np.inf
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k > 0:
        x[order[p.top_k :]] = -np.inf
    if p.top_p < 1:
        mass, weight = 0.0, np.exp(x.astype(np.float64) - x.max())
        weight /= weight.sum()
        for place, i in enumerate(order):
            if place and mass >= p.top_p:
                x[i] = -np.inf
            mass += weight[i]
    return x


PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.97, 0.53]),
    top_k=st.sampled_from([0, -1, 1, 3, 300]),
    min_p=st.sampled_from([0.0, 0.07]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([None, {0: 2.0, 5: -100.0}]),
)


def path_of(tree, r: int, n: int) -> list[int]:
    out = []
    while n > 0:
        out.append(int(tree.tokens[r, n]))
        n = int(tree.parents[r, n])
    return out[::-1]


@settings(max_examples=80, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=4), vocab=st.integers(6, 30), seed=st.integers(0, 10**6))
def test_every_node_of_a_mixed_batch_gets_its_own_rows_filters_and_its_own_paths_penalties(params, vocab, seed):
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows = len(params)
    tree = grow(torch.randn(rows, 3, vocab, generator=g), torch.zeros(rows, dtype=torch.long), [8] * rows, [0.0] * rows, None)
    prompts = [rng.integers(0, vocab, 4).tolist() for _ in params]
    generated = [rng.integers(0, vocab, 5).tolist() for _ in params]
    histories = []
    for prompt, made, p in zip(prompts, generated, params, strict=True):
        histories.append(History(prompt, vocab) if uses_history(p) else None)
        if histories[-1] is not None:
            histories[-1].extend(made[:2])
            histories[-1].extend(made[2:])
    sampling = Sampling.build(params, range(rows), histories)
    at, nodes = tree.verified()
    logits = torch.randn(len(at), vocab, generator=g) * 3
    logits = torch.where(torch.rand(logits.shape, generator=g) < 0.3, logits.round(), logits)  # ties
    before = logits.clone()
    got = filter_logits(logits, at, nodes, tree, sampling)
    assert torch.equal(logits, before)
    noise = sampling.noise(torch.full((rows,), 10), 4, vocab)
    tokens, logprobs = choose(logits, at, nodes, tree, sampling, noise)
    for m, (r, n) in enumerate(zip(at.tolist(), nodes.tolist(), strict=True)):
        want = naive(logits[m].numpy(), path_of(tree, r, n), prompts[r], generated[r], params[r])
        assert np.array_equal(got[m].numpy() == -np.inf, want == -np.inf)
        assert np.allclose(got[m].numpy(), want, atol=1e-5)
        z = got[m]
        if params[r].temperature > 0:
            position = 10 + int(tree.depths[r, n])
            z = z + gumbel(torch.tensor([r]), torch.tensor([[position]]), vocab)[0, 0]
        assert int(tokens[m]) == int(z.argmax())
        assert abs(float(logprobs[m]) - float(torch.log_softmax(logits[m], -1)[tokens[m]])) < 1e-5


@pytest.mark.parametrize("vocab", [50, 3000])
def test_filters_equal_those_of_transformers(vocab):
    z = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    none = torch.zeros(7), torch.zeros(7, dtype=torch.long), torch.ones(7)
    ids = torch.zeros(7, 1, dtype=torch.long)

    def cut(values, min_p=none[0], top_k=none[1], top_p=none[2]):
        return torch.from_numpy(truncate(values.numpy(), min_p.numpy(), top_k.numpy(), top_p.numpy()))

    for k in (1, 5, 49, vocab + 5):
        assert torch.equal(cut(z, top_k=torch.full((7,), k)), TopKLogitsWarper(k)(ids, z))
    for p in (0.05, 0.5, 0.9, 0.999):
        assert torch.equal(cut(z, top_p=torch.full((7,), p)), TopPLogitsWarper(p)(ids, z))
    for p in (0.01, 0.5, 1.0):
        assert torch.equal(cut(z, min_p=torch.full((7,), p)), MinPLogitsWarper(p)(ids, z))
    both = TopPLogitsWarper(0.8)(ids, TopKLogitsWarper(9)(ids, z))
    assert torch.equal(cut(z, top_k=torch.full((7,), 9), top_p=torch.full((7,), 0.8)), both)
    heated = Sampling.build([Params(0.7)], [0])
    zeros = torch.zeros(7, dtype=torch.long)
    tree = roots([0])
    assert torch.equal(filter_logits(z, zeros, zeros, tree, heated), TemperatureLogitsWarper(0.7)(ids, z))
    seen = [3, 8, 3, 20]
    penal = Sampling.build([Params(0.0, repetition_penalty=1.4)], [0], [History(seen, vocab)])
    want = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([seen] * 7), z.clone())
    assert torch.allclose(filter_logits(z, zeros, zeros, tree, penal), want)


def test_top_k_between_the_first_ranking_and_the_vocabulary_is_exact_with_top_p():
    """The first ranking holds 256 values; a larger top-k, or a nucleus that reaches further, needs the full one."""
    z = (torch.randn(3, 2000, generator=torch.Generator().manual_seed(1)) * 0.3).numpy()
    k, p = np.array([700, 0, 300]), np.array([0.9, 0.9, 1.0], np.float32)
    got = truncate(z, np.zeros(3, np.float32), k, p)
    for r in range(3):
        want = naive(z[r], [], [], [], Params(1.0, top_k=int(k[r]), top_p=float(p[r])))
        assert np.array_equal(got[r], want)


def test_boundary_ties_go_to_the_lowest_ids_and_one_token_always_stays():
    z = np.zeros((1, 10), np.float32)
    off, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    assert np.flatnonzero(truncate(z, off, np.array([3]), one)[0] == 0).tolist() == [0, 1, 2]
    assert np.flatnonzero(truncate(z, off, np.array([0]), one * np.float32(0.35))[0] == 0).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(truncate(z, off, np.array([0]), one * np.float32(1e-9))[0] == 0).tolist() == [0]
    assert np.flatnonzero(truncate(z[:, :2], off, np.array([0]), one * np.float32(0.5))[0] == 0).tolist() == [0]
    z[0, 7] = 1
    assert np.flatnonzero(truncate(z, one, np.array([0]), one)[0] == 1).tolist() == [7]


def test_greedy_ties_go_to_the_lowest_id_and_need_no_noise():
    sampling = Sampling.build([Params(0.0), Params(1e-7)], [1, 2])
    assert sampling.noise(torch.tensor([1, 1]), 4, 9) is None
    rows, nodes = roots([1, 2]).verified()
    tokens, logprobs = choose(torch.zeros(2, 9), rows, nodes, roots([1, 2]), sampling, None)
    assert tokens.tolist() == [0, 0] and torch.allclose(logprobs, -torch.log(torch.tensor(9.0)))
    with pytest.raises(ValueError, match="noise"):
        choose(torch.zeros(1, 9), rows[:1], nodes[:1], roots([1]), Sampling.build([Params(1.0)], [1]), None)


def test_a_prompt_chunk_chooses_with_the_noise_of_the_position_after_it_and_counts_no_token_twice():
    """A chain of n known tokens at position 10 chooses what a root at its last token would choose."""
    vocab, params = 20, [Params(1.0, frequency_penalty=0.9, repetition_penalty=1.5)]
    logits = torch.randn(1, vocab)
    prompt = [3, 3, 7, 9]
    sampling = Sampling.build(params, [5], [History(prompt, vocab)])
    whole, last = chain([prompt[1:]]), roots(prompt[-1:])
    a = choose(logits, *whole.verified(), whole, sampling, sampling.noise(torch.tensor([10 + 3]), 2, vocab))
    b = choose(logits, *last.verified(), last, sampling, sampling.noise(torch.tensor([12 + 1]), 5, vocab))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_noise_of_a_mixed_batch_is_that_of_each_row_alone():
    sampling = Sampling.build([Params(0.0), Params(1.0), Params(0.5)], [1, 2**64 - 1, 3])
    noise = sampling.noise(torch.tensor([4, 5, 6]), 3, 10)
    assert noise is not None and not noise[0].any()
    assert torch.equal(noise[1:], gumbel(torch.tensor([-1, 3]), torch.tensor([[5, 6, 7], [6, 7, 8]]), 10))


def test_noise_of_one_step_after_another_is_the_same_as_computed_alone():
    """Kept noise of positions that were drafted but not accepted: any jump, forth or back, gives the same bits."""
    sampling = Sampling.build([Params(1.0), Params(0.0), Params(0.7)], [5, 6, 7])
    for first in ([10, 3, 40], [11, 3, 44], [14, 3, 45], [14, 3, 45], [30, 4, 44], [2, 5, 52]):
        for count in (5, 3, 8):
            noise = sampling.noise(torch.tensor(first), count, 21)
            assert noise is not None and not noise[1].any()
            for r, seed in ((0, 5), (2, 7)):
                alone = gumbel(torch.tensor([seed]), first[r] + torch.arange(count)[None], 21)[0]
                assert torch.equal(noise[r], alone)


def test_filters_do_not_depend_on_the_rows_around():
    g = torch.Generator().manual_seed(3)
    params = [Params(0.8, top_p=0.9), Params(0.0), Params(1.0, top_k=5), Params(1.0, min_p=0.1, logit_bias={1: 3.0}), Params(1.2)]
    tree = roots(range(5))
    logits = torch.randn(5, 4000, generator=g)
    sampling = Sampling.build(params, range(5))
    together = filter_logits(logits, *tree.verified(), tree, sampling)
    for r in range(5):
        one = roots([r])
        assert torch.equal(filter_logits(logits[r : r + 1], *one.verified(), one, Sampling.build([params[r]], [r]))[0], together[r])


def test_top_logprobs_are_sorted_and_normalised():
    logits = torch.randn(4, 100)
    ids, values = top_logprobs(logits, 5)
    want = torch.log_softmax(logits, -1).topk(5)
    assert torch.equal(ids, want.indices) and torch.allclose(values, want.values, atol=1e-5)


def test_penalising_without_a_history_is_an_error():
    tree = join([roots([1])])
    with pytest.raises(ValueError, match="History"):
        filter_logits(torch.zeros(1, 5), *tree.verified(), tree, Sampling.build([Params(presence_penalty=1.0)], [0]))
