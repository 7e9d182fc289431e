"""Which options of the output are understood, and how the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.openai_types import parse_chat, parse_completion
from app.api.output_options import OutputOptions, TemplateOptions
from engine.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "hi"}]


def test_everything_that_changes_logits_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": 2, "70": -100},
        "allowed_token_ids": [5, 6],
        "bad_words": ["a", "b", "a"],
    }
    for options in (
        parse_completion({"prompt": "a", **fields}).options,
        parse_chat({"messages": HELLO, **fields}).options,
    ):
        params = options.params
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1, 0.5, 1.25)
        assert params.bias == ((5, 2.0), (70, -100.0))
        assert params.allowed_token_ids == (5, 6)
        assert options.output == OutputOptions(bad_words=("a", "b"))


@pytest.mark.parametrize(
    ("fields", "logprobs", "of_prompt", "max_tokens"),
    [
        ({"logprobs": 0}, 0, None, 16),  # the chosen token's alone
        ({"logprobs": 20, "echo": True}, 20, 20, 16),
        ({"logprobs": 1, "echo": True, "max_tokens": 0}, 1, 1, 0),
        ({"echo": True, "max_tokens": 0}, None, 0, 0),
        ({"prompt_logprobs": 7, "echo": True, "logprobs": 2}, 2, 7, 16),
        ({"echo": True}, None, None, 16),
        ({"logprobs": False, "prompt_logprobs": None}, None, None, 16),
    ],
)
def test_log_probabilities_of_completions(
    fields: dict[str, Any], logprobs: int | None, of_prompt: int | None, max_tokens: int
) -> None:
    params = parse_completion({"prompt": "a", **fields}).options.params
    assert (params.logprobs, params.prompt_logprobs, params.max_tokens) == (logprobs, of_prompt, max_tokens)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20), ({"top_logprobs": 0}, None)],
)
def test_log_probabilities_of_chats(fields: dict[str, Any], logprobs: int | None) -> None:
    assert parse_chat({"messages": HELLO, **fields}).options.params.logprobs == logprobs


def test_the_template_is_told() -> None:
    asked = parse_chat({"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False, "x": None}})
    assert asked.template == TemplateOptions(variables=(("enable_thinking", False), ("x", None)))
    assert parse_chat({"messages": HELLO, "continue_final_message": True}).template == TemplateOptions(
        False, True
    )


COMPLETION_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "logprobs", "21 but must be an integer between 0 and 20"),
    ({"logprobs": True}, "logprobs", "true but must be an integer"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "only whole responses"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 0, "echo": True, "best_of": 2}, "max_tokens", "nothing to rank"),
    ({"presence_penalty": 2.1}, "presence_penalty", "at least -2 and at most 2"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "a number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01 and at most 100"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1025 entries but at most 1024"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "at least -100 and at most 100"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": [5]}, "logit_bias", "an object"),
    ({"bad_words": ["a"] * 129}, "bad_words", "129 entries but at most 128"),
    ({"bad_words": [""]}, "bad_words", "1 to 64"),
    ({"bad_words": ["a" * 65]}, "bad_words", "65 characters"),
    ({"bad_words": "a"}, "bad_words", "a list of strings"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "a token id"),
    ({"allowed_token_ids": [0] * (2**18 + 1)}, "allowed_token_ids", "at most 262144"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "not supported"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "beam search"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty", "beam search"),
]
CHAT_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"echo": True}, "echo", "not supported"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "only do one"),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs", "a string, a number"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "not a variable name"),
    ({"chat_template_kwargs": {"a": "x" * 1025}}, "chat_template_kwargs", "at most 1024"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs", "at most 32"),
]


@pytest.mark.parametrize(("fields", "param", "words"), COMPLETION_FAULTS, ids=range(len(COMPLETION_FAULTS)))
def test_faults_of_completions_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({"prompt": "a", **fields})
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_FAULTS, ids=range(len(CHAT_FAULTS)))
def test_faults_of_chats_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": HELLO, **fields})
    assert caught.value.param == param
    assert words in caught.value.message
