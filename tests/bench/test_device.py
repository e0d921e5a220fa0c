"""The measurement of a GPU's steps, run on the CPU by the kernels' references with a clock in place of CUDA's events."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from draftwood import plan
from draftwood.bench import device, step
from draftwood.config import Options
from draftwood.engine.cuda.record import Immediate
from draftwood.errors import ConfigError
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes import ref as sizes_ref
from draftwood.model import costs
from tests import cuda_refs, gpu_step
from tests.engine.cuda_nano import engine, made_plan


class Event:
    """A point of the host's time."""

    def __init__(self, **given: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


@pytest.mark.slow
def test_every_case_has_its_times_bytes_and_tokens(monkeypatch):
    cuda_refs.replace(monkeypatch)
    for name in ("fit", "learn"):
        monkeypatch.setattr(sizes_op, name, getattr(sizes_ref, name))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *given: "no GPU")
    peaks = (("read_peak", lambda d: 1e10), ("product_peak", lambda d: 1e11))
    for name, value in (*peaks, ("Graphs", lambda d: Immediate()), ("REPLAYS", 1), ("STEPS", 3)):
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device, "AUTO_STEPS", 4)
    monkeypatch.setattr(device, "AUTO_SETTLE", 3)
    some = engine(tree_budget="auto", max_num_seqs=2, synthetic_accept=2.5, max_num_batched_tokens=64)
    some.stepper.auto.measure(lambda rows, nodes, context, trees: (1 + 0.01 * rows * nodes, rows * nodes))
    checkpoint = made_plan()[1]
    llm = SimpleNamespace(engine=some, plan=some.plan, checkpoint=checkpoint)
    lines = list(device.measure(llm, [2], [0, 8, "auto"], 100, 1))
    plain, drafted, automatic = lines[2:]
    assert (plain["nodes"], drafted["nodes"]) == (2, 18) and plain["tokens_per_row"] == 1 and drafted["tokens_per_row"] > 1
    draft = (checkpoint.drafter, some.plan.block, some.plan.window)
    experts = drafted["experts"]
    want = costs.step_bytes(checkpoint.config, 2, 9, 100, 1, 2, *draft, distinct=experts)
    assert dict(want) == drafted["parts"] | {"experts": pytest.approx(drafted["parts"]["experts"], rel=0.01)}
    done = costs.step_operations(checkpoint.config, 18, 100, 1, draft[0], 2, *draft[1:])
    assert drafted["operation_parts"] == dict(done) and drafted["operations_ms"] == round(costs.total(done) / 1e8, 3)
    by_part = dict(costs.floor(want, done, 1e10, 1e11))
    assert drafted["floor_parts_ms"]["lm_head"] == round(1e3 * by_part["lm_head"], 3)
    assert drafted["floor_ms"] == pytest.approx(1e3 * sum(by_part.values()), rel=0.01)
    assert drafted["floor_ms"] >= max(drafted["bytes_ms"], drafted["operations_ms"])
    assert drafted["ratio"] == pytest.approx(drafted["graph_ms"] / drafted["floor_ms"], rel=0.01)
    assert 4 <= plain["experts"] <= 8 and plain["experts"] <= experts <= 16 and "drafter" not in plain["operation_parts"]
    assert set(drafted["stage_ms"]) == {"draft", "tree", "verify", "accept", "commit"} and automatic["tok_s"] > 0
    assert lines[1]["prompt_tokens"] == 192 and lines[0]["synthetic_accept"] == 2.5
    assert device.show(lines).count("\n") == 6
    assert some.idle and some.scheduler.available == some.plan.num_pages


TABLE = [(1, 0), (64, 0), (1, 8), (1, 16), (1, 32), (1, 64), (8, 8), (32, 8), (128, 8), (128, 32)]
"""Rows and budgets that a GPU's steps are held to."""


@pytest.mark.parametrize(("rows", "budget"), TABLE)
def test_the_cases_of_the_table_fit_one_h200_by_the_plan(rows: int, budget: int) -> None:
    asked = Options(
        model="k2.6", device="cuda", load_format="dummy", routed_experts=48, tree_spine=True, synthetic_accept=4.2,
        tree_budget=budget, max_num_seqs=rows, max_model_len=step.CONTEXT + step.ROOM,
    )  # fmt: skip
    made = plan.decide(asked, plan.find(asked), plan.HARDWARE["h200"])
    assert costs.total(made.memory) <= plan.HARDWARE["h200"].memory
    assert (made.max_num_seqs, made.max_budget, made.max_model_len) == (rows, budget, step.CONTEXT + step.ROOM)
    needed = -(-(step.CONTEXT + budget + 1) // made.page_size) * rows
    assert needed <= made.num_pages  # the rows that are timed have pages of their own


def test_the_parts_of_the_gpu_script_cover_the_table() -> None:
    found = set()
    for _, command in gpu_step.PARTS.values():
        if "k2.6" in command and "auto" not in " ".join(command) and "--layers" not in command:
            rows, budgets = (command[command.index(flag) + 1].split(",") for flag in ("--rows", "--budgets"))
            found |= {(int(r), int(b)) for r in rows for b in budgets}
    assert found >= set(TABLE)


def test_long_steps_are_timed_less_often_and_a_few_times_at_least():
    assert [device._count(20, ms) for ms in (0.0, 10.0, 100.1, 250.0, 600.0, 5000.0)] == [20, 20, 9, 4, 4, 4]
    assert device._count(3, 5000.0) == 3


def test_a_case_without_memory_is_a_line_and_the_others_go_on():
    class Bench(device.DeviceBench):
        def __init__(self):
            pass

        def case(self, rows, budget):
            if budget == 64:
                raise ConfigError("no memory for that graph\nand more")
            return {"rows": rows, "budget": budget}

    bench = Bench()
    lines = [bench.tried(1, 8), bench.tried(1, 64)]
    assert lines == [{"rows": 1, "budget": 8}, {"rows": 1, "budget": 64, "failed": "no memory for that graph"}]
    assert "no memory for that graph" in device.show(lines)
