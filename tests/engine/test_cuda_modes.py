"""The engine of a GPU does not ask in which mode of autograd it is made, nor its step in which one it is launched."""

from __future__ import annotations

import pytest
import torch

from draftwood.engine.request import SamplingParams
from draftwood.model.cuda.keys import Key
from tests.cuda_refs import cuda_refs  # noqa: F401
from tests.engine.cuda_nano import decode, engine


@pytest.mark.parametrize("made", [False, True])
def test_an_engine_made_in_either_mode_runs_its_stages_in_either(cuda_refs, made):  # noqa: F811
    with torch.inference_mode(made):
        some = engine(tree_budget=4, max_num_seqs=1, own=True)
    ask = (tuple(range(40, 60)), SamplingParams(max_tokens=3))
    with torch.inference_mode(not made):
        assert len(decode(some, [ask])[0]) == 3
    for mode in (False, True):
        with torch.inference_mode(mode):
            some.stepper.rows.silence()
            some.stepper.step_of(Key(1, 8, True)).run()
