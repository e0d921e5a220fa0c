import json
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import ConfigError, RequestError
from draftwood.text.tokenizer import MAX_RUN, PATTERN, Tokenizer, chunks
from tests.text.vocabulary import ranks, tokenizer, write

SMALL = tokenizer()
RANKS = ranks()
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
mixed_text = st.text("aA zZ'sST \n\r\t12٣,.!<|>中文世界éßΩдあ한́😀 ", max_size=60)


def byte_pairs(piece: bytes) -> list[int]:
    """Plain byte-pair merging: join the neighbours of lowest rank until none can be joined."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(mixed_text)
@settings(max_examples=300, deadline=None)
def test_ids_are_those_of_k2s_pattern_and_byte_pair_merging(text):
    pieces = regex.findall(PATTERN, text, flags=regex.V1)
    assert "".join(pieces) == text
    assert SMALL.encode(text) == [id for piece in pieces for id in byte_pairs(piece.encode())]


@given(any_text)
@settings(deadline=None)
def test_decode_undoes_encode(text):
    assert SMALL.decode(SMALL.encode(text)) == text


def test_han_does_not_join_latin_letters():
    assert regex.findall(PATTERN, "ab中文cd", flags=regex.V1) == ["ab", "中文", "cd"]
    assert SMALL.encode("def世界") == SMALL.encode("def") + SMALL.encode("世界")


def test_special_ids_follow_the_vocabulary_as_in_k2():
    base = len(RANKS)
    assert SMALL.vocab_size == base + 256
    assert SMALL.special["[BOS]"] == base
    assert SMALL.special["<|im_end|>"] == base + 2
    assert SMALL.special["<|im_middle|>"] == base + 17
    assert SMALL.special["</think>"] == base + 23
    assert SMALL.special["[PAD]"] == base + 255
    assert SMALL.special[f"<|reserved_token_{base + 5}|>"] == base + 5
    assert sorted(SMALL.special.values()) == list(range(base, base + 256))
    assert SMALL.eos_ids == (base + 1, base + 2)


def test_thinking_and_tool_markers_are_never_silent():
    for name in ("<think>", "</think>", "<|tool_call_begin|>", "<|tool_calls_section_end|>"):
        assert SMALL.special[name] not in SMALL.silent
    assert SMALL.special["<|im_end|>"] in SMALL.silent


def test_special_names_are_text_unless_asked_for():
    text = "a<|im_end|>b[EOS]"
    assert not set(SMALL.encode(text)) & set(SMALL.special.values())
    end, eos = SMALL.special["<|im_end|>"], SMALL.special["[EOS]"]
    assert SMALL.encode(text, allow_special=True) == [*SMALL.encode("a"), end, *SMALL.encode("b"), eos]
    assert SMALL.decode(SMALL.encode(text, allow_special=True)) == text == SMALL.decode(SMALL.encode(text))


@given(any_text, st.sampled_from(sorted(SMALL.special)), any_text)
@settings(deadline=None)
def test_special_tokens_split_the_text_around_them(before, name, after):
    ids = SMALL.encode(before + name + after, allow_special=True)
    assert SMALL.special[name] in ids
    assert SMALL.decode(ids) == before + name + after


@pytest.mark.parametrize(
    "text",
    [
        " " * 1_000_000,
        "a" * 1_000_000,
        "中" * 300_000,
        "\n" * 400_001,
        " \n" * 300_000,
        "<|im_end" * 100_000,
        "\x1c" * 99_999,
    ],
    ids=["spaces", "letters", "han", "newlines", "spaced newlines", "half markers", "separators"],
)
def test_hostile_text_encodes_in_seconds_and_exactly(text):
    start = time.perf_counter()
    assert SMALL.decode(SMALL.encode(text)) == text
    assert time.perf_counter() - start < 8


def test_chunks_cut_unbroken_runs_and_nothing_else():
    assert list(chunks("a b")) == ["a b"]
    long = "x" * (2 * MAX_RUN + 1) + " y"
    assert list(chunks(long)) == ["x" * MAX_RUN, "x" * MAX_RUN, "x y"]
    assert list(chunks("x" * MAX_RUN)) == ["x" * MAX_RUN]
    spaced = "ab " * 200_000
    assert [len(piece) for piece in chunks(spaced)] == [400_000, 200_000]


@given(st.lists(st.tuples(st.sampled_from("a "), st.integers(1, 70_000)), max_size=8))
@settings(max_examples=30, deadline=None)
def test_no_chunk_holds_a_longer_run_than_allowed(runs):
    text = "".join(character * count for character, count in runs)
    pieces = list(chunks(text))
    assert "".join(pieces) == text
    assert all(len(run) <= MAX_RUN for piece in pieces for run in regex.findall(r"\s+|\S+", piece))


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "ok \udc80 ok"])
def test_lone_surrogates_are_refused_by_place(text):
    with pytest.raises(RequestError, match=r"lone surrogate U\+D") as error:
        SMALL.encode(text, param="messages[0].content")
    assert error.value.param == "messages[0].content"


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["list"]])
def test_only_text_encodes(value):
    with pytest.raises(RequestError, match="not text"):
        SMALL.encode(value)


def test_unknown_ids_are_refused():
    for id in (-1, SMALL.vocab_size):
        with pytest.raises(RequestError, match="outside 0.."):
            SMALL.decode([id])


def test_a_folder_loads_with_the_names_it_gives(tmp_path):
    base = len(RANKS)
    table = {
        str(base + 3): {"content": "<|im_start|>", "special": True},
        str(base + 9): {"content": "<x>", "special": False},
    }
    loaded = Tokenizer.load(write(tmp_path, {"added_tokens_decoder": table}))
    assert loaded.special["<|im_start|>"] == base + 3
    assert "<|im_end|>" not in loaded.special
    assert base + 3 in loaded.silent
    assert base + 9 not in loaded.silent
    assert Tokenizer.load(write(tmp_path, {})).special == SMALL.special


def damaged(folder, change):
    path = write(folder) / "tiktoken.model"
    path.write_bytes(change(path.read_bytes()))
    return path.parent


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:-5], "is not `base64 rank`|missing|no token"),
        (lambda raw: raw[: len(raw) // 4], "base64|missing|no token"),
        (lambda raw: b"", "256 of 256 single bytes"),
        (lambda raw: b"!!!! 7\n" + raw, "line 1"),
        (lambda raw: raw + b"AAAA\n", "base64 rank"),
        (lambda raw: raw + b"AAAA x\n", "base64 rank"),
        (lambda raw: raw + b"AAAA 99999\n", "rank 2.. is missing"),
        (lambda raw: raw + b"AAAA 5\n", "rank 5 is there twice"),
        (lambda raw: raw + b"AAAA -1\n", "missing|twice"),
        (lambda raw: raw + raw.splitlines()[0] + b"\n", "there twice"),
        (lambda raw: b"\n".join(raw.splitlines()[1:]), "rank 0 is missing"),
        (lambda raw: raw.replace(b"AA== 0\n", b"AAAA 0\n"), "1 of 256 single bytes have no token"),
        (lambda raw: b"\x00\xff\x00" + raw, "line 1"),
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words) as error:
        Tokenizer.load(damaged(tmp_path, change))
    assert "\n" not in str(error.value)


def test_a_vocabulary_cut_at_a_line_does_not_fit_its_config(tmp_path):
    base = len(RANKS)
    config = {"added_tokens_decoder": {str(base + 255): {"content": "[PAD]", "special": True}}}
    write(tmp_path, config)
    Tokenizer.load(tmp_path)
    damaged(tmp_path, lambda raw: b"\n".join(raw.splitlines()[:-1]))
    with pytest.raises(ConfigError, match="do not belong together"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        {"added_tokens_decoder": {"5": {"content": "<x>"}}},
        {"added_tokens_decoder": {str(len(RANKS)): {"content": ""}}},
        {"added_tokens_decoder": {str(len(RANKS)): {}}},
        {"added_tokens_decoder": {str(len(RANKS) + i): {"content": "<x>"} for i in (0, 1)}},
        {"added_tokens_decoder": {str(len(RANKS)): {"content": "\ud800"}}},
    ],
)
def test_a_wrong_tokenizer_config_is_refused_in_one_line(tmp_path, config):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_missing_or_broken_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the vocabulary"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"a": \xff')
    with pytest.raises(ConfigError, match="is not JSON"):
        Tokenizer.load(tmp_path)
