"""The prefix cache as a client sees it: faster prompts, told in the usage and the metrics, and not another word."""

import pytest

WORDS = ["values", "total", "index", "buffer", "result", "matrix", "vector", "counter", "stack", "queue"]


def prompt(start: int) -> str:
    """A text of some hundred tokens that no other number gives."""
    return "".join(f"{WORDS[(start + i) % 10]}_{start} = {WORDS[(start * i) % 10]}[{i}]\n" for i in range(24))


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("budget", [0, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prompt_is_found_again_and_answered_alike(server, budget, temperature):
    body = {
        "prompt": prompt(11 + budget + int(10 * temperature)), "max_tokens": 24, "temperature": temperature, "seed": 5,
        "tree_budget": budget, "logprobs": 2, "frequency_penalty": 0.3, "return_token_ids": True,
    }  # fmt: skip
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = [server.metric(name) for name in names]
    miss, hit = server.complete(**body), server.complete(**body)
    tokens = miss["usage"]["prompt_tokens"]
    assert cached(miss) == 0 and cached(hit) == (tokens - 1) // 64 * 64 > 64
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * tokens, cached(hit)]
    (one,), (other,) = miss["choices"], hit["choices"]
    assert one["token_ids"] == other["token_ids"] and one["text"] == other["text"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)


def test_the_next_turn_of_a_conversation_finds_the_one_before(server):
    messages = [{"role": "user", "content": prompt(31)}]
    first = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40, "seed": 1}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    body = {"messages": messages, "max_tokens": 20, "seed": 2, "stream": True, "stream_options": {"include_usage": True}}
    lines = server.post("/v1/chat/completions", body).text
    second = server.post("/v1/chat/completions", {k: v for k, v in body.items() if not k.startswith("stream")}).json()
    told = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached(first) < 64 < first["usage"]["prompt_tokens"] // 64 * 64 <= told
    assert '"cached_tokens":' in lines.replace(" ", "")


def test_pages_of_the_cache_are_not_pages_in_use(server):
    server.complete(prompt=prompt(41), max_tokens=4)
    assert server.runner.llm.engine.scheduler.prefix.count > 0
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("num_preemptions_total") == server.runner.llm.state().preemptions
