import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import plan
from draftwood.config import Options
from draftwood.errors import ConfigError
from draftwood.model.config import K2_6, K2_6_DRAFT
from draftwood.plan import Device, decide, find

H200 = plan.HARDWARE["h200"]
BIG = Device("cuda", "a large device", 4 << 40, 1e12)


def k26(**options):
    return Options(**{"model": "k2.6", "load_format": "dummy", **options})


def made(device=BIG, strict=True, **options):
    asked = k26(**options)
    return decide(asked, find(asked), device, strict)


def write_checkpoint(folder, drafter=True):
    (folder / "config.json").write_text(json.dumps(K2_6))
    if drafter:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(K2_6_DRAFT))
    return str(folder)


def test_defaults_are_block_8_budget_8_window_2048():
    p = made()
    assert (p.block, p.max_budget, p.window, p.max_num_seqs, p.max_model_len) == (8, 8, 2048, 128, 262144)
    assert p.num_pages == 128 * -(-(262144 + 8) // 64)
    assert p.dtype == "bfloat16"
    assert p.notes == ()


@given(st.integers(1, 600), st.sampled_from([1, 8]), st.integers(1, 256), st.sampled_from([0, 8, 64, "auto"]))
@settings(max_examples=100, deadline=None)
def test_an_accepted_plan_fits_memory_and_holds_one_longest_request(gib, tp, rows, budget):
    device = Device("cuda", "some device", gib << 30)
    try:
        p = made(device, tp=tp, max_num_seqs=rows, tree_budget=budget)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert sum(n for _, n in p.memory) <= device.memory
    assert p.num_pages * p.page_size >= p.max_model_len + p.max_budget
    assert 1 <= p.max_num_seqs <= rows
    assert 256 <= p.max_model_len <= 262144
    if p.max_num_seqs < rows or p.max_model_len < 262144:
        assert p.notes


def test_k26_on_eight_h200_holds_the_whole_context():
    p = made(H200, tp=8)
    assert p.max_model_len == 262144
    assert 0.003 < p.step_seconds < 0.006


def test_weights_that_do_not_fit_are_refused_or_noted():
    with pytest.raises(ConfigError, match="weights of a rank are 560.23 GiB.*use more ranks"):
        made(H200)
    p = made(H200, strict=False)
    assert any("does not fit" in note for note in p.notes)
    assert dict(p.memory)["target weights"] > 553 << 30


def test_a_context_that_was_asked_for_is_never_cut():
    small = Device("cuda", "small", 80 << 30)
    assert 256 <= made(small, tp=8).max_model_len < 262144
    with pytest.raises(ConfigError, match="context of 262144 tokens needs .* lower --max-model-len"):
        made(small, tp=8, max_model_len=262144)
    with pytest.raises(ConfigError, match="262145 is above the 262144"):
        made(max_model_len=262145)


def test_no_drafter_means_no_tree():
    for p in (made(draft="none"), made(tree_budget=0)):
        assert (p.block, p.window, p.max_budget, p.draft_path) == (0, 0, 0, None)
        assert not any(name.startswith("draft") for name, _ in (*p.memory, *p.step_bytes))
    assert "not loaded" in made(tree_budget=0).notes[0]
    assert made(tree_budget="auto").max_budget == 64


def test_the_drafter_is_checked_even_when_it_is_not_loaded():
    for budget in (0, 8):
        with pytest.raises(ConfigError, match="blocks of at most 8"):
            made(draft_block=16, tree_budget=budget)


@pytest.mark.parametrize(("tokens", "chunk"), [(64, 64), (100, 64), (512, 512), (2047, 1984)])
def test_prompt_chunks_are_whole_pages(tokens, chunk):
    assert made(max_num_batched_tokens=tokens).prefill_chunk == chunk


def test_ranks_must_share_heads_evenly():
    with pytest.raises(ConfigError, match="--tp 3"):
        made(tp=3)


def test_cpu_runs_float32_unless_asked():
    cpu = Device("cpu", "memory", 4 << 40)
    p = made(cpu)
    assert (p.dtype, p.device, p.bandwidth, p.step_seconds) == ("float32", "cpu", None, None)
    assert made(cpu, dtype="bfloat16").dtype == "bfloat16"


def test_a_folder_is_found_with_the_drafter_beside_it(tmp_path):
    name = write_checkpoint(tmp_path)
    found = find(Options(model=name))
    assert (found.folder, found.draft_folder) == (tmp_path, tmp_path / "draft")
    assert find(Options(model=name, draft="none")).drafter is None
    assert find(Options(model="k2.6", load_format="dummy", draft=str(tmp_path / "draft"))).draft_folder is not None


def test_a_missing_drafter_is_said(tmp_path):
    options = Options(model=write_checkpoint(tmp_path, drafter=False))
    p = decide(options, find(options), BIG)
    assert p.block == 0
    assert "no drafter" in p.notes[0]
    for field, value in (("tree_budget", "auto"), ("tree_budget", 16), ("topk_cap", 2), ("noise", "own"), ("tree_spine", True)):
        asked = dataclasses.replace(options, **{field: value})
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}.* has no effect without a drafter"):
            decide(asked, find(asked), BIG)


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    cases = {
        str(tmp_path / "missing"): "no folder, no hub id",
        str(file): "is a file",
        "qwen": "no folder, no hub id",
        "k2.6": "shape without weights",
        str(tmp_path): "config.json",
    }
    for name, words in cases.items():
        with pytest.raises(ConfigError, match=words) as error:
            find(Options(model=name))
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="no folder"):
        find(k26(draft=str(tmp_path / "missing")))


