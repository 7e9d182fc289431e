"""``/v1/responses`` with the ``openai`` SDK: whole, streamed, with tools, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import openai.types.responses as sdk_types
import pydantic
import pytest
from local_server import MODEL, LocalServer, wait_until
from scripted import scripted

from app.api.answers import Answer
from app.api.choices import TextDelta, TokenDetails
from app.api.errors import ApiFault
from app.api.responses.reply import ResponsesReply
from app.api.responses.request import MAX_ECHO_BYTES, VALUE_BYTES, parse_responses
from app.api.tools.parts import CallDelta
from app.api.usage import Usage
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from engine.errors import InvalidRequestError

CAPITAL: Any = {
    "model": MODEL,
    "instructions": "You are a helpful assistant.",
    "input": "What is the capital of France?",
    "temperature": 0,
}
ANSWER = "The capital of France is Paris."
TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
def sdk(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_the_chat_routes(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(**CAPITAL, metadata={"a": "b"})
    assert (response.output_text, response.status, response.object) == (ANSWER, "completed", "response")
    assert response.id.startswith("resp_")
    assert (response.instructions, response.metadata) == (CAPITAL["instructions"], {"a": "b"})
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (27, 8)
    assert response.usage.total_tokens == 35
    chat = sdk.chat.completions.create(
        model=MODEL,
        temperature=0,
        messages=[
            {"role": "system", "content": CAPITAL["instructions"]},
            {"role": "user", "content": CAPITAL["input"]},
        ],
    )
    assert chat.usage is not None
    assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == (ANSWER, 27)


def test_events_come_in_openais_order(sdk: openai.OpenAI) -> None:
    events = list(sdk.responses.create(**CAPITAL, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 3
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 8


def test_the_sdks_own_stream_and_the_asynchronous_client(server: LocalServer, sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(**CAPITAL) as stream:
        assert stream.get_final_response().output_text == ANSWER

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return (await client.responses.create(**CAPITAL)).output_text

    assert asyncio.run(ask()) == ANSWER


def test_an_answer_that_is_cut_short_is_incomplete(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(**CAPITAL, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    *_, last = sdk.responses.create(**CAPITAL, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"


def test_reasoning_text_and_calls_are_items(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, f"<think>Hm.</think>I call.{CALL}{CALL}")
    server.set_options(monkeypatch, reasoning_parser="think")
    whole = sdk.responses.create(**CAPITAL, tools=[TOOL])
    events = list(sdk.responses.create(**CAPITAL, tools=[TOOL], stream=True))
    last = events[-1]
    assert last.type == "response.completed"
    for response in (whole, last.response):
        thought, message, *calls = response.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert thought.content[0].text == "Hm."
        assert message.type == "message"
        assert response.output_text == "I call."
        assert [call.type for call in calls] == ["function_call", "function_call"]
        assert [json.loads(call.arguments) for call in calls if call.type == "function_call"] == [{"x": 1}] * 2
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in last.response.output]
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert {piece.item_id for piece in pieces} == set(added[2:])


def test_a_whole_exchange_may_be_sent_back(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        scripted(patch, server, f"<think>Hm.</think>I call.{CALL}")
        server.set_options(patch, reasoning_parser="think")
        first = sdk.responses.create(**CAPITAL, tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    sent = [
        {"role": "user", "content": "Call f."},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    chat = parse_responses({"input": sent}).chat
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    answer = chat.messages[1]
    assert (answer.reasoning, answer.content, answer.tool_calls[0].id) == ("Hm.", "I call.", call.call_id)
    items: Any = sent
    again = sdk.responses.create(model=MODEL, input=items, tools=[TOOL], max_output_tokens=4)
    assert again.status in ("incomplete", "completed")


def test_each_text_has_the_log_probabilities_of_its_tokens(sdk: openai.OpenAI) -> None:
    asked: Any = {**CAPITAL, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = sdk.responses.create(**asked)
    assert (whole.output_text, whole.top_logprobs) == (ANSWER, 2)
    part = whole.output[0].content[0]  # type: ignore[union-attr, index]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == ANSWER
    messages = [
        {"role": "system", "content": CAPITAL["instructions"]},
        {"role": "user", "content": CAPITAL["input"]},
    ]
    same: Any = {"model": MODEL, "messages": messages, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    chat = sdk.chat.completions.create(**same).choices[0].logprobs
    assert chat is not None
    assert chat.content is not None
    assert [entry.to_dict() for entry in part.logprobs] == [entry.to_dict() for entry in chat.content[:-1]]
    events = list(sdk.responses.create(**asked, stream=True))
    sent = [
        entry.to_dict()
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert sent == [entry.to_dict() for entry in done.logprobs] == [e.to_dict() for e in part.logprobs]


def test_only_tokens_of_texts_are_described() -> None:
    def known(*texts: str) -> list[str]:
        details = [TokenDetails((i,)) for i in range(len(texts))]
        answer = Answer()
        for text, detail in zip(texts, details, strict=True):
            kind, _, piece = text.partition(":")
            call = CallDelta(0, "c", "f", piece) if kind == "call" else None
            delta = TextDelta(0, "", None, 0, 0, call=call, details=detail)
            setattr(delta, "reasoning" if kind == "reasoning" else "text", "" if call else piece)
            answer.add(delta)
        return [
            f"{block.kind}:{[token for detail in block.details for token in detail.token_ids]}"
            for block in answer.blocks
        ]

    # A character in two tokens; a marker before reasoning and one after it; a call after a held token; the end.
    assert known("text:", "text:é", "text:") == ["text:[0, 1]"]
    assert known("text:", "reasoning:Hm", "text:", "text:Yes") == ["reasoning:[]", "text:[3]"]
    assert known("text:I", "text:", "call:{}", "text:so") == ["text:[0]", "call:[]", "text:[3]"]


class Light(pydantic.BaseModel):
    on: bool


def test_the_text_has_the_form_that_is_asked_for(sdk: openai.OpenAI) -> None:
    sampled: Any = {**CAPITAL, "temperature": 1, "extra_body": {"seed": 1}}
    response = sdk.responses.parse(**sampled, text_format=Light, max_output_tokens=60)
    assert response.output_parsed is not None
    assert isinstance(response.output_parsed.on, bool)


def filled(*types: Any, **own: Any) -> dict[str, Any]:
    """An object with each field of the SDK's ``types``, those of requests and of answers."""
    names = [
        name
        for one in types
        for name in getattr(one, "model_fields", None) or one.__required_keys__ | one.__optional_keys__
    ]
    return {**dict.fromkeys(names, "x"), **own}


