import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import RequestError
from draftwood.text.stream import Detokenizer, StopStrings, TextStream
from tests.text.vocabulary import tokenizer

SMALL = tokenizer()
ids = st.lists(st.integers(0, SMALL.vocab_size - 1) | st.integers(0x80, 0xFF), max_size=60)
text = st.text("ab😀é世界 <|", max_size=30)
stop_lists = st.lists(st.text("abé世 ", min_size=1, max_size=4), max_size=4)


def runs(draw, items):
    """Cut `items` into runs of any length, empty ones too."""
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=12)))
    edges = [0, *cuts, len(items)]
    return [items[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(st.data(), ids)
@settings(max_examples=300, deadline=None)
def test_any_split_of_any_tokens_gives_the_text_of_the_whole(data, tokens):
    stream = Detokenizer(SMALL)
    shown = [stream.push(run) for run in runs(data.draw, tokens)]
    assert "".join(shown) + stream.finish() == SMALL.decode(tokens)


def test_an_emoji_split_across_runs_appears_once_whole():
    raw = list("😀".encode())
    stream = Detokenizer(SMALL)
    assert [stream.push(raw[:1]), stream.push(raw[1:3]), stream.push(raw[3:])] == ["", "", "😀"]
    assert stream.finish() == ""


def test_incomplete_characters_become_replacement_only_at_the_end():
    stream = Detokenizer(SMALL)
    assert stream.push(list("世".encode())[:2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(SMALL.encode("a")) == "a"


def test_skipped_tokens_give_no_text():
    end = SMALL.special["<|im_end|>"]
    assert (
        Detokenizer(SMALL, skip=SMALL.silent).push([*SMALL.encode("a"), end, SMALL.special["</think>"]]) == "a</think>"
    )


def first_stop(whole: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: fewest characters to completion, then the longest stop string."""
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(whole) + 1) if whole[:end].endswith(stop)]
    return (min(ends)[0], min(ends)[2]) if ends else None


@given(st.data(), text, stop_lists)
@settings(max_examples=500, deadline=None)
def test_any_split_cuts_at_the_same_stop_string(data, whole, stops):
    stream = StopStrings(stops)
    shown = "".join(stream.push(part) for part in runs(data.draw, whole)) + stream.finish()
    found = first_stop(whole, stops)
    if found is None:
        assert (shown, stream.stop) == (whole, None)
    else:
        end, stop = found
        assert (shown, stream.stop) == (whole[: end - len(stop)], stop)


@given(text, stop_lists)
@settings(max_examples=300, deadline=None)
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(whole, stops):
    stream = StopStrings(stops)
    shown = stream.push(whole)
    if stream.stop is None:
        held = whole[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(st.data(), text, stop_lists)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_across_tokens_uses_exactly_the_tokens_it_needs(data, whole, stops):
    tokens = [byte for character in whole for byte in character.encode()]
    stream = TextStream(SMALL, stops)
    used, shown = 0, ""
    for run in runs(data.draw, tokens):
        piece = stream.push(run)
        used += piece.used
        shown += piece.text
    last = stream.finish()
    shown += last.text
    found = first_stop(whole, stops)
    if found is None:
        assert (shown, used, last.stop) == (whole, len(tokens), None)
    else:
        end, stop = found
        assert (shown, last.stop) == (whole[: end - len(stop)], stop)
        assert used == len(whole[:end].encode())


def test_tokens_after_the_stop_string_are_not_taken():
    stream = TextStream(SMALL, ["end"])
    run = SMALL.encode("x") + SMALL.encode("end") + SMALL.encode("more")
    piece = stream.push(run)
    assert (piece.text, piece.used, piece.stop) == ("x", 2, "end")
    assert stream.push(run).used == 0
    assert stream.finish().text == ""


def test_the_prefix_of_a_stop_string_comes_out_at_the_end():
    stream = TextStream(SMALL, ["<|im_end|>"])
    assert stream.push(SMALL.encode("a<|im")).text == "a"
    assert stream.finish().text == "<|im"


def test_a_long_self_similar_stop_string_is_linear():
    stream = StopStrings(["a" * 2000 + "b"])
    assert stream.push("a" * 200_000) == "a" * 198_000
    assert stream.push("b") == ""
    assert stream.stop is not None


def test_empty_stop_strings_are_refused():
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])