def test_without_a_network_a_hub_id_is_refused_in_one_line(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("Got: ConnectError\nAn error happened")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="hub cannot be reached; go online, or give a folder") as error:
        find(Options(model="moonshotai/Kimi-K2.6"))
    assert "\n" not in str(error.value)


def test_a_plan_can_be_written_as_json():
    assert json.loads(json.dumps(dataclasses.asdict(made())))["max_budget"] == 8


def test_planning_does_not_load_torch():
    code = (
        "import sys; from draftwood import plan; from draftwood.config import Options;"
        "o = Options(model='k2.6', load_format='dummy', tp=8); plan.decide(o, plan.find(o), plan.HARDWARE['b300']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cpu_clears_memory_for_few_rows_unless_more_are_asked_for():
    cpu = Device("cpu", "cpu", 1 << 42)
    assert made(cpu).max_num_seqs == plan.CPU_ROWS
    for rows in (1, 64, plan.ROWS):
        assert made(cpu, max_num_seqs=rows).max_num_seqs == rows
    assert made(BIG).max_num_seqs == 128


def test_no_context_is_longer_than_the_drafter_knows(tmp_path):
    folder = write_checkpoint(tmp_path)
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**K2_6_DRAFT, "max_position_embeddings": 1000}))

    def planned(**options):
        asked = Options(model=folder, **options)
        return decide(asked, find(asked), BIG)

    assert (planned().max_model_len, planned().window) == (1000, 1000)
    assert planned().notes == ("the drafter knows 1000 positions: that is the context, of the model's 262144",)
    assert planned(max_model_len=1000).notes == ()
    assert planned(draft="none").max_model_len == planned(tree_budget=0).max_model_len == 262144
    with pytest.raises(ConfigError, match="--max-model-len 1001 is above the 1000 positions of the drafter"):
        planned(max_model_len=1001)


def test_a_cap_that_keeps_trees_below_their_budget_is_said():
    assert made(topk_cap=1, draft_block=4, tree_budget=8).notes == (
        "--topk-cap 1 and block 4 give trees of at most 3 nodes, not 8",
    )
    assert made(topk_cap=2, draft_block=4, tree_budget=14).notes == ()


def test_a_block_that_the_drafter_was_not_trained_for_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--draft-block 16: this drafter was trained for blocks of at most 8"):
        made(draft_block=16)
    write_checkpoint(tmp_path)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(K2_6_DRAFT | {"block_size": 2}))
    asked = Options(model=str(tmp_path))
    with pytest.raises(ConfigError, match="blocks of 2"):
        decide(asked, find(asked), BIG)


def test_nano_is_the_bundled_model_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "nano").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    (tmp_path / "bundled" / "config.json").write_text("{}")
    monkeypatch.setattr(plan.nano, "path", lambda: tmp_path / "bundled")
    assert plan.locate("nano") == tmp_path / "bundled"


def test_a_download_that_breaks_off_is_one_line(monkeypatch):
    import huggingface_hub

    def broken(*args, **kwargs):
        raise huggingface_hub.errors.HTTPError("peer closed connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ConfigError, match="hub id some/model could not be downloaded: peer closed"):
        plan.locate("some/model")


def test_a_gpu_takes_whole_chunks_into_its_draft_window():
    p = made(max_num_batched_tokens=4096)
    assert p.prefill_chunk == 2048 and "chunks of 2048" in p.notes[0]
    assert made(max_num_batched_tokens=4096, draft="none").prefill_chunk == 4096
    assert made(max_num_batched_tokens=4096, device=Device("cpu", "memory", 4 << 40)).prefill_chunk == 4096
    with pytest.raises(ConfigError, match="window of 32 tokens is below the 64"):
        made(draft_window=32)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float32"}, "not what the CUDA kernels compute in"),
        ({"max_num_seqs": 129}, "above the 128"),
        ({"max_num_batched_tokens": 8256}, "above the 8192"),
        ({"routed_experts": 20}, "multiple of 16"),
        ({"layers": 1}, "--layers 1"),
    ],
)
def test_what_a_gpu_cannot_run_is_refused_in_one_line(options, match):
    with pytest.raises(ConfigError, match=match):
        made(**options)


def test_random_weights_may_have_fewer_experts_and_layers_and_the_plan_says_so(tmp_path):
    p = made(H200, routed_experts=48, layers=61, max_num_seqs=1, max_model_len=4096, tree_budget=64, synthetic_accept=4.2)
    assert "61 layers of 61, 48 routed experts a layer of 384" in p.notes[0]
    assert any("synthetic acceptance of 4.2" in note for note in p.notes)
    names = dict(p.memory)
    assert {"workspace", "rows", "step buffers", "graphs"} <= set(names) and names["target weights"] < 100 << 30
    with pytest.raises(ConfigError, match="add --load-format dummy"):
        find(Options(model=write_checkpoint(tmp_path), routed_experts=48))


def test_synthetic_acceptance_is_the_gpus():
    with pytest.raises(ConfigError, match="--synthetic-accept 3 needs --device cuda"):
        made(Device("cpu", "memory", 4 << 40), synthetic_accept=3.0)
    with pytest.raises(ConfigError, match="synthetic-accept 0.5 is outside"):
        k26(synthetic_accept=0.5)
