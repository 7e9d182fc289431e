from __future__ import annotations

import json
from typing import Any

import pytest

from app.api.chat_messages import ChatMessage
from app.api.errors import ApiError, show
from app.api.openai_types import parse_chat, parse_completion
from app.api.request_body import parse_json_object
from app.api.responses.request import parse_responses
from engine.errors import InvalidRequestError
from engine.request import ModelLimits, validate
from engine.sampling_params import SamplingParams

LIMITS = ModelLimits(vocab_size=100, max_model_len=64, num_blocks=8, block_size=16)
HELLO = [{"role": "user", "content": "hello"}]


def test_completion_defaults_are_openais() -> None:
    request = parse_completion({"prompt": "hello"})
    assert request.prompts == ["hello"]
    assert request.options.params == SamplingParams(max_tokens=16, temperature=1.0)
    assert request.options.model is None
    assert request.options.stop == ()
    assert not request.options.stream


def test_chat_may_use_the_whole_context() -> None:
    assert parse_chat({"messages": HELLO}).options.params.max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1], "b"], [[1], "b"]),
    ],
)
def test_every_form_of_prompt(prompt: Any, wanted: list[Any]) -> None:
    assert parse_completion({"prompt": prompt}).prompts == wanted


def test_every_supported_field_arrives() -> None:
    options = parse_completion(
        {
            "model": "m",
            "prompt": "a",
            "max_tokens": 7,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "seed": -3,
            "stop": ["x", "y", "x"],
            "stop_token_ids": [5, 6],
            "ignore_eos": True,
            "cache_salt": "tenant",
            "user": "u",
            "n": 3,
            "priority": -7,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).options
    assert options.params == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-3,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        n=3,
    )
    assert options.priority == -7
    assert (options.model, options.stop, options.cache_salt) == ("m", ("x", "y"), "tenant")
    assert (options.stream, options.include_usage, options.continuous_usage) == (True, True, True)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_beam_search_arrives(early_stopping: bool | str) -> None:
    body = {
        "messages": HELLO,
        "n": 2,
        "use_beam_search": True,
        "beam_width": 4,
        "length_penalty": 0.6,
        "early_stopping": early_stopping,
        "temperature": 0,
    }
    assert parse_chat(body).options.params == SamplingParams(
        max_tokens=None,
        temperature=0.0,
        n=2,
        use_beam_search=True,
        beam_width=4,
        length_penalty=0.6,
        early_stopping=early_stopping,
    )


def test_best_of_that_is_n_is_no_ranking() -> None:
    assert not parse_completion({"prompt": "a", "n": 2, "best_of": 2, "stream": True}).options.params.ranked
    params = parse_completion({"prompt": "a", "n": 2, "best_of": 3}).options.params
    assert (params.n, params.best_of, params.ranked) == (2, 3, True)


def test_the_newer_name_of_max_tokens_wins() -> None:
    options = parse_chat({"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 9}).options
    assert options.params.max_tokens == 9


def test_null_means_absent_for_any_field() -> None:
    nothing = dict.fromkeys(["temperature", "stop", "seed", "logprobs", "tools", "stream_options", "no_such"])
    assert parse_completion({"prompt": "a", **nothing}) == parse_completion({"prompt": "a"})


@pytest.mark.parametrize(
    "off",
    [
        {"n": 1},
        {"best_of": 1},
        {"use_beam_search": False, "length_penalty": 1, "early_stopping": False, "priority": 0},
        {"echo": False},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0},
        {"logit_bias": {}},
        {"tools": [], "tool_choice": "none"},
        {"top_k": -1, "seed": -1, "logprobs": 0, "stop": "", "functions": []},
        {"stop": ["", ""], "bad_words": [], "chat_template_kwargs": {}, "prompt_logprobs": False},
        {"skip_special_tokens": True, "add_generation_prompt": True, "return_token_ids": False},
        {"response_format": {"type": "text"}},
        {"metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
    ],
)
def test_values_that_mean_off_are_accepted(off: dict[str, Any]) -> None:
    assert parse_chat({"messages": HELLO, **off}) == parse_chat({"messages": HELLO})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "'max_tokens'"),
        ("max_new_tokens", "'max_tokens'"),
        ("max_output_tokens", "'max_tokens'"),
        ("temprature", "'temperature'"),
        ("stop_sequence", "'stop'"),
        ("stop_sequences", "'stop'"),
        ("num_return_sequences", "'n'"),
        ("MAX_TOKENS", "'max_tokens'"),
        ("toolchoice", "'tool_choice'"),
        ("message", "'messages'"),
    ],
)
def test_an_unknown_parameter_is_answered_with_the_likely_one(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": HELLO, name: 1})
    assert caught.value.message == f"{name!r} is not a known parameter; did you mean {meant}?"
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


@pytest.mark.parametrize("name", ["xyzzy", "max_tokens" * 100_000])
def test_an_unknown_parameter_near_none_gets_no_hint(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"is not a known parameter$"):
        parse_chat({"messages": HELLO, name: 1})


def test_a_misspelt_stream_option_is_answered_with_the_likely_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"known stream option; did you mean 'include_usage'\?"):
        parse_chat({"messages": HELLO, "stream": True, "stream_options": {"includes_usage": True}})


