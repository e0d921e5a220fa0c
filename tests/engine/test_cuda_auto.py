"""Automatic trees on a GPU, the host's part: what the device is told of what was measured. On a CPU."""

import pytest
import torch

from draftwood.engine.cuda.auto import AutoTrees
from draftwood.kernels.sizes.ref import seconds_at
from draftwood.model.cuda.keys import Sizes

CPU = torch.device("cpu")


def automatic() -> AutoTrees:
    return AutoTrees(Sizes.make(512, 2, 8, 64, 64), 2, 64, 512, CPU)


@pytest.mark.parametrize("nodes", [(2, 5, 9, 17, 33, 65), (2, 5, 8, 8, 8, 8), (2, 5, 9, 17, 33, 32), (2, 5, 4, 4, 3, 65)])
def test_nodes_of_a_cost_table_always_rise_and_times_never_fall(nodes):
    """Trees may stop growing below their budgets; a division by no nodes at all would make every rate a NaN."""
    auto = automatic()
    grown = dict(zip(auto.nodes, nodes, strict=True))
    auto.measure(lambda rows, size, context: (0.01 + 1e-3 * size, rows * grown.get(size, 1)))
    for costs in auto.costs.values():
        totals = costs.totals.tolist()
        assert all(a < b for a, b in zip(totals, totals[1:], strict=False))
        found = [float(seconds_at(costs, total)) for total in range(totals[0], totals[-1] + 20)]
        assert all(0 < a <= b * (1 + 1e-6) for a, b in zip(found, found[1:], strict=False))


def test_measuring_teaches_nothing_about_acceptance():
    auto = automatic()

    def time(rows: int, size: int, context: int) -> tuple[float, int]:
        auto.calibration.predicted.fill_(5)
        auto.calibration.observed.fill_(7)
        auto.calibration.ratio.fill_(1.4)
        return 0.01, rows * size

    auto.measure(time)
    known = auto.calibration
    assert not known.predicted.any() and not known.observed.any() and bool((known.ratio == 1).all())
