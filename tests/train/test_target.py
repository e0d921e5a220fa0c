"""The training commands: pieces that resume exactly, the whole chain on two cores, refusals in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftwood.cli import main
from draftwood.errors import ConfigError
from draftwood.train import data, piece
from draftwood.train.capture import Captured, Writer
from draftwood.train.optim import continued
from draftwood.train.shapes import SMOKE
from draftwood.train.target import split

sys.path.insert(0, str(Path(__file__).parent))
import smoke_data  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smoke_data.write(tmp_path_factory.mktemp("data"))


def target(folder: Path, out: Path, *more: str) -> int:
    return main(["train", "target", "--smoke", "--device", "cpu", "--data", str(folder), "--out", str(out), *more])


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of 40 steps and its captured text."""
    out = tmp_path_factory.mktemp("pair")
    assert target(folder, out / "m", "--total-steps", "40") == 0
    sizes = ["--rows", "40", "--length", "128", "--new", "40", "--longest-prompt", "24", "--seconds", "0.2"]
    assert (
        main(
            [
                "train",
                "capture",
                "--smoke",
                "--device",
                "cpu",
                "--model",
                str(out / "m"),
                "--data",
                str(folder),
                "--out",
                str(out / "c"),
                *sizes,
            ]
        )
        == 0
    )
    return out / "m", out / "c"


def drafter(folder: Path, pair: tuple[Path, Path], out: Path, *more: str) -> int:
    sizes = ["--rows", "4", "--window", "64", "--block-tokens", "64"]
    where = ["--model", str(pair[0]), "--captured", str(pair[1]), "--data", str(folder), "--out", str(out)]
    return main(["train", "drafter", "--smoke", "--device", "cpu", *where, *sizes, *more])


def same_tensors(a: Path, b: Path) -> None:
    files = sorted(p.name for p in a.glob("*.safetensors"))
    assert files
    for name in files:
        one, two = load_file(a / name), load_file(b / name)
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), key


def test_three_steps_and_three_resumed_are_bitwise_six(folder: Path, tmp_path: Path) -> None:
    assert target(folder, tmp_path / "whole", "--total-steps", "6") == 0
    assert target(folder, tmp_path / "parts", "--total-steps", "6", "--steps", "3") == 0
    assert target(folder, tmp_path / "parts", "--total-steps", "6", "--resume") == 0
    same_tensors(tmp_path / "whole", tmp_path / "parts")


