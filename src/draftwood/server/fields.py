"""Which fields a request may have: served ones are in `protocol`; here are those that are known but not served.

A known field with a neutral value changes nothing and is accepted; any other value is refused by name. Unknown fields
are accepted and counted, so that a client's own extras do not break it and yet are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from draftwood.errors import RequestError

# Labels and hints of the caller that could not change an answer.
LABELS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
    }
)

# Known to OpenAI's API or to vLLM's: what would change nothing, and what to do instead.
_SHARED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "ask for n answers"),
    "store": ((False,), "nothing is stored here"),
    "service_tier": (("auto", "default"), "leave it out"),
    "use_beam_search": ((False,), "leave it out"),
    "length_penalty": ((1,), "leave it out"),
    "early_stopping": ((False,), "leave it out"),
    "prompt_logprobs": ((False,), "leave it out"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use logit_bias"),
    "include_stop_str_in_output": ((False,), "leave it out"),
    "skip_special_tokens": ((True,), "leave it out"),
    "spaces_between_special_tokens": ((True, False), "leave it out"),
    "add_special_tokens": ((True, False), "leave it out"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "priority": ((0,), "leave it out"),
    "typical_p": ((1,), "leave it out"),
    "top_a": ((0,), "leave it out"),
    "tfs_z": ((1,), "leave it out"),
    "mirostat": ((0,), "leave it out"),
    "mirostat_mode": ((0,), "leave it out"),
    "cache_salt": ((), "leave it out"),
    "kv_transfer_params": ((), "leave it out"),
    "vllm_xargs": (({},), "leave it out"),
    "logits_processors": (([],), "use logit_bias"),
    "mm_processor_kwargs": (({},), "only text is supported"),
    "structured_outputs": ((), "use response_format"),
    "guided_json": ((), "use response_format"),
    "guided_regex": ((), "use response_format"),
    "guided_choice": ((), "use response_format"),
    "guided_grammar": ((), "use response_format"),
}
CHAT = _SHARED | {
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "prediction": ((), "drafts come from the drafter"),
    "web_search_options": ((), "leave it out"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "verbosity": (("medium",), "leave it out"),
    "chat_template": ((), "the checkpoint's template is used"),
    "continue_final_message": ((False,), "render the prompt and use /v1/completions"),
    "echo": ((False,), "leave it out"),
    "documents": (([],), "put them into messages"),
    "separate_reasoning": ((True,), "leave it out"),
    "include_reasoning": ((True,), "leave it out"),
    "thinking_token_budget": ((), "leave it out"),
}
COMPLETION = _SHARED | {
    "echo": ((False,), "leave it out"),
    "suffix": (("",), "leave it out"),
}


def unknown(extra: Mapping[str, Any], known: Mapping[str, tuple[tuple[Any, ...], str]]) -> list[str]:
    """Return the names nobody knows. Raises RequestError for a known field whose value would change the answer."""
    names = []
    for name, value in extra.items():
        if name in known:
            neutral, instead = known[name]
            if value is not None and not _among(value, neutral):
                raise RequestError(f"{name} is not supported; {instead}", name, code="unsupported_parameter")
        elif name not in LABELS:
            names.append(name)
    return names


def _among(value: Any, neutral: Iterable[Any]) -> bool:
    """As `in`, but True is no 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