def test_text_parts_are_joined_and_developer_is_system() -> None:
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    assert parse_chat({"messages": messages}).messages == [
        ChatMessage("system", "rules"),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "c"),
    ]


OUTPUT = {  # what servers send with an assistant's message, besides its role and content
    "refusal": None,
    "annotations": [{"type": "url_citation"}],
    "audio": {"id": "audio_1"},
    "function_call": None,
    "tool_calls": None,
    "reasoning": "thinking",
    "reasoning_content": "thinking",
    "provider_specific_fields": {"citations": []},
}


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    for content, wanted in (("c", "c"), (None, ""), ("", "")):
        message = {"role": "assistant", "content": content, **OUTPUT}
        for sent in (message, {**message, "tool_calls": [], "refusal": "no"}):
            found = parse_chat({"messages": [*HELLO, sent]}).messages[1]
            assert found == ChatMessage("assistant", wanted, reasoning="thinking")
    assert parse_chat({"messages": [{"role": "assistant"}]}).messages == [ChatMessage("assistant", "")]


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("field", ["refusal", "annotations", "audio", "reasoning_content", "tool_calls"])
def test_only_an_answer_has_what_servers_send(role: str, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"messages\\[0\\].{field} is not supported"):
        parse_chat({"messages": [{"role": role, "content": "a", field: ["x"]}]})


@pytest.mark.parametrize("digits", [100, 4000])
@pytest.mark.parametrize("name", ["seed", "max_tokens", "n", "best_of", "beam_width", "priority"])
def test_no_number_is_echoed_at_length(name: str, digits: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate([1], parse_chat({"messages": HELLO, "n": 1, name: 10**digits}).options.params, LIMITS)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", ["null", "list"]),
        ({"messages": []}, "messages", ["a list of 0", "at least 1"]),
        ({"messages": "hi"}, "messages", ["'hi'"]),
        ({"messages": [5]}, "messages[0]", ["5", "object"]),
        ({"messages": [{"content": "a"}]}, "messages[0].role", ["null", "system", "user", "assistant"]),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", ["'function'"]),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", ["null", "string"]),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", ["a list of 1"]),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content", ["null", "string"]),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", ["1"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            ["'image_url'", "'text'"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            ["null"],
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            ["null", "name and arguments"],
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", ["surrogate", "0"]),
    ],
)
def test_wrong_messages_are_named(body: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(body)
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    "text", ["{", "nope", "[1]", '"a"', "NaN", '{"a": Infinity}', '{"a": 1e999}', '{"a": 1' + "0" * 5000 + "}"]
)
def test_malformed_json_is_a_400(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json_object(text.encode())
    assert (caught.value.fault.status, caught.value.fault.code) == (400, "invalid_json")


def test_bytes_that_are_no_utf8_and_deep_nesting_are_a_400() -> None:
    with pytest.raises(ApiError, match="byte 6"):
        parse_json_object(b'{"a":"\xff"}')
    with pytest.raises(ApiError, match="deep"):
        parse_json_object(b'{"a":' + b"[" * 200_000)


@pytest.mark.parametrize("value", ["x" * 10_000, [1] * 10_000, {"a": [[[]]]}, 10**4000, "\n\ud800", True, None])
def test_values_are_shown_short_and_on_one_line(value: Any) -> None:
    shown = show(value)
    assert len(shown) < 120
    assert "\n" not in shown
    json.dumps(shown).encode()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({str(i): "" for i in range(17)}, "metadata has 17 pairs but at most 16"),
        ({"a" * 65: ""}, "metadata has a key of 65 characters but at most 64"),
        ({"a": "b" * 513}, "metadata.a has 513 characters but at most 512"),
        ({"a": 1}, "metadata.a is 1 but must be a string"),
        ({"a": "\ud800"}, "half of a surrogate pair"),
        ({"\ud800": "a"}, "half of a surrogate pair"),
        (["a"], "metadata is a list of 1 but must be an object of texts"),
    ],
)
def test_metadata_is_as_long_as_openais(metadata: Any, words: str) -> None:
    most = {f"{i:064}": "b" * 512 for i in range(16)}
    for parse, body in (
        (parse_chat, {"messages": HELLO}),
        (parse_completion, {"prompt": "a"}),
        (parse_responses, {"input": "a"}),
    ):
        parse({**body, "metadata": most})
        with pytest.raises(InvalidRequestError) as caught:
            parse({**body, "metadata": metadata})
        assert words in caught.value.message
        assert caught.value.param == "metadata"