def test_a_resumed_drafter_is_bitwise_the_uninterrupted_one(folder: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert drafter(folder, pair, tmp_path / "whole", "--total-steps", "8") == 0
    assert drafter(folder, pair, tmp_path / "parts", "--total-steps", "8", "--steps", "4") == 0
    assert drafter(folder, pair, tmp_path / "parts", "--total-steps", "8", "--resume") == 0
    same_tensors(tmp_path / "whole", tmp_path / "parts")


def test_a_run_from_a_checkpoint_begins_with_exactly_its_weights(folder: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert target(folder, tmp_path / "t", "--init", str(pair[0]), "--total-steps", "4", "--steps", "0") == 0
    for path in pair[0].glob("model*"):
        assert path.read_bytes() == (tmp_path / "t" / path.name).read_bytes(), path.name
    assert drafter(folder, pair, tmp_path / "d", "--total-steps", "4", "--steps", "2") == 0
    assert drafter(folder, pair, tmp_path / "e", "--init", str(tmp_path / "d"), "--total-steps", "4", "--steps", "0") == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()


def test_a_run_from_a_checkpoint_resumes_bitwise(folder: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    begin = ["--init", str(pair[0]), "--lr-share", "0.5", "--total-steps", "6"]
    assert target(folder, tmp_path / "whole", *begin) == 0
    assert target(folder, tmp_path / "parts", *begin, "--steps", "3") == 0
    assert target(folder, tmp_path / "parts", "--total-steps", "6", "--resume") == 0
    same_tensors(tmp_path / "whole", tmp_path / "parts")
    log = json.loads((tmp_path / "whole" / "training.log.json").read_text())
    assert log["history"][0][2] < 5.0  # far below ln(256): the first step already has trained weights


def test_a_continued_run_begins_low_and_ends_at_two_percent() -> None:
    assert continued(0.0, 0, 0.4) == pytest.approx(0.4 / 30)
    assert continued(0.0, 99, 0.4) == pytest.approx(0.4)
    assert continued(0.5, 999, 0.4) == pytest.approx(0.21)
    assert continued(1.0, 999, 0.4) == pytest.approx(0.02)


@pytest.mark.parametrize("words", [["--lr-share", "0"], ["--lr-share", "1.5"], ["--resume"]])
def test_a_checkpoint_to_begin_with_is_checked(
    folder: Path, pair: tuple[Path, Path], tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert target(folder, tmp_path, "--init", str(pair[0]), "--total-steps", "1", *words) == 2
    assert "--init" in capsys.readouterr().err
    assert target(folder, tmp_path, "--init", str(tmp_path / "none"), "--total-steps", "1") == 2


def test_the_schedule_of_pieces_in_seconds_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece, "LOOK_EVERY", 2)
    timing = ["--seconds", "0.6", "--total-seconds", "1.2"]
    assert target(folder, tmp_path, *timing) == 0
    first = json.loads((tmp_path / "training.log.json").read_text())
    assert target(folder, tmp_path, *timing, "--resume") == 0
    second = json.loads((tmp_path / "training.log.json").read_text())
    assert 0.5 <= first["progress"] < 1 and second["progress"] == 1
    assert second["steps"] > first["steps"]


def test_the_whole_chain_trains_and_measures_a_pair(
    folder: Path, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drafter(folder, pair, pair[0] / "draft", "--total-steps", "8") == 0
    capsys.readouterr()
    sizes = ["--rows", "4", "--prompt", "16", "--new", "32", "--temperatures", "0,1", "--blocks", "8"]
    out = tmp_path / "e.json"
    assert (
        main(["train", "evaluate", "--device", "cpu", "--model", str(pair[0]), "--data", str(folder), "--out", str(out), *sizes])
        == 0
    )
    facts = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    found = json.loads(out.read_text())
    assert facts["held"] < 5.6 and facts["held_pairs"] < 5.6  # below ln(256)
    assert {(a["temperature"], a["noise"]) for a in found["accept"]} == {
        (0.0, "none"), (1.0, "none"), (1.0, "own"), (1.0, "shared"),
    }  # fmt: skip
    for line in found["accept"]:
        values = [line["all"][str(b)] for b in (4, 7, 8, 16, 32, 64)]
        assert values == sorted(values) and values[0] >= 1  # nested trees: more budget never accepts less


def test_captured_text_is_forced_prompts_then_samples_until_the_turn_ends(folder: Path, pair: tuple[Path, Path]) -> None:
    captured = Captured.load(pair[1])
    ids = captured.ids.int() & 0xFFFF
    sampled, segment = (captured.kind & 1).bool(), captured.kind // 2
    assert sampled.float().mean() > 0.3
    ends = sampled & ((ids == SMOKE.im_end) | (ids == SMOKE.eos))
    after = segment[:, 1:] != segment[:, :-1]
    assert bool((after | ~ends[:, :-1]).all())  # every sampled end closes its segment
    assert bool((~sampled[:, 1:][after]).all())  # and a segment begins with a forced token
    chats = (torch.arange(len(ids)) % 40) % 20 < 12
    assert bool((ids[chats, 0] == smoke_data.USER).all())


def test_every_batch_has_the_share_of_pairs_and_they_begin_at_a_pair(folder: Path) -> None:
    tokens = data.load_tokens(folder, SMOKE, CPU)
    mixture = data.Mixture(tokens, 0.25, 0.5, torch.Generator().manual_seed(0))
    for _ in range(20):
        batch = mixture.batch(8, 65)
        assert batch.shape == (8, 65)
        assert bool((batch[:2, 0] == smoke_data.USER).all())
        begins = batch[2:5]
        stream = tokens.corpus.tolist()
        for row in begins.tolist():
            assert any(stream[d : d + 65] == row for d in tokens.documents.tolist()) or stream[-65:] == row


def test_shards_are_one_corpus_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    whole = data.load_tokens(folder, SMOKE, CPU)
    cut = int(whole.documents[100])
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.glob("pairs*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    stream = whole.corpus.numpy().astype("<u2")
    stream[:cut].tofile(tmp_path / "corpus-0.bin")
    stream[cut:].tofile(other / "corpus-1.bin")
    first = data.load_tokens(tmp_path, SMOKE, CPU)
    assert torch.equal(first.corpus, whole.corpus[:cut]) and torch.equal(first.documents, whole.documents[:100])
    both = data.load_tokens(tmp_path, SMOKE, CPU, corpus=[tmp_path / "corpus-0.bin", other / "corpus-1.bin"])
    assert torch.equal(both.corpus, whole.corpus) and torch.equal(both.documents, whole.documents)
    (other / "corpus-1.bin").rename(tmp_path / "corpus-1.bin")
    assert torch.equal(data.load_tokens(tmp_path, SMOKE, CPU).corpus, whole.corpus)
    some = data.load_tokens(tmp_path, SMOKE, CPU, limit=2000)
    assert torch.equal(some.corpus, torch.cat([whole.corpus[:1000], whole.corpus[cut : cut + 1000]]))
    with pytest.raises(ConfigError, match="corpus-9"):
        data.load_tokens(tmp_path, SMOKE, CPU, corpus=[tmp_path / "corpus-9.bin"])


def test_steps_of_every_length_have_the_same_number_of_tokens() -> None:
    seen = {split(step, progress, 64, 1024) for step in range(8) for progress in (0.0, 0.9)}
    assert seen == {(64, 1024), (128, 512), (32, 2048)}


def test_the_writer_starts_the_same_way_after_a_reset(folder: Path) -> None:
    tokens = data.load_tokens(folder, SMOKE, CPU)
    writer = Writer(tokens, SMOKE, 20, 32, 0.5, 24, 10)
    torch.manual_seed(0)
    writer.reset()
    first = writer.ids.clone()
    for position in range(31):
        writer.next(torch.randn(20, SMOKE.vocab), torch.tensor([position]))
    torch.manual_seed(0)
    writer.reset()
    assert torch.equal(writer.ids, first) and int(writer.kind.sum()) == 0


@pytest.mark.parametrize("spoil", ["missing", "odd", "large", "cut xz", "index"])
def test_spoiled_data_is_refused_in_one_line(folder: Path, tmp_path: Path, spoil: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in folder.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    if spoil == "missing":
        (bad / "pairs.bin").unlink()
    elif spoil == "odd":
        (bad / "corpus.bin").write_bytes(b"abc")
    elif spoil == "large":
        np.array([1, 2, 300] * 1000, dtype="<u2").tofile(bad / "corpus.bin")
    elif spoil == "cut xz":
        import lzma

        packed = lzma.compress((bad / "corpus.bin").read_bytes())
        (bad / "corpus.bin.xz").write_bytes(packed[: len(packed) // 2])
        (bad / "corpus.bin").unlink()
    else:
        np.save(bad / "pairs.idx.npy", np.zeros((3, 4), np.uint32))
    capsys.readouterr()
    assert target(bad, tmp_path / "out", "--total-steps", "1") == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("draftwood")]
    assert len(lines) == 1


def test_resuming_without_a_state_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert target(folder, tmp_path / "none", "--total-steps", "2", "--resume") == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "state.pt").write_bytes(b"not a state")
    assert target(folder, tmp_path, "--total-steps", "2", "--resume") == 2
