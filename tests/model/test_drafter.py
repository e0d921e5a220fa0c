"""The drafter: equal to the published module, whatever the window, the rows and the block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftwood.model import reference
from draftwood.model.config import DrafterConfig, yarn_mscale
from draftwood.model.drafter import Drafter
from draftwood.model.packed import rounded
from draftwood.model.weights import DrafterWeights
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.model.tools import SMALL_DRAFT, TAPS, Window, drafter_weights
from tests.peer.modules import dflash

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
WIDTH = SMALL_DRAFT.hidden_size
FEATURES = WIDTH * len(TAPS)
MSCALE = yarn_mscale(SMALL_DRAFT.rope.factor, SMALL_DRAFT.rope.mscale)


@pytest.fixture(scope="module")
def weights() -> DrafterWeights:
    return drafter_weights()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shared() -> tuple[Tensor, Tensor]:
    """The target's embedding and head."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(128, WIDTH, generator=g), torch.randn(128, WIDTH, generator=g) * 0.1


def build(weights: DrafterWeights, config: DrafterConfig = SMALL_DRAFT) -> Drafter:
    return Drafter(config, weights, Layout(), Local(), *shared(), torch.float32)


def features(length: int, seed: int) -> Tensor:
    return torch.randn(length, FEATURES, generator=torch.Generator().manual_seed(seed)) * 2


def fill(drafter: Drafter, window: Window, row: int, taps: Tensor, start: int = 0, cut: int = 1 << 20) -> None:
    """Show the taps [L, F] of positions start .. to one row of a window, `cut` at a time."""
    for first in range(0, len(taps), cut):
        part = taps[first : first + cut]
        positions = start + first + torch.arange(len(part))
        view = replace(window, row_ids=window.row_ids[row : row + 1], lengths=positions[:1])
        drafter.observe(part[None], positions[None], torch.arange(len(part))[None], view)


def test_coarse_guesses_are_near_the_exact_ones_and_their_context_is_the_same(weights: DrafterWeights) -> None:
    logits, contexts = [], []
    for coarse in (False, True):
        drafter = Drafter(SMALL_DRAFT, weights, Layout(), Local(), *shared(), coarse=coarse)
        window = Window.make(drafter, [3], [40], 256)
        fill(drafter, window, 0, features(40, 7))
        logits.append(drafter.propose(torch.tensor([17]), window, 8))
        contexts.append((window.keys[:, 3, :40], window.values[:, 3, :40]))
    exact, near = logits
    assert float((near - exact).norm() / exact.norm()) < 0.1
    assert bool(torch.equal(near, exact)) == (rounded(weights.layers[0].o) is None)
    assert all(torch.equal(a, b) for a, b in zip(*contexts, strict=True))


@pytest.mark.parametrize("amplitude", [1.0, MSCALE])
def test_logits_equal_the_published_module(weights: DrafterWeights, amplitude: float) -> None:
    """Blocks 4 .. 16, contexts short and past YaRN's original length (64), both amplitudes."""
    pytest.importorskip("dflash.model")
    config = replace(SMALL_DRAFT, amplitude=amplitude)
    net, drafter, (embed, head) = dflash(config, weights), build(weights, config), shared()
    for length in (1, 5, 63, 64, 65, 200):
        taps, window = features(length, length), Window.make(drafter, [3], [length], 256)
        fill(drafter, window, 0, taps)
        for block in (4, 5, 8, 15, 16):
            ids = torch.tensor([[17] + [SMALL_DRAFT.mask_token_id] * (block - 1)])
            with torch.inference_mode():
                hidden = net(
                    position_ids=torch.arange(length + block)[None],
                    noise_embedding=torch.nn.functional.embedding(ids, embed), target_hidden=taps[None],
                )  # fmt: skip
            expected = hidden[0, 1:] @ head.T
            torch.testing.assert_close(drafter.propose(torch.tensor([17]), window, block)[0], expected, **CLOSE)


def test_the_amplitude_matters(weights: DrafterWeights) -> None:
    assert MSCALE > 1.2
    logits = []
    for amplitude in (1.0, MSCALE):
        drafter = build(weights, replace(SMALL_DRAFT, amplitude=amplitude))
        window = Window.make(drafter, [0], [30], 64)
        fill(drafter, window, 0, features(30, 1))
        logits.append(drafter.propose(torch.tensor([3]), window, 8))
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@pytest.mark.parametrize("capacity", [16, 33, 64])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 33, 63, 64, 65, 150])
def test_a_ring_window_holds_the_newest_tokens(weights: DrafterWeights, capacity: int, length: int) -> None:
    """However they were shown: all at once (even more than fit), or a few at a time."""
    drafter, (embed, head) = build(weights), shared()
    taps = features(length, 2)
    expected = reference.drafter(SMALL_DRAFT, weights, embed, head, taps, 9, 8, window=capacity)
    for cut in (1 << 20, 7, 1):
        window = Window.make(drafter, [2], [length], capacity)
        fill(drafter, window, 0, taps, cut=cut)
        torch.testing.assert_close(drafter.propose(torch.tensor([9]), window, 8)[0], expected, **CLOSE)


