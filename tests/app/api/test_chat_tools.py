"""Tools in the chat route, with the ``openai`` SDK: calls in answers, whole and streamed, and in messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from local_server import MODEL, LocalServer
from scripted import scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Zürich?"}]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALLS = f"I look.\n{CALL}\n{CALL.replace('Zürich', 'Bern')}"
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def sdk(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def joined(chunks: list[Any]) -> tuple[str, list[tuple[str, str, str]], str | None]:
    """Content, calls and finish reason of a stream; checks the shape of each piece of a call."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or []:
            if piece.index == len(calls):
                assert (piece.type, piece.function.arguments) == ("function", "")
                calls.append((piece.id, piece.function.name, ""))
            else:
                assert (piece.index, piece.id, piece.function.name) == (len(calls) - 1, None, None)
                calls[-1] = (*calls[-1][:2], calls[-1][2] + piece.function.arguments)
    return content, calls, reason


def test_calls_are_told_from_text(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, CALLS)
    whole = sdk.chat.completions.create(**ASK, tools=[WEATHER, TIME]).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("I look.", "tool_calls")
    calls: list[Any] = whole.message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather", "get_weather"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Zürich"}, {"city": "Bern"}]
    assert len({call.id for call in calls}) == 2
    content, streamed, reason = joined(list(sdk.chat.completions.create(**ASK, tools=[WEATHER], stream=True)))
    assert (content, reason) == ("I look.", "tool_calls")
    assert [call[1:] for call in streamed] == [(c.function.name, c.function.arguments) for c in calls]


def test_the_asynchronous_client_gets_the_same(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, server, CALL)

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(**ASK, tools=[WEATHER], stream=True)
            return [chunk async for chunk in stream]

    content, calls, reason = joined(asyncio.run(ask()))
    assert (content, [call[1] for call in calls], reason) == ("", ["get_weather"], "tool_calls")


def test_every_choice_has_its_own_calls(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, CALL)
    choices = sdk.chat.completions.create(**ASK, tools=[WEATHER], n=2).choices
    assert [len(choice.message.tool_calls or []) for choice in choices] == [1, 1]
    assert choices[0].message.tool_calls != choices[1].message.tool_calls  # their IDs


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TIME]}])
def test_what_is_no_call_of_a_tool_is_text(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    scripted(monkeypatch, server, CALL)
    choice = sdk.chat.completions.create(**ASK, **fields).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_a_call_that_is_cut_short_is_text(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, CALL[:50], "length")
    choice = sdk.chat.completions.create(**ASK, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL[:50], "length")


def test_an_answer_ends_with_its_first_call_where_they_may_not_be_parallel(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, CALLS)
    answer = sdk.chat.completions.create(**ASK, tools=[WEATHER], parallel_tool_calls=False)
    choice = answer.choices[0]
    assert [call.id for call in choice.message.tool_calls or []] != []
    assert len(choice.message.tool_calls or []) == 1
    assert choice.finish_reason == "tool_calls"
    everything = sdk.chat.completions.create(**ASK, tools=[WEATHER])
    assert answer.usage is not None
    assert everything.usage is not None
    assert answer.usage.completion_tokens < everything.usage.completion_tokens


def test_a_named_call_streams_its_arguments(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripted(monkeypatch, server, '{"city": "Zürich"}')
    stream = list(sdk.chat.completions.create(**ASK, tools=[WEATHER], tool_choice=FORCED, stream=True))
    content, calls, reason = joined(stream)
    assert (content, [call[1:] for call in calls]) == ("", [("get_weather", '{"city": "Zürich"}')])
    assert reason == "tool_calls"
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in stream) > 3
    form = script.requests[0].params.structured_output
    assert form is not None
    assert json.loads(form.text) == CITY


def test_required_calls_stream_their_arguments(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "get_time", "arguments": {}}]'
    scripted(monkeypatch, server, text)
    asked: Any = {**ASK, "tools": [WEATHER, TIME], "tool_choice": "required"}
    choice = sdk.chat.completions.create(**asked).choices[0]
    calls: Any = choice.message.tool_calls
    wanted = [("get_weather", '{"city": "Bern"}'), ("get_time", "{}")]
    assert [(call.function.name, call.function.arguments) for call in calls] == wanted
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    _, streamed, _ = joined(list(sdk.chat.completions.create(**asked, stream=True)))
    assert [call[1:] for call in streamed] == wanted


def test_a_whole_exchange_with_a_tool_is_a_prompt(server: LocalServer, sdk: openai.OpenAI) -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    messages: Any = [*ASK["messages"], answer, result]
    one = sdk.chat.completions.create(**ASK, max_tokens=1, tools=[WEATHER]).usage
    all_of_it = sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, tools=[WEATHER]).usage
    assert one is not None
    assert all_of_it is not None
    assert all_of_it.prompt_tokens > one.prompt_tokens + 20


def test_reasoning_is_a_field_of_its_own(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, f"<think>\nHm.\n</think>\n\nYes.{CALL}")
    server.set_options(monkeypatch, reasoning_parser="think")
    body = {**ASK, "tools": [WEATHER]}
    answer = http.post("/v1/chat/completions", json=body).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert len(message["tool_calls"]) == 1
    lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")[:-2]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    thoughts = sum("reasoning_content" in delta for delta in deltas)  # of one token each
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thoughts}


def test_markers_count_even_if_they_are_special_tokens(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, "<|im_start|>Hm.<|im_end|>Yes.")
    monkeypatch.setattr("app.api.tools.reasoning.MARKERS", {"think": ("<|im_start|>", "<|im_end|>")})
    monkeypatch.setattr("app.api.tools.families.REASONING", {"think": ("<|im_start|>", "<|im_end|>")})
    server.set_options(monkeypatch, reasoning_parser="think")
    message = http.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