def test_every_field_of_the_sdks_types_is_taken() -> None:
    text = [
        filled(sdk_types.ResponseInputTextParam, type="input_text", text="a"),
        filled(sdk_types.ResponseInputTextContentParam, type="input_text", text="a"),
    ]
    answer = [
        filled(
            sdk_types.ResponseOutputTextParam,
            sdk_types.ParsedResponseOutputText,
            type="output_text",
            text="b",
        ),
        filled(sdk_types.ResponseOutputRefusalParam, sdk_types.ResponseOutputRefusal, type="refusal"),
    ]
    thoughts = [{"type": "reasoning_text", "text": "c"}]
    items = [
        filled(
            sdk_types.EasyInputMessageParam,
            sdk_types.response_input_item_param.Message,
            type="message",
            role="user",
            content=text,
        ),
        filled(sdk_types.ResponseReasoningItemParam, sdk_types.ResponseReasoningItem, type="reasoning")
        | {"content": thoughts},
        filled(
            sdk_types.ResponseOutputMessageParam,
            sdk_types.ParsedResponseOutputMessage,
            type="message",
            role="assistant",
            content=answer,
        ),
        filled(
            sdk_types.ResponseFunctionToolCallParam,
            sdk_types.ParsedResponseFunctionToolCall,
            sdk_types.ResponseFunctionToolCallItem,
            type="function_call",
            call_id="1",
        ),
        filled(
            sdk_types.response_input_item_param.FunctionCallOutput,
            sdk_types.ResponseFunctionToolCallOutputItem,
            type="function_call_output",
            call_id="1",
            output=text,
        ),
    ]
    called = filled(sdk_types.ToolChoiceFunctionParam, type="function", name="f")
    body: dict[str, Any] = {
        "input": items,
        "tools": [filled(sdk_types.FunctionToolParam, **TOOL)],
        "tool_choice": filled(
            sdk_types.ToolChoiceAllowedParam, type="allowed_tools", mode="auto", tools=[called]
        ),
        "reasoning": filled(openai.types.shared_params.Reasoning),
    }
    chat = parse_responses(body).chat
    assert [(m.role, m.content, m.reasoning) for m in chat.messages] == [
        ("user", "a\na", ""), ("assistant", "b\nx", "c"), ("tool", "a\na", ""),
    ]  # fmt: skip
    assert [tool.name for tool in chat.tools.tools] == ["f"]
    assert parse_responses({**body, "tool_choice": called}).chat.tools.named == "f"
    for of_form in ({"type": "text"}, {"type": "json_object"}, {"schema": {}, "strict": True, "name": "n"}):
        form = filled(sdk_types.ResponseFormatTextJSONSchemaConfigParam, **{"type": "json_schema", **of_form})
        parse_responses({"input": "a", "text": filled(sdk_types.ResponseTextConfigParam, format=form)})