def test_rows_of_any_lengths_equal_each_row_alone(weights: DrafterWeights) -> None:
    """Also with unwritten places full of NaN, an empty row, and rows in another order than their storage."""
    drafter, (embed, head) = build(weights), shared()
    lengths, rows = [40, 0, 3, 100], [4, 1, 0, 2]
    window, roots = Window.make(drafter, rows, lengths, 64), torch.tensor([5, 6, 7, 8])
    for i, length in enumerate(lengths):
        fill(drafter, window, i, features(length, i))
    logits = drafter.propose(roots, window, 8)
    assert logits.shape == (4, 7, 128) and logits.dtype == torch.float32
    for i, length in enumerate(lengths):
        expected = reference.drafter(SMALL_DRAFT, weights, embed, head, features(length, i), 5 + i, 8, window=64)
        torch.testing.assert_close(logits[i], expected, **CLOSE)
    empty = Window.make(drafter, [0, 3], [0, 0], 64)
    expected = reference.drafter(SMALL_DRAFT, weights, embed, head, features(0, 0), 5, 8)
    torch.testing.assert_close(drafter.propose(torch.tensor([5, 5]), empty, 8)[1], expected, **CLOSE)


def test_only_accepted_nodes_are_observed(weights: DrafterWeights) -> None:
    """A path through a tree equals the same tokens shown as a chain; rejected nodes may hold NaN."""
    drafter = build(weights)
    taps, positions = features(20, 4).view(2, 10, -1), torch.zeros(2, 10, dtype=torch.long)
    path = torch.tensor([[0, 2, 5, 9], [0, 7, -1, -1]])
    counts, lengths = [4, 2], [30, 61]
    live = torch.zeros(2, 10, dtype=torch.bool)
    for r in range(2):
        for i, node in enumerate(path[r, : counts[r]].tolist()):
            positions[r, node], live[r, node] = lengths[r] + i, True
    shown = torch.where(live.unsqueeze(-1), taps, torch.nan)
    window = Window.make(drafter, [3, 1], lengths, 64)
    drafter.observe(shown, positions, path, window)
    plain = Window.make(drafter, [3, 1], lengths, 64)
    for r in range(2):
        fill(drafter, plain, r, taps[r][path[r, : counts[r]]], start=lengths[r])
    torch.testing.assert_close(window.keys, plain.keys, equal_nan=True, **CLOSE)
    torch.testing.assert_close(window.values, plain.values, equal_nan=True, **CLOSE)
    assert int((~window.keys[0, :, :, 0, 0].isnan()).sum()) == sum(counts)


def test_proposing_stores_nothing(weights: DrafterWeights) -> None:
    drafter = build(weights)
    window = Window.make(drafter, [0], [12], 32)
    fill(drafter, window, 0, features(12, 6))
    before = window.keys.clone(), window.values.clone()
    first = drafter.propose(torch.tensor([4]), window, 16)
    assert torch.equal(first, drafter.propose(torch.tensor([4]), window, 16))
    torch.testing.assert_close((window.keys, window.values), before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("block", [0, 1, 17, 32])
def test_a_block_that_was_not_trained_is_refused(weights: DrafterWeights, block: int) -> None:
    drafter = build(weights)
    with pytest.raises(ValueError, match="outside 2..16"):
        drafter.propose(torch.tensor([4]), Window.make(drafter, [0], [0], 32), block)


def test_the_reference_formula_equals_the_fast_path(weights: DrafterWeights) -> None:
    drafter, (embed, head) = build(weights), shared()
    taps = features(50, 8)
    window = Window.make(drafter, [0], [50], 128)
    fill(drafter, window, 0, taps)
    expected = reference.drafter(SMALL_DRAFT, weights, embed, head, taps, 11, 16)
    torch.testing.assert_close(drafter.propose(torch.tensor([11]), window, 16)[0], expected, **CLOSE)


def test_a_block_at_the_last_position_still_runs(weights: DrafterWeights) -> None:
    """Masked places beyond max_position are guesses that cannot be committed; they must not fail."""
    drafter = build(weights)
    last = SMALL_DRAFT.max_position - 2
    window = Window.make(drafter, [0], [last], 16)
    fill(drafter, window, 0, features(16, 9), start=last - 16)
    assert drafter.propose(torch.tensor([4]), window, 16).isfinite().all()
