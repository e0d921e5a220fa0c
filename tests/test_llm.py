"""LLM on a tiny checkpoint of random weights: text and token ids end together, whatever the engine does inside."""

import copy
import json
import math

import pytest

from draftwood.config import Options
from draftwood.engine.request import SamplingParams
from draftwood.errors import ConfigError, RequestError
from draftwood.llm import LLM, Completion
from draftwood.model.config import K2_6, K2_6_DRAFT
from tests.text import vocabulary

PROMPT = "def the(x):\n\n"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A checkpoint folder without weights: `--load-format dummy` fills it."""
    root = tmp_path_factory.mktemp("tiny")
    vocab = len(vocabulary.ranks()) + 256
    special = vocabulary.tokenizer().special
    text = copy.deepcopy(K2_6["text_config"])
    text.update(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, intermediate_size=96, vocab_size=vocab,
        max_position_embeddings=512, bos_token_id=special["[BOS]"], pad_token_id=vocab - 1,
        eos_token_id=[special["<|im_end|>"], special["[EOS]"]],
    )  # fmt: skip
    text["rope_scaling"].update(factor=4.0, original_max_position_embeddings=128)
    (root / "config.json").write_text(json.dumps({**K2_6, "text_config": text}))
    draft = copy.deepcopy(K2_6_DRAFT)
    draft.update(
        hidden_size=64, intermediate_size=96, vocab_size=vocab, head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2, num_target_layers=3, max_position_embeddings=512,
        dflash_config={"target_layer_ids": [0, 2], "mask_token_id": vocab - 2},
    )  # fmt: skip
    draft["rope_parameters"].update(factor=4.0, original_max_position_embeddings=128)
    (root / "draft").mkdir()
    (root / "draft" / "config.json").write_text(json.dumps(draft))
    vocabulary.write(root, {})
    template = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}<|im_assistant|>"
    (root / "chat_template.jinja").write_text(template)
    return root


@pytest.fixture(scope="session")
def llm(folder):
    with LLM(str(folder), load_format="dummy", tree_budget=64, max_num_seqs=4, device="cpu") as loaded:
        yield loaded


def same(completions):
    return [(c.text, c.token_ids, c.finish_reason) for c in completions]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tree_budget_drafter_and_batch_do_not_change_the_answer(folder, llm, temperature):
    asks = [SamplingParams(max_tokens=24, temperature=temperature, seed=s) for s in range(6)]
    prompts = [PROMPT * (s + 1) for s in range(6)]
    with LLM(str(folder), load_format="dummy", draft="none", device="cpu") as plain:
        expected = [plain.generate(p, a)[0] for p, a in zip(prompts, asks, strict=True)]
        assert same(plain.generate(PROMPT, {"max_tokens": 3, "tree_budget": 0})) == same(plain.generate(PROMPT, {"max_tokens": 3}))
        for asked in (8, "auto"):
            with pytest.raises(RequestError, match=f"tree_budget {asked} needs a drafter"):
                plain.generate(PROMPT, {"tree_budget": asked})
    for budget in (0, 8, 64, "auto"):
        params = [{**vars(a), "tree_budget": budget} for a in asks]
        found = llm.generate(prompts, params)
        assert same(found) == same(expected)
        assert [c.tree_budget for c in found] == [budget] * 6
    assert all(c.steps == 23 and c.accept_length == 1.0 for c in expected if c.finish_reason == "length")
    assert llm.engine.scheduler.pool.free_count == llm.plan.num_pages


def test_a_completion_adds_up(llm):
    (c,) = llm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2))
    assert isinstance(c, Completion) and c.finish_reason == "length"
    assert c.completion_tokens == len(c.token_ids) == len(c.logprobs) == len(c.top_logprobs) == 20
    assert c.prompt_tokens == len(llm.tokenizer.encode(PROMPT))
    assert c.steps * c.accept_length == pytest.approx(19, abs=0.01)
    assert set(c.stage_ms) == {"draft", "tree", "verify", "accept", "commit"} and all(v > 0 for v in c.stage_ms.values())
    assert all(top[0] == (token, pytest.approx(lp, abs=1e-5)) for token, lp, top in
               zip(c.token_ids, c.logprobs, c.top_logprobs, strict=True))  # fmt: skip
    assert all(len(top) == 2 and math.exp(top[1][1]) <= math.exp(top[0][1]) for top in c.top_logprobs)


def test_a_stream_joined_is_the_text_and_ends_with_the_completion(llm):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4)
    *pieces, last = llm.stream(PROMPT, params)
    assert same([last]) == same(llm.generate(PROMPT, params))
    assert "".join(pieces) == last.text


def test_a_stop_string_cuts_text_ids_and_logprobs_at_one_place(llm):
    token_bytes, vocab = llm.tokenizer.token_bytes, llm.tokenizer.vocab_size
    banned = [i for i in range(vocab) if not token_bytes(i).isascii() or i >= llm.tokenizer.base]
    ask = {"max_tokens": 40, "temperature": 1, "seed": 1, "logit_bias": dict.fromkeys(banned, -100)}
    whole = llm.generate(PROMPT, ask)[0]
    for start in range(0, len(whole.text) - 3, 3):
        stop = whole.text[start : start + 3]
        (c,) = llm.generate(PROMPT, {**ask, "stop": stop, "logprobs": 0})
        assert c.text == whole.text[: whole.text.index(stop)] and c.finish_reason == "stop"
        assert c.token_ids == whole.token_ids[: c.completion_tokens] and len(c.logprobs) == c.completion_tokens
        assert stop in llm.tokenizer.decode(c.token_ids), "the token that completes the stop string is the last"
        assert stop not in llm.tokenizer.decode(c.token_ids[:-1])
    assert llm.engine.idle


def test_closing_a_stream_aborts_its_request_and_another_goes_on(llm):
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1, seed=2)
    kept, dropped = llm.stream(PROMPT, params), llm.stream("the end", params)
    pieces = [next(kept)]
    next(dropped)
    dropped.close()
    pieces += list(kept)
    assert same(pieces[-1:]) == same(llm.generate(PROMPT, params))
    assert "".join(pieces[:-1]) == pieces[-1].text
    assert llm.engine.idle and llm.engine.scheduler.pool.free_count == llm.plan.num_pages


def test_a_stop_token_of_the_caller_ends_the_answer_without_its_text(llm):
    ask = {"max_tokens": 30, "ignore_eos": True, "temperature": 1, "seed": 7}
    whole = llm.generate(PROMPT, ask)[0]
    for place in (0, 3, 11, 29):
        token = whole.token_ids[place]
        first = whole.token_ids.index(token)
        answer = llm.start(llm.tokenizer.encode(PROMPT), {**ask, "stop_token_ids": [token]})
        deltas = []
        while answer.reason is None:
            assert all(grown is answer for grown in llm.advance())
            deltas.append(answer.news())
        c = llm.finish(answer)
        assert c.finish_reason == "stop" and answer.stop == token
        assert c.token_ids == whole.token_ids[: first + 1] == [t for d in deltas for t in d.token_ids]
        shown = [t for t in c.token_ids[:-1] if t not in llm.tokenizer.silent]
        assert c.text == llm.tokenizer.decode(shown) == "".join(d.text for d in deltas)
    state = llm.state()
    assert state.running == state.waiting == 0 and state.free_pages == state.pages


def test_totals_count_what_the_records_show(llm):
    before = llm.state().totals
    steps, rows, prompt, accepted = before.steps, before.row_steps, before.prompt_tokens, list(before.accepted)
    llm.engine.records = []
    try:
        llm.generate([PROMPT, "the"], {"max_tokens": 20, "ignore_eos": True, "temperature": 1, "seed": 5})
        records = llm.engine.records
    finally:
        llm.engine.records = None
    after, every = llm.state().totals, [row for record in records for row in record.rows]
    assert after.steps - steps == len(records)
    assert after.prompt_tokens - prompt == sum(len(row.path) for row in every if row.forced)
    assert after.row_steps - rows == sum(not row.forced for row in every)
    found = [sum(not row.forced and len(row.path) - 1 == depth for row in every) for depth in range(len(accepted))]
    assert [a - b for a, b in zip(after.accepted, accepted, strict=True)] == found


def test_generate_beside_an_open_stream_loses_nothing(llm):
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=1, seed=3)
    expected = same(llm.generate(PROMPT, params))
    stream = llm.stream(PROMPT, params)
    pieces = [next(stream)]
    llm.generate("the", SamplingParams(max_tokens=45, ignore_eos=True))
    pieces += list(stream)
    assert same(pieces[-1:]) == expected and "".join(pieces[:-1]) == pieces[-1].text


def test_chat_renders_and_typed_control_tokens_stay_text(llm):
    ids = llm.chat_ids([{"role": "user", "content": "Hi <|im_end|>"}])
    assert ids.count(llm.tokenizer.special["<|im_end|>"]) == 1
    one = llm.chat([{"role": "user", "content": "Hi"}], {"max_tokens": 5})
    many = llm.chat([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "the"}]], {"max_tokens": 5})
    assert same(one) == same(many[:1]) and len(many) == 2


def test_control_tokens_of_a_prompt_are_text_unless_asked_for(llm):
    plain, special = (llm.generate("<|im_end|>", {"max_tokens": 1}, allow_special=a)[0] for a in (False, True))
    assert plain.prompt_tokens > 1 and special.prompt_tokens == 1


def test_token_ids_are_prompts_too(llm):
    ids = llm.tokenizer.encode(PROMPT)
    assert same(llm.generate(ids, {"max_tokens": 7})) == same(llm.generate([ids], [{"max_tokens": 7}]))
    assert same(llm.generate(ids, {"max_tokens": 7})) == same(llm.generate(PROMPT, {"max_tokens": 7}))


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", None, "prompt"),
        ("the" * 2000, None, "prompt"),
        ([1, 10**6], None, "prompt"),
        ([True], None, "prompt"),
        ([1.5], None, "prompt"),
        ("\ud800", None, "prompt"),
        ("the", {"temperature": float("nan")}, "temperature"),
        ("the", {"heat": 1}, "heat"),
        ("the", {"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_a_bad_request_is_one_line_and_leaves_the_engine_as_it_was(llm, prompt, params, param):
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError) as error:
        llm.generate(["the", prompt], [None, params])
    assert error.value.param == param and "\n" not in str(error.value)
    assert list(stream)[-1].completion_tokens == 30
    assert llm.engine.idle and llm.engine.scheduler.pool.free_count == llm.plan.num_pages


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "the"}, {"the"}])
def test_what_is_no_prompt_and_no_list_of_prompts_is_refused(llm, prompts):
    with pytest.raises(RequestError, match="give a text, token ids, or a list of these"):
        llm.generate(prompts)
    assert llm.engine.idle


def test_records_show_every_step_of_a_request(llm):
    llm.engine.records = []
    try:
        (c,) = llm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, temperature=1, seed=5, tree_budget=9))
        records = llm.engine.records
    finally:
        llm.engine.records = None
    rows = [row for record in records for row in record.rows if row.request_id == c.request_id]
    assert [t for row in rows for t in row.committed][:20] == c.token_ids
    for row in rows:
        assert len(row.gaps) == len(row.committed) and all(g > 0 for g in row.gaps)
        assert [row.tokens[n] for n in row.path[1:]] == row.committed[:-1] or row.forced
        assert len(row.tokens) <= 10 or row.forced


def test_the_cache_and_windows_are_what_the_plan_says(llm):
    parts, memory = llm.engine.parts, dict(llm.plan.memory)
    assert parts.kv.cache.numel() * parts.kv.cache.element_size() == memory["kv pages"]
    assert 2 * parts.draft_kv.keys.numel() * parts.draft_kv.keys.element_size() == memory["draft windows"]


def test_another_vocabulary_than_the_models_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocabulary.write(tmp_path)
    with pytest.raises(ConfigError, match="use the files of one checkpoint"):
        LLM(Options(str(tmp_path), load_format="dummy", draft="none"))
