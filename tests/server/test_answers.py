"""The `openai` client against nano: every form of an answer says the same."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.server.serving import until

PROMPTS = (
    "def add(a, b):\n",
    "def is_even(n):\n",
    "class Stack:\n",
    "import os\n\ndef ",
    "for i in range(",
    "def mean(values):\n",
    "x = [",
    "# Sort a list\n",
)
QUESTION = [{"role": "user", "content": "What can you do?"}]


def ask(client, prompt, budget=None, **more):
    given = {"max_tokens": 24, "temperature": 0.8, "seed": 11, **more}
    extra = {"tree_budget": budget} if budget is not None else {}
    return client.completions.create(model="nano", prompt=prompt, extra_body=extra, **given)


def text(completion):
    (choice,) = completion.choices
    return choice.text, choice.finish_reason


@pytest.fixture(scope="module")
def alone(client):
    """Each prompt's answer when nothing else runs."""
    return [text(ask(client, prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("budget", [0, 16])
def test_the_tree_budget_does_not_change_an_answer(client, alone, budget):
    assert [text(ask(client, prompt, budget)) for prompt in PROMPTS] == alone


def test_a_batch_of_16_gives_what_each_gives_alone(client, alone):
    with ThreadPoolExecutor(16) as pool:
        asks = [(prompt, budget) for prompt in PROMPTS for budget in (0, 16)]
        answers = list(pool.map(lambda one: text(ask(client, *one)), asks))
    assert answers == [answer for answer in alone for _ in range(2)]


def test_aborted_requests_leave_no_trace(client, server, alone):
    def leave(prompt):
        given = {"model": "nano", "prompt": prompt, "max_tokens": 600, "extra_body": {"ignore_eos": True}}
        with client.completions.create(**given, stream=True) as stream:
            next(iter(stream))

    with ThreadPoolExecutor(16) as pool:
        left = [pool.submit(leave, prompt) for prompt in PROMPTS]
        answers = list(pool.map(lambda prompt: text(ask(client, prompt)), PROMPTS))
        for one in left:
            one.result()
    assert answers == alone
    until(lambda: not server.runner.open and server.runner.llm.state().running == 0)
    state = server.runner.llm.state()
    assert state.free_pages == state.pages
    assert [text(ask(client, prompt)) for prompt in PROMPTS] == alone


def test_a_chat_stream_joined_is_the_answer_with_role_first_and_reason_last(client):
    given = {"model": "nano", "messages": QUESTION, "max_tokens": 30, "seed": 5, "temperature": 0.7}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in parts)
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in parts[1:])
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_none_and_ends_with_done(server):
    body = {"messages": QUESTION, "max_tokens": 5, "stream": True}
    lines = [line for line in server.post("/v1/chat/completions", body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])
    assert not any("usage" in json.loads(line[6:]) for line in lines[:-1])


def test_usage_adds_up_and_max_tokens_is_exact(client, server):
    for most in (1, 2, 7, 16):
        answer = ask(client, "def f(", max_tokens=most, extra_headers={"x-request-id": f"most-{most}"})
        assert answer.usage.completion_tokens <= most
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        body = {"prompt": "def f(", "max_tokens": most, "ignore_eos": True, "return_token_ids": True}
        found = server.complete(**body)
        assert found["usage"]["completion_tokens"] == len(found["choices"][0]["token_ids"]) == most
        assert found["choices"][0]["finish_reason"] == "length"


def test_n_answers_are_those_of_n_seeds(client):
    many = client.completions.create(model="nano", prompt=list(PROMPTS[:2]), n=3, seed=40, max_tokens=12, temperature=1)
    each = [text(ask(client, p, seed=40 + i, max_tokens=12, temperature=1)) for p in PROMPTS[:2] for i in range(3)]
    assert [(c.text, c.finish_reason) for c in many.choices] == each
    assert [c.index for c in many.choices] == list(range(6))
    alone = [ask(client, p, max_tokens=12).usage.prompt_tokens for p in PROMPTS[:2]]
    assert many.usage.prompt_tokens == sum(alone)


def test_streams_of_n_answers_are_told_apart_by_index(client):
    given = {"model": "nano", "messages": QUESTION, "n": 3, "seed": 9, "max_tokens": 12, "temperature": 1}
    whole = client.chat.completions.create(**given)
    texts = [""] * 3
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("budget", [0, 16])
def test_a_stop_string_ends_text_tokens_and_logprobs_at_one_place(client, server, budget):
    whole = ask(client, PROMPTS[0], budget, max_tokens=40).choices[0].text
    for start in range(2, len(whole) - 3, 17):
        stop = whole[start : start + 3]
        body = {"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0.8, "seed": 11, "stop": [stop], "logprobs": 0}
        (choice,) = server.complete(**body, tree_budget=budget, return_token_ids=True)["choices"]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])


