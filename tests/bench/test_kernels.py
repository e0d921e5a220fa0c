"""`bench kernels` compiles without a GPU and refuses what it cannot do."""

import json

import pytest
import torch

from draftwood import cli
from draftwood.bench.kernels import COLUMNS, _cells
from draftwood.kernels import case


def test_compile_only_reports_every_variant_of_a_kernel(capfd):
    assert cli.main(["bench", "kernels", "norm_rope", "--compile-only", "--arch", "sm_120a", "--json"]) == 0
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert line["variants"]
    assert all(v["arch"] == "sm_120a" and 0 < v["registers"] <= 255 and v["shared"] <= 101_376 for v in line["variants"])


@pytest.mark.parametrize("flags", [("--compile-only", "--arch", "sm_75"), ("nothing", "--compile-only")])
def test_unknown_names_are_one_line(flags, capsys):
    assert cli.main(["bench", "kernels", *flags]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_measuring_without_a_gpu_is_one_line(capsys):
    assert cli.main(["bench", "kernels"]) == 2
    assert "--compile-only" in capsys.readouterr().err


def test_a_row_has_every_column_whatever_became_of_its_case():
    done = {"kernel": "k", "case": "c", "us": 2.0, "bytes": 10, "gb_s": 1.0, "of_peak": 0.5, "tflop_s": 0.1, "error": 0.0}
    for line in (done, {**done, "rival_us": 4.0}, {"kernel": "k", "case": "c", "failed": "why"}, {"kernel": "k", "failed": "lost"}):
        assert len(_cells(line)) == len(COLUMNS)
    assert _cells({**done, "rival_us": 4.0})[-1] == 2.0


def test_every_kernel_with_cases_can_be_named():
    assert {"linear", "mla_attention", "moe_int4"} <= set(case.names_with_cases())
