"""``/v1/messages`` with the ``anthropic`` SDK: whole, streamed, with tools, and errors in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from local_server import MODEL, LocalServer
from scripted import scripted

from app.api.authentication import Gate
from app.api.keys import KeyFile, digest_of
from app.api.messages.request import parse_messages_request
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    import anthropic  # takes a second and a half, which only the worker that runs this file should spend

CAPITAL: Any = {
    "model": MODEL,
    "max_tokens": 20,
    "system": "You are a helpful assistant.",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "extra_body": {"temperature": 0},
}
HTTP: Any = {**{name: value for name, value in CAPITAL.items() if name != "extra_body"}, "temperature": 0}
ANSWER = "The capital of France is Paris."
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL: Any = {"name": "f", "description": "d", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
HELLO = {"role": "user", "content": "a"}


@pytest.fixture
def sdk(server: LocalServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_the_chat_routes(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(**CAPITAL)
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == (ANSWER, "end_turn", None)
    usage = message.usage
    assert usage.cache_read_input_tokens is not None
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (27, 8)
    assert message.id.startswith("msg_")
    again = sdk.messages.create(**CAPITAL).usage
    assert (again.input_tokens, again.cache_read_input_tokens) == (11, 16)


def test_events_come_in_anthropics_order(sdk: anthropic.Anthropic) -> None:
    events = list(sdk.messages.create(**CAPITAL, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 3
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    with sdk.messages.stream(**CAPITAL) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 8)


def test_the_asynchronous_client_gets_the_same(server: LocalServer) -> None:
    import anthropic

    async def ask() -> Any:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none")
        async with client, client.messages.stream(**CAPITAL) as stream:
            return await stream.get_final_text()

    assert asyncio.run(ask()) == ANSWER


def test_reasons_to_stop_are_anthropics(sdk: anthropic.Anthropic) -> None:
    cut = sdk.messages.create(**{**CAPITAL, "max_tokens": 3})
    assert cut.stop_reason == "max_tokens"
    stopped = sdk.messages.create(**CAPITAL, stop_sequences=["no", " France"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " France")
    assert stopped.content[0].text == "The capital of"  # type: ignore[union-attr]
    with sdk.messages.stream(**CAPITAL, stop_sequences=[" France"]) as stream:
        assert stream.get_final_message().stop_sequence == " France"


def test_thinking_text_and_calls_are_blocks(
    server: LocalServer, sdk: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, server, f"<think>Hm.</think>I call.{CALL}{CALL}")
    server.set_options(monkeypatch, reasoning_parser="think")
    whole = sdk.messages.create(**CAPITAL, tools=[TOOL])
    with sdk.messages.stream(**CAPITAL, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, said, *calls = message.content
        assert thought.type == "thinking"
        assert said.type == "text"
        assert (thought.thinking, said.text) == ("Hm.", "I call.")
        assert [call.type for call in calls] == ["tool_use", "tool_use"]
        assert [call.input for call in calls if call.type == "tool_use"] == [{"x": 1}] * 2
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("arguments", ['{"x": 1e999, "y": "\\ud800"}', '{"x": 1'])
def test_odd_arguments_break_no_answer(
    server: LocalServer, sdk: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    scripted(monkeypatch, server, arguments, "length")
    message = sdk.messages.create(**CAPITAL, tools=[TOOL], tool_choice={"type": "tool", "name": "f"})
    (block,) = message.content
    assert block.type == "tool_use"
    assert isinstance(block.input, dict)
    assert message.stop_reason == "max_tokens"


def test_the_text_has_the_form_that_is_asked_for(sdk: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    form: Any = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    message = sdk.messages.create(**{**CAPITAL, "max_tokens": 60}, output_config=form)
    assert isinstance(json.loads(message.content[0].text)["on"], bool)  # type: ignore[union-attr]


def test_a_choice_of_tools_is_the_chat_routes() -> None:
    fields = {"max_tokens": 1, "messages": [HELLO], "tools": [TOOL]}
    for choice, wanted in (
        ({"type": "auto"}, ("auto", "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", "", False)),
        ({"type": "tool", "name": "f"}, ("named", "f", True)),
        ({"type": "none"}, ("none", "", True)),
    ):
        use = parse_messages_request({**fields, "tool_choice": choice}).tools
        assert (use.choice, use.named, use.parallel) == wanted


def test_blocks_become_messages_and_results_of_tools() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}]},
                {"type": "tool_result", "tool_use_id": "2"},
                {"type": "text", "text": "d"},
                {"type": "text", "text": "e"},
            ],
        },
    ]
    body = {"max_tokens": 1, "messages": messages, "system": [{"type": "text", "text": "s"}]}
    found = parse_messages_request(body).messages
    assert [(m.role, m.content) for m in found] == [
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("tool", "c"), ("tool", ""), ("user", "d\ne"),
    ]  # fmt: skip
    assert (found[2].reasoning, found[2].tool_calls[0].arguments) == ("Hm.", '{"x": "é"}')
    assert [m.tool_call_id for m in found[3:5]] == ["1", "2"]


def test_a_last_message_of_the_assistant_is_continued(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    begun: Any = [*CAPITAL["messages"], {"role": "assistant", "content": "The capital of France"}]
    message = sdk.messages.create(**{**CAPITAL, "messages": begun})
    assert message.content[0].text == " is Paris."  # type: ignore[union-attr]
    counted = sdk.messages.count_tokens(model=MODEL, system=CAPITAL["system"], messages=begun)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    for last, continued in ((HELLO, False), (call, False), (begun[-1], True)):
        found = parse_messages_request({"max_tokens": 1, "messages": [HELLO, last]}).template
        assert (found.continue_final_message, found.add_generation_prompt) == (continued, not continued)


def filled(*types: str, **own: Any) -> dict[str, Any]:
    """An object with each field of the SDK's types of these names, its preview's types included."""
    from anthropic import types as stable
    from anthropic.types import beta as preview

    found = [getattr(stable, name, None) for name in types]
    found += [getattr(preview, f"Beta{name}", None) for name in types]
    names = [
        name
        for one in filter(None, found)
        for name in getattr(one, "model_fields", None) or one.__required_keys__ | one.__optional_keys__
    ]
    assert names
    return {**dict.fromkeys(names, "x"), **own}


def test_every_field_of_the_sdks_types_is_taken() -> None:
    a = filled("TextBlockParam", "TextBlock", "ParsedTextBlock", type="text", text="a")
    messages = [
        {"role": "user", "content": [a]},
        filled("Message", role="assistant")  # an answer, sent back whole
        | {
            "content": [
                filled("ThinkingBlockParam", "ThinkingBlock", type="thinking", thinking="b"),
                filled("RedactedThinkingBlockParam", "RedactedThinkingBlock", type="redacted_thinking"),
                filled("ToolUseBlockParam", "ToolUseBlock", type="tool_use", id="1", input={}),
                a,
            ]
        },
        {
            "role": "user",
            "content": [
                filled("ToolResultBlockParam", type="tool_result", tool_use_id="1", content=[a]),
            ],
        },
    ]
    choices = {
        "auto": filled("ToolChoiceAutoParam", type="auto"),
        "required": filled("ToolChoiceAnyParam", type="any"),
        "named": filled("ToolChoiceToolParam", type="tool", name="f"),
        "none": filled("ToolChoiceNoneParam", type="none"),
    }
    for wanted, choice in choices.items():
        body: dict[str, Any] = {
            "max_tokens": 1,
            "system": [a],
            "messages": messages,
            "tools": [{**filled("ToolParam", type="custom"), **TOOL}],
            "tool_choice": {**choice, "disable_parallel_tool_use": True},
            "metadata": filled("MetadataParam"),
        }
        found = parse_messages_request(body)
        assert (found.tools.choice, found.options.user) == (wanted, "x")
        assert [(m.role, m.content, m.reasoning) for m in found.messages] == [
            ("system", "a", ""), ("user", "a", ""), ("assistant", "a", "b"), ("tool", "a", ""),
        ]  # fmt: skip
    form = filled("JSONOutputFormatParam", type="json_schema", schema=SCHEMA)
    for kind in ("Enabled", "Adaptive", "Disabled", "BetweenTools"):
        type_of = {"BetweenTools": "between_tools"}.get(kind, kind.lower())
        thinking = filled(f"ThinkingConfig{kind}Param", type=type_of)
        config = filled("OutputConfigParam", format=form)
        asked = {"max_tokens": 1, "messages": [HELLO], "thinking": thinking, "output_config": config}
        assert parse_messages_request(asked).options.params.structured_output is not None


def test_fields_that_agents_send_are_taken() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}, "index": 1, "partial_json": "{}"}
    body = {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "index": 0, **cached}], "id": "m"},
            {"role": "assistant", "content": [{**call, **cached, "caller": {"type": "direct"}, "extras": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "b", "is_error": True, **cached}
                ],
            },
        ],
        "tools": [{**TOOL, **cached, "strict": True, "eager_input_streaming": True}],
        "metadata": {"user_id": "u", "session_id": "s"},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
    }
    found = parse_messages_request(body)
    assert [message.role for message in found.messages] == ["system", "user", "assistant", "tool"]
    assert found.options.user == "u"


def test_thinking_is_the_templates_variable() -> None:
    for thinking, wanted in (
        ({"type": "enabled", "budget_tokens": 1024}, (("enable_thinking", True),)),
        ({"type": "disabled"}, (("enable_thinking", False),)),
        ({"type": "adaptive"}, ()),
        (None, ()),
    ):
        body = {"max_tokens": 1, "messages": [HELLO], "thinking": thinking}
        assert parse_messages_request(body).template.variables == wanted


def test_tokens_are_counted_as_the_answer_counts_them(sdk: anthropic.Anthropic) -> None:
    asked = {name: CAPITAL[name] for name in ("model", "system", "messages")}
    assert sdk.messages.count_tokens(**asked).input_tokens == 27
    with_tool = sdk.messages.count_tokens(**asked, tools=[TOOL]).input_tokens
    used = sdk.messages.create(**CAPITAL, tools=[TOOL]).usage
    assert with_tool == used.input_tokens + (used.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", None, "max_tokens is missing or null"),
        ("messages", [], "messages is a list of 0"),
        ("messages", [1], "messages[0] is 1"),
        ("messages", [{"role": "tool", "content": "a"}], "messages[0].role is 'tool'"),
        ("messages", [{"role": "user", "content": []}], "messages[0].content is a list of 0"),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0] is 'image'"),
        (
            "messages",
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}],
            "input",
        ),
        (
            "messages",
            [{"role": "user", "content": [{"type": "tool_result"}]}],
            "tool_use_id is missing or null",
        ),
        ("system", 1, "system is 1"),
        ("stop_sequences", "a", "stop_sequences is 'a'"),
        ("stop_sequences", ["a"] * 17, "stop_sequences has 17 entries"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "tools[0] is 'web_search_20250305'"),
        ("tools", [{"name": "f"}], "tools[0].input_schema is missing or null"),
        ("tools", 1, "tools is 1"),
        ("tool_choice", {"type": "some"}, "tool_choice is 'some'"),
        ("mcp_servers", [{"url": "a"}], "calls no other servers"),
        ("thinking", {"type": "deep"}, "thinking is 'deep'"),
        ("output_config", {"format": {"type": "xml"}}, "output_config.format is 'xml'"),
        ("metadata", 1, "metadata is 1"),
        ("no_such", 1, "'no_such' is not a known parameter"),
        ("stop", ["x"], "did you mean 'stop_sequences'?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages_request({"max_tokens": 1, "messages": [HELLO], field: value})
    assert words in caught.value.message


def test_no_name_is_suggested_for_what_messages_lacks() -> None:
    with pytest.raises(InvalidRequestError) as caught:  # Messages has no n; stop_sequences is spelt like it
        parse_messages_request({"max_tokens": 1, "messages": [HELLO], "num_return_sequences": 2})
    assert caught.value.message == "'num_return_sequences' is not a known parameter"


def test_errors_have_anthropics_shape(
    server: LocalServer, sdk: anthropic.Anthropic, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as bad:
        sdk.messages.create(**{**CAPITAL, "messages": []})
    message = "messages is a list of 0 but must be a list of at least 1"
    assert bad.value.body == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**{**CAPITAL, "model": "other"})
    for answer, kind in (
        (http.post("/v1/messages", content="{"), "invalid_request_error"),
        (http.get("/v1/messages"), "invalid_request_error"),
        (http.post("/v1/messages/batches", json={}), "not_found_error"),
        (http.post("/v1/messages", json={**HTTP, "max_tokens": 10_000}), "invalid_request_error"),
    ):
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)

    async def fails(request: GenerateRequest) -> Any:
        raise GenerationError("broken")
        yield

    monkeypatch.setattr(server.client, "generate", fails)
    for stream in (False, True):
        answer = http.post("/v1/messages", json={**HTTP, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")


def test_an_error_after_the_first_event_is_one(
    server: LocalServer, sdk: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    async def generate(request: GenerateRequest) -> Any:
        yield Delta((504,), None, 0, 0)
        raise GenerationError("broken")

    monkeypatch.setattr(server.client, "generate", generate)
    with pytest.raises(anthropic.APIStatusError, match="broken"):
        list(sdk.messages.create(**CAPITAL, stream=True))


def test_the_sdks_header_is_a_key(server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import anthropic

    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{id: a, sha256: {digest_of('right')}}}\n")
    monkeypatch.setattr(server.api, "gate", Gate(KeyFile(str(path), {})))
    with anthropic.Anthropic(base_url=server.url, api_key="right") as client:
        assert client.messages.create(**CAPITAL).stop_reason == "end_turn"
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(**CAPITAL)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