def test_logprobs_are_there_for_every_token_streamed_or_not(client):
    given = {"model": "nano", "messages": QUESTION, "max_tokens": 20, "seed": 3, "logprobs": True, "top_logprobs": 4}
    whole = client.chat.completions.create(**given)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 4 and token.logprob <= token.top_logprobs[0].logprob + 1e-4 and token.logprob <= 0
    shown = b"".join(bytes(token.bytes) for token in content).decode()
    assert shown.removesuffix("<|im_end|>") == whole.choices[0].message.content
    streamed = []
    for chunk in client.chat.completions.create(**given, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [(t.token, t.bytes) for t in streamed] == [(t.token, t.bytes) for t in content]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_plain_decoding(client, temperature):
    given = {"model": "nano", "messages": QUESTION, "max_tokens": 40, "seed": 6, "temperature": temperature}
    asks = [{**given, "logprobs": True, "top_logprobs": 5, "extra_body": {"tree_budget": budget}} for budget in (0, 16)]
    plain, trees = (client.chat.completions.create(**one) for one in asks)
    places = list(zip(plain.choices[0].logprobs.content, trees.choices[0].logprobs.content, strict=True))
    assert len(places) == plain.usage.completion_tokens > 8
    for one, other in places:
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-2)
        assert [t.logprob for t in one.top_logprobs] == pytest.approx([t.logprob for t in other.top_logprobs], abs=1e-2)


def test_filters_penalties_and_bias_reach_the_engine(client, server):
    greedy = text(ask(client, PROMPTS[0], temperature=0))
    for filtered in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}):
        body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 1, **filtered}
        assert server.complete(**body)["choices"][0]["text"] == greedy[0]
    for penalty in ({"repetition_penalty": 1.5}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        body = {"prompt": PROMPTS[0], "max_tokens": 80, "temperature": 0}
        plain, penalised = (server.complete(**body, **more)["choices"][0]["text"] for more in ({}, penalty))
        assert penalised != plain and penalised[:30] == plain[:30]
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    first = server.complete(**body)["choices"][0]["token_ids"][0]
    assert first not in server.complete(**body, logit_bias={str(first): -100})["choices"][0]["token_ids"]
    forced = server.complete(**body, logit_bias={"65": 100}, ignore_eos=True)["choices"][0]
    assert forced["token_ids"] == [65] * 24


def test_tokens_and_text_go_both_ways(server):
    found = server.post("/tokenize", {"prompt": "def f(x): é世", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "def f(x): é世"}
    chat = server.post("/tokenize", {"messages": QUESTION}).json()
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True}).json()
    assert chat["tokens"] == answer["choices"][0]["prompt_token_ids"]
    same = {"max_tokens": 9, "seed": 2, "prompt": found["tokens"]}
    assert server.complete(**same)["choices"] == server.complete(**{**same, "prompt": "def f(x): é世"})["choices"]


def test_models_are_listed_and_others_are_not_found(client):
    (model,) = client.models.list().data
    assert model.id == "nano" == client.models.retrieve("nano").id and model.max_model_len == 1024
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    assert error.value.code == "model_not_found" and error.value.param == "model"


def test_timings_come_when_asked_for(server):
    (choice,) = server.complete(prompt="def f(", max_tokens=9, ignore_eos=True, timings=True, seed=77)["choices"]
    found = choice["timings"]
    assert found["seed"] == 77 and found["steps"] >= 1 and 1 <= found["accept_length"] <= 8
    assert 0 <= found["queue_ms"] <= found["first_token_ms"] <= found["total_ms"]
    assert set(found["stage_ms"]) == {"draft", "tree", "verify", "accept", "commit"}


def test_the_developer_is_the_system_and_unknown_fields_are_counted(client, server):
    messages = [{"role": "developer", "content": "Be brief."}, *QUESTION]
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    before = server.metric("unknown_fields_total", field="a_field_of_tomorrow")
    given = {"model": "nano", "max_tokens": 9, "seed": 1, "extra_body": {"a_field_of_tomorrow": [1, {"x": None}]}}
    one, other = (client.chat.completions.create(messages=m, **given) for m in (messages, system))
    assert one.choices[0].message.content == other.choices[0].message.content
    assert server.metric("unknown_fields_total", field="a_field_of_tomorrow") == before + 2


def test_metrics_count_what_was_served(server):
    names = ("generation_tokens_total", "prompt_tokens_total", "request_success_total", "e2e_request_latency_seconds_count")
    before = [server.metric(name) for name in names]
    usage = server.complete(prompt=["def f(", "x = "], max_tokens=6, ignore_eos=True)["usage"]
    after = [server.metric(name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [12, usage["prompt_tokens"], 2, 2]
    by_depth = [server.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(7)]
    assert by_depth == sorted(by_depth, reverse=True)
    assert sum(by_depth) == server.metric("spec_decode_num_accepted_tokens_total")
    assert server.metric("tree_nodes_sum") == server.metric("spec_decode_num_draft_tokens_total")
    assert all(server.metric("stage_seconds_total", stage=s) > 0 for s in ("draft", "tree", "verify", "accept", "commit"))


def test_a_slow_reader_gets_everything(server, client):
    given = {"model": "nano", "prompt": "def f(", "max_tokens": 60, "seed": 4, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**given).choices[0].text
    pause, parts = threading.Event(), []
    for chunk in client.completions.create(**given, stream=True):
        parts.append(chunk.choices[0].text)
        pause.wait(0.01)
    assert "".join(parts) == whole
