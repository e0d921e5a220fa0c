"""`draftwood train pack`: tiktoken's ids are the trained BPE's, K2's special ids, and the layout of the token files."""

from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path

import numpy as np
import pytest

from draftwood.errors import ConfigError
from draftwood.train import pack
from draftwood.train.files import compress, token_chunks, write_lines

tokenizers = pytest.importorskip("tokenizers")
TEXTS = [Path(module.__file__).read_text() for module in (argparse, json, lzma)]
VOCAB = 900


@pytest.fixture(scope="module")
def bpe() -> object:
    return pack.train_bpe(TEXTS, VOCAB - pack.SPECIALS)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pack.add_arguments(parser)
    return parser.parse_args([*words, "--vocab", str(VOCAB)])


def folder(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    pairs = [{"package": "p", "kind": "function", "request": f"Write {i}.", "answer": "def f(): <|im_end|>"} for i in range(9)]
    write_lines(text / "train.jsonl", ({"package": "p", "text": part} for part in TEXTS))
    write_lines(text / "held.jsonl", [{"package": "h", "text": TEXTS[0][:3000]}])
    write_lines(text / "pairs.jsonl", pairs)
    write_lines(text / "held_pairs.jsonl", pairs[:2])
    return text


def test_tiktoken_gives_the_ids_of_the_trained_bpe(bpe: object) -> None:
    enc = pack.encoding(pack.mergeable_ranks(bpe))
    texts = [*TEXTS, "naïve 汉字 emoji 🙂 \r\n\t x1234567", "don't WE'LL   \n\n  end"]
    assert pack.differing(bpe, enc, texts) == (0, len(texts))
    assert [enc.decode(enc.encode_ordinary(text)) for text in texts] == texts


def test_specials_have_k2_names_at_k2_offsets(bpe: object, tmp_path: Path) -> None:
    ranks = pack.mergeable_ranks(bpe)
    base = VOCAB - pack.SPECIALS
    special = pack.special_tokens(base)
    assert (special["[BOS]"], special["[EOS]"], special["<|im_end|>"]) == (base, base + 1, base + 2)
    assert (special["<think>"], special["</think>"], special["[UNK]"], special["[PAD]"]) == (
        base + 22, base + 23, base + 254, base + 255,
    )  # fmt: skip
    assert sorted(special.values()) == list(range(base, VOCAB))
    assert special[f"<|reserved_token_{base + 5}|>"] == base + 5
    pack.write_tokenizer(tmp_path, ranks, 4096)
    assert pack.read_ranks(tmp_path / "tiktoken.model") == ranks
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"][str(base + 1)]["content"] == config["eos_token"] == "[EOS]"
    assert config["model_max_length"] == 4096


def test_packed_files_hold_what_went_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert pack.run(arguments("--text", str(folder(tmp_path)), "--out", str(out))) == 0
    meta = json.loads(capsys.readouterr().out.splitlines()[-1])
    enc = pack.encoding(pack.read_ranks(out / "tiktoken.model"))
    base = enc.n_vocab - pack.SPECIALS
    ids = np.concatenate(list(token_chunks(out / "corpus.bin.xz", chunk=1000)))
    assert len(ids) == meta["corpus"]["tokens"]
    assert (ids == base + 1).sum() == len(TEXTS)
    assert sorted(enc.decode(list(part)) for part in np.split(ids, np.flatnonzero(ids == base + 1) + 1)[:-1]) == sorted(
        text + "[EOS]" for text in TEXTS
    )
    chats = np.concatenate(list(token_chunks(out / "pairs.bin")))
    with lzma.open(out / "pairs.idx.npy.xz") as stream:
        index = np.load(stream)
    assert index.dtype == np.uint32
    ends = [*index[1:, 0], len(chats)]
    # text that looks like a control token stays text: one <|im_end|> per turn
    assert (chats == base + 2).sum() == 2 * len(index) == 18
    for (start, answer), end in zip(index, ends, strict=True):
        prompt = enc.decode(list(chats[start:answer]))
        assert prompt.startswith("<|im_user|>user<|im_middle|>Write ")
        assert prompt.endswith(".<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>")
        assert enc.decode(list(chats[answer:end])) == "def f(): <|im_end|><|im_end|>"
        assert chats[end - 1] == base + 2
    assert meta["travel_bytes"] == sum(
        (out / name).stat().st_size for name in meta["files"] if name.endswith((".xz", ".model", ".json"))
    )


def test_shards_hold_every_document_once(tmp_path: Path) -> None:
    text = str(folder(tmp_path))
    pack.run(arguments("--text", text, "--out", str(tmp_path / "one")))
    again = ["--tokenizer", str(tmp_path / "one" / "tiktoken.model")]
    pack.run(arguments("--text", text, "--out", str(tmp_path / "two"), "--shards", "2", *again))
    assert not (tmp_path / "two" / "corpus.bin").exists()
    parts = []
    for shard in range(2):
        ids = np.concatenate(list(token_chunks(tmp_path / "two" / f"corpus-{shard}.bin.xz")))
        ends = np.flatnonzero(ids == VOCAB - pack.SPECIALS + 1) + 1
        assert ends[-1] == len(ids)  # whole documents
        parts += [part.tobytes() for part in np.split(ids, ends[:-1])]
    whole = np.fromfile(tmp_path / "one" / "corpus.bin", dtype="<u2")
    cuts = np.flatnonzero(whole == VOCAB - pack.SPECIALS + 1)[:-1] + 1
    assert sorted(parts) == sorted(part.tobytes() for part in np.split(whole, cuts))
    for name in ("tiktoken.model", "held.bin", "pairs.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    with pytest.raises(ConfigError, match="--shards"):
        pack.run(arguments("--text", text, "--out", str(tmp_path / "three"), "--shards", "0"))


def test_the_limit_and_a_given_tokenizer(tmp_path: Path) -> None:
    text = str(folder(tmp_path))
    pack.run(arguments("--text", text, "--out", str(tmp_path / "a")))
    again = arguments("--text", text, "--out", str(tmp_path / "b"), "--tokenizer", str(tmp_path / "a" / "tiktoken.model"))
    pack.run(again)
    assert (tmp_path / "a" / "corpus.bin").read_bytes() == (tmp_path / "b" / "corpus.bin").read_bytes()
    with pytest.raises(ConfigError, match="--limit"):
        pack.run(arguments("--text", text, "--out", str(tmp_path / "c"), "--limit", "1000"))


@pytest.mark.parametrize("words", [["--text", "nowhere"], ["--text", "text", "--tokenizer", "nothing"]])
def test_bad_input_is_one_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path)
    with pytest.raises(ConfigError) as caught:
        pack.run(arguments(*words, "--out", "out"))
    assert "\n" not in str(caught.value)


def test_too_little_text_for_the_vocabulary_is_said() -> None:
    with pytest.raises(ConfigError, match="more text"):
        pack.train_bpe(["tiny text"], 5000)


def test_damaged_token_files_are_said(tmp_path: Path) -> None:
    raw = tmp_path / "a.bin"
    raw.write_bytes(np.arange(5000, dtype="<u2").tobytes())
    compress(raw, tmp_path / "a.bin.xz")
    (tmp_path / "cut.bin.xz").write_bytes((tmp_path / "a.bin.xz").read_bytes()[:-40])
    (tmp_path / "odd.bin").write_bytes(b"abc")
    for name in ("cut.bin.xz", "odd.bin", "none.bin"):
        with pytest.raises(ConfigError):
            list(token_chunks(tmp_path / name))


def test_some_texts_are_encoded_as_a_prompt_that_ends_with_a_line_and_its_rest(bpe: object) -> None:
    enc = pack.encoding(pack.mergeable_ranks(bpe))
    body = "def f(a,\n      b):\n    c = a + b\n    return c\n"
    texts = [*[body] * 50, TEXTS[0], "import os\n", "def g(): pass\n"]
    whole, again = list(pack.documents(enc, texts)), list(pack.documents(enc, texts, random.Random(3)))
    assert [enc.decode(list(ids)) for ids in again] == [enc.decode(list(ids)) for ids in whole]
    merged, colon = enc.encode_ordinary("):\n"), enc.encode_ordinary("):")
    assert len(merged) == 1, "the point of it: a newline joins the punctuation before it"
    assert all(merged[0] in ids for ids in whole[:50])
    cut = [ids.tolist() for ids in again[:50] if merged[0] not in ids]
    assert 10 <= len(cut) <= 40  # 0.6 x (0.6 + some)
    for ids in cut:
        at = ids.index(colon[-1])
        assert enc.decode(ids[: at + 1]).endswith("b):") and enc.decode([ids[at + 1]]).startswith("\n")
    assert again[50].tolist() != whole[50].tolist()  # files are cut, too, now and then
    assert [ids.tolist() for ids in again[51:]] == [ids.tolist() for ids in whole[51:]]  # nothing follows their only line
