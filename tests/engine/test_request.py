"""Every value of a request is checked, and the message names the field."""

import argparse
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.engine.request import SamplingParams, add_sampling, sampling_from
from draftwood.errors import RequestError

BAD = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 1 << 60),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", None), ("temperature", 1e-9), ("temperature", 10**400), ("temperature", True), ("temperature", 101),
    ("top_p", 0), ("top_p", 1.01), ("top_p", -math.inf), ("top_k", -2), ("top_k", 2.0), ("top_k", 10**30),
    ("min_p", -0.1), ("min_p", 1.1), ("seed", 1 << 63), ("seed", -(1 << 63) - 1), ("seed", "7"), ("seed", 10**5000),
    ("stop", [""]), ("stop", [1]), ("stop", 5), ("stop", ["x"] * 65), ("stop", "y" * 2000), ("stop", {"a": 1}),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
    ("stop_token_ids", [1 << 40]), ("stop_token_ids", [10**5000]),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", math.nan),
    ("ignore_eos", 1), ("logit_bias", [1]), ("logit_bias", {"1": 2}), ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 101}), ("logit_bias", {1: "a"}), ("logit_bias", dict.fromkeys(range(2000), 1)),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("tree_budget", 65), ("tree_budget", -1),
    ("tree_budget", "many"), ("min_tokens", -1), ("min_tokens", 257), ("min_tokens", 1.0), ("min_tokens", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD)])
def test_a_bad_value_is_refused_by_name_on_one_short_line(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert name in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@given(st.sampled_from([n for n, _ in BAD]), anything)
def test_any_value_is_taken_or_refused_with_a_request_error(name, value):
    try:
        SamplingParams(**{name: value}).seeded()
    except RequestError as error:
        assert error.param == name and "\n" not in str(error)


def test_min_tokens_does_not_go_with_stop_texts():
    with pytest.raises(RequestError) as error:
        SamplingParams(min_tokens=3, stop="a")
    assert error.value.param == "min_tokens"


def test_an_unknown_parameter_is_named_with_the_known_ones():
    with pytest.raises(RequestError, match="'temprature' is not a sampling parameter; known: .*temperature") as error:
        SamplingParams.of({"temprature": 1})
    assert error.value.param == "temprature"


def test_values_are_kept_in_one_form():
    params = SamplingParams(temperature=1, stop="a", stop_token_ids=[3], logit_bias={2: 1}, top_k=-1)
    assert (params.temperature, params.stop, params.stop_token_ids, params.top_k) == (1.0, ("a",), (3,), 0)
    assert params.logit_bias == {2: 1.0} and isinstance(params.logit_bias[2], float)


def test_a_seed_is_drawn_when_none_is_given_and_kept_when_one_is():
    assert SamplingParams(seed=0).seeded().seed == 0
    assert len({SamplingParams().seeded().seed for _ in range(20)}) > 15


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    return sampling_from(parser.parse_args(argv))


def test_flags_are_the_fields():
    assert parse() == SamplingParams()
    given_flags = parse("--max-tokens", "5", "--temperature", "0.5", "--top-p", ".9", "--top-k", "3", "--min-p", ".1",
                        "--seed", "-4", "--stop", "a", "--stop", "b", "--presence-penalty", "1", "--frequency-penalty",
                        "-1", "--repetition-penalty", "1.1", "--ignore-eos")  # fmt: skip
    assert given_flags == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=-4, stop=("a", "b"), presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip


def test_a_flag_with_a_bad_value_is_a_request_error():
    with pytest.raises(RequestError, match="temperature nan"):
        parse("--temperature", "nan")
