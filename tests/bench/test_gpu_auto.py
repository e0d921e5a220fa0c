"""What `tests/gpu_auto.py` measures on a GPU, by the kernels' references: every budget on the same texts, then automatic trees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import gpu_auto
from tests.cuda_refs import cuda_refs  # noqa: F401
from tests.engine.cuda_nano import engine


@pytest.mark.usefixtures("cuda_refs")
def test_automatic_trees_stand_beside_every_budget_that_may_be_best(monkeypatch):
    for name, value in (("SETTLE", 1), ("STEPS", 2), ("AUTO_SETTLE", 2), ("AUTO_STEPS", 3), ("LOST", 0.0)):
        monkeypatch.setattr(gpu_auto, name, value)
    some = engine(tree_budget="auto", max_num_seqs=2, synthetic_accept=2.5, tree_spine=True, max_num_batched_tokens=64)
    some.stepper.auto.measure(lambda rows, nodes, context, trees: (1 + 0.01 * rows * nodes, rows * nodes))
    texts = gpu_auto.prompts(SimpleNamespace(tokenizer=None, engine=some), 2)
    assert len(texts) == 2 and texts[0] != texts[1]
    *fixed, automatic, last = gpu_auto.compared(some, texts, (0, 4))
    assert [line["budget"] for line in fixed] == [0, 4] and automatic["budget"] == "auto"
    assert fixed[0]["tokens_per_row"] == 1 and fixed[1]["nodes_per_row"] == 4 and 1.5 < fixed[1]["tokens_per_row"] <= 3
    assert automatic["steps"] == 3 and last["best"] in (0, 4) and last["auto_over_best"] > 0
    assert some.idle and some.scheduler.available == some.plan.num_pages