def test_fields_that_agents_send_are_taken() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "b", "index": 0, "id": "1", "extras": {}}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": None,
            "encrypted_content": "gAAAA",
        },
        {"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}", "call_id": "1", "index": 1},
        {"type": "function_call_output", "call_id": "1", "output": "c", "is_error": False, "success": True},
    ]
    body = {
        "input": items,
        "instructions": "i",
        "tools": [{**TOOL, "description": "d", "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "service_tier": "auto",
        "metadata": {"user": "u", "users": "v"},
    }
    found = parse_responses(body)
    assert [message.role for message in found.chat.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert json.loads(found.echo)["metadata"] == {"user": "u", "users": "v"}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("previous_response_id", "resp_1", "stores no responses; send the whole conversation in input"),
        ("conversation", "conv_1", "stores no responses"),
        ("background", True, "stores no responses"),
        ("store", "yes", "store is 'yes'"),
        ("include", ["no_such.results"], "include has 'no_such.results', which is not known"),
        ("include", "a", "include is 'a' but must be a list of strings"),
        ("include", [["a"]], "include has a list of 1, which is not known"),
        ("top_logprobs", 3, "top_logprobs is 3 but include does not have 'message.output_text.logprobs'"),
        ("top_logprobs", 10**100, "top_logprobs is an integer of 333 bits but include does not have"),
        ("top_logprobs", -1, "top_logprobs is -1"),
        ("stream_options", 1, "stream_options is 1"),
        ("stream_options", {"include_usage": True}, "stream_options is only allowed with stream true"),
        ("stream_options", {"continuous_usage_stats": True}, "the last event has the usage"),
        ("truncation", "most", "truncation is 'most' but must be 'auto' or 'disabled'"),
        ("background_options", {"completion_window": "2h"}, "cannot answer later"),
        ("no_such", 1, "'no_such' is not a known parameter"),
        ("max_tokens", 5, "did you mean 'max_output_tokens'?"),
        ("input", [], "input is a list of 0 but must be a string or a list of at least 1 item"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input[0].content[0] is 'input_image'",
        ),
        ("input", [{"type": "item_reference", "id": "a"}], "input[0] is 'item_reference'"),
        ("input", [{"role": "tool", "content": "a"}], "input[0].role is 'tool'"),
        (
            "input",
            [{"type": "function_call", "name": "f", "arguments": "{}"}],
            "input[0].call_id is missing or null",
        ),
        ("input", [{"type": "reasoning", "content": 1}], "input[0].content is 1"),
        ("instructions", 1, "instructions is 1"),
        ("max_output_tokens", 0, "max_output_tokens is 0"),
        ("tools", [{"type": "web_search"}], "tools[0] is 'web_search'"),
        ("tools", {}, "tools is an object"),
        ("tool_choice", {"type": "mcp"}, "tool_choice is 'mcp'"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": 1}, "tool_choice.tools is 1"),
        ("text", {"format": {"type": "xml"}}, "text.format is 'xml'"),
        ("text", 1, "text is 1"),
        ("reasoning", 1, "reasoning is 1"),
        ("reasoning", {"effort": [1]}, "reasoning.effort is a list of 1 but must be a string"),
        ("reasoning", {"summary": "a" * 65}, "reasoning.summary has 65 characters but at most 64"),
        ("metadata", {"a": {}}, "metadata.a is an object but must be a string"),
        pytest.param(
            "instructions",
            "a" * MAX_ECHO_BYTES,
            "and instructions is the longest; put long text in input",
            id="long instructions",
        ),
        pytest.param(
            "instructions",
            "\u4e2d" * (MAX_ECHO_BYTES // 6),
            "and instructions is the longest",
            id="escaped instructions",
        ),
        ("tools", [{**TOOL, "output_schema": {"a": "b" * MAX_ECHO_BYTES}}], "and tools is the longest"),
        (
            "tools",
            [{**TOOL, "output_schema": [1] * (MAX_ECHO_BYTES // VALUE_BYTES)}],
            "and tools is the longest",
        ),
        ("tools", [{**TOOL, "allowed_callers": [[1] * 1000] * 200}], "and tools is the longest"),
        ("temperature", 3, "temperature is 3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_responses({"input": "a", field: value})
    assert words in caught.value.message
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


def test_errors_are_openais(http: httpx.Client) -> None:
    error = http.post("/v1/responses", json={"input": "a", "previous_response_id": "resp_1"})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "previous_response_id"
    assert http.post("/v1/responses", json={"input": "a", "model": "other"}).status_code == 404


def test_an_error_after_the_first_event_fails_the_response(
    server: LocalServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(request: GenerateRequest) -> Any:
        yield Delta((504,), None, 0, 0)
        raise GenerationError("broken")

    monkeypatch.setattr(server.client, "generate", generate)
    *_, last = sdk.responses.create(**CAPITAL, stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "broken"
    wait_until(lambda: server.service.num_live == 0)


def test_what_a_response_repeats_is_encoded_once_and_the_same_everywhere(
    sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings: list[object] = []
    dumps = json.dumps

    def noted(value: Any, **options: Any) -> str:
        encodings.append(value)
        return dumps(value, **options)

    asked: Any = {
        **CAPITAL,
        "instructions": "\u2028\u00e9",
        "metadata": {"a": "b"},
        "tools": [TOOL],
        "user": "me",
    }
    asked["reasoning"] = {"effort": "low"}
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", noted)
        request = parse_responses({**asked, "stream": True})
        reply = ResponsesReply("id", "m", request.echo)
        sent = reply.delta(TextDelta(0, "a", None, 1, 0), Usage()) + reply.end(Usage())
    assert dumps(encodings).count("\\u2028") == 1
    assert "\u2028" not in sent.decode()  # some clients take it for the end of a line
    responses = [json.loads(line[6:]).get("response") for line in sent.decode().split("\n") if "data: " in line]
    whole = sdk.responses.create(**asked, max_output_tokens=1).to_dict()
    wanted = {name: asked[name] for name in ("instructions", "metadata", "tools", "user")}
    wanted["reasoning"] = {"effort": "low", "summary": None}
    found = [response for response in (*responses, whole) if response is not None]
    assert len(found) == 4
    for response in found:
        assert {name: response[name] for name in wanted} == wanted
        assert (response["object"], response["store"]) == ("response", False)


@pytest.mark.parametrize("begun", [False, True])
def test_an_error_has_the_events_before_it(begun: bool) -> None:
    """The SDK reads no event before ``response.created``."""
    reply = ResponsesReply("id", "m", b'{"store":false}')
    sent = reply.delta(TextDelta(0, "a", None, 1, 0), Usage()) if begun else b""
    sent += reply.error(ApiFault(503, "no engine", "service_unavailable_error", code="unavailable"))
    stream = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=sent)
    transport = httpx.MockTransport(lambda request: stream)
    with (
        httpx.Client(transport=transport) as http,
        openai.OpenAI(api_key="x", base_url="http://t/v1", http_client=http, max_retries=0) as client,
        client.responses.stream(model="m", input="hi") as events,
    ):
        found = list(events)
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    last = found[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "no engine"
    assert len(found) == (6 if begun else 3)
