"""What clients of today's SDKs may set is taken, whether it has an effect here or not."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from local_server import CONTEXT, MODEL, POOL, LocalServer

from app.api.openai_types import ChatRequest, parse_chat
from app.api.responses.request import parse_responses
from engine.errors import InvalidRequestError

CAPITAL: Any = "What is the capital of France?"
SYSTEM: Any = "You are a helpful assistant."
ANSWER = "The capital of France is Paris."


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def test_openais_chat(server: LocalServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": SYSTEM}, {"role": "user", "content": CAPITAL}],
            temperature=0,
            max_completion_tokens=20,
            modalities=["text"],
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            prediction={"type": "content", "content": "The capital"},
            reasoning_effort="none",
            verbosity="low",
            safety_identifier="me",
            prompt_cache_key="capital",
            prompt_cache_retention="24h",
            prompt_cache_options={"mode": "explicit"},
            stream_options=None,
        )
        pieces = sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": CAPITAL}],
            temperature=0,
            store=False,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False},
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert answer.choices[0].message.content == text == ANSWER


def test_openais_responses(server: LocalServer) -> None:
    options: Any = {
        "model": MODEL,
        "instructions": SYSTEM,
        "temperature": 0,
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "truncation": "auto",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "parallel_tool_calls": False,
        "max_tool_calls": 1,
        "prompt_cache_options": {"mode": "explicit"},
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.responses.create(input=CAPITAL, **options)
        assert (answer.output_text, answer.truncation, answer.to_dict()["store"]) == (ANSWER, "auto", False)
        long = sdk.responses.create(input="a " * CONTEXT, max_output_tokens=2, **options)
    assert long.usage is not None
    assert long.usage.input_tokens == POOL - 2


def test_anthropics_messages(server: LocalServer) -> None:
    import anthropic  # takes a second and a half, which only the worker that runs this file should spend

    cached: Any = {"type": "ephemeral"}
    asked: Any = {
        "model": MODEL,
        "max_tokens": 20,
        "extra_body": {"temperature": 0},
        "system": [{"type": "text", "text": SYSTEM, "cache_control": cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": CAPITAL, "cache_control": cached}]}],
        "metadata": {"user_id": "me"},
        "service_tier": "standard_only",
        "cache_control": cached,
        "output_config": {"effort": "low"},
        "user_profile_id": "me",
    }
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        for thinking in ("disabled", "adaptive", "between_tools"):
            answer = sdk.messages.create(**asked, thinking={"type": thinking})
            assert answer.content[0].text == ANSWER  # type: ignore[union-attr]
        answer = sdk.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        assert answer.stop_reason == "end_turn"
        beta = sdk.beta.messages.create(**asked, betas=["interleaved-thinking-2025-05-14"])
    assert beta.content[0].text == ANSWER  # type: ignore[union-attr]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"messages": [{"role": "user", "content": "a"}], **fields})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_told_of_allowed_tools_alone(mode: str) -> None:
    tools = [tool("a"), tool("b"), tool("c")]
    named = [{"type": "function", "function": {"name": name}} for name in ("c", "a")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    assert chat(tools=tools, tool_choice=allowed) == chat(tools=[tools[0], tools[2]], tool_choice=mode)
    flat = [{"type": "function", **entry["function"]} for entry in tools]
    there = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in "ca"]}
    response = parse_responses({"input": "a", "tools": flat, "tool_choice": there})
    assert response.chat.tools == chat(tools=tools, tool_choice=allowed).tools


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (None, "allowed_tools is missing or null but must be an object with tools and mode"),
        ({"mode": "none", "tools": [tool("a")]}, "allowed_tools.mode is 'none' but must be"),
        ({"mode": "auto", "tools": []}, "tools is a list of 0 but must be a list of 1 to 128 tools"),
        ({"mode": "auto", "tools": [tool("a")] * 129}, "tools is a list of 129 but must be a list of 1 to 128"),
        ({"mode": "auto", "tools": ["a"]}, "a list of objects that name tools"),
        ({"mode": "auto", "tools": [tool("b")]}, "names 'b', which is not in tools"),
    ],
)
def test_wrong_allowed_tools_are_named(allowed: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        chat(tools=[tool("a")], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"format": "wav", "voice": "alloy"}),
        ("moderation", {"model": "omni-moderation-latest"}),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
        ("stream_options", {"include_obfuscation": True}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not supported") as caught:
        chat(stream=True, **{field: value})
    assert caught.value.code == "unsupported_parameter"
