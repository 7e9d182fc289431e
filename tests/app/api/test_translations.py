"""Any JSON in the place of any field is accepted or refused with words; nothing else comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.messages.request import parse_messages_request
from app.api.openai_types import parse_chat
from app.api.responses.request import parse_responses
from engine.errors import QuireError

TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", **TOOL}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 5,
    "metadata": {},
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "thinking": {"type": "disabled"},
    "stop_sequences": ["x"],
}
ROUTES: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "chat": (parse_chat, CHAT),
    "responses": (parse_responses, RESPONSES),
    "messages": (parse_messages_request, MESSAGES),
}
WORDS = st.sampled_from(
    [
        "text",
        "input_text",
        "function",
        "custom",
        "tool",
        "auto",
        "any",
        "required",
        "none",
        "user",
        "assistant",
        "system",
        "\ud800",
        "object",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "name", "function", "x"]) | WORDS, inner, max_size=4
        )
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value in a JSON value."""
    inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [path, *[found for key, one in inner for found in places(one, (*path, key))]]


@pytest.mark.parametrize("route", ROUTES)
def test_the_example_is_accepted(route: str) -> None:
    parse, body = ROUTES[route]
    parse(json.loads(json.dumps(body)))


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
def test_anything_anywhere_is_accepted_or_refused(route: str, data: st.DataObject) -> None:
    parse, example = ROUTES[route]
    body = json.loads(json.dumps(example))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from([path for path in places(body) if path]))
        target = body
        for key in path:
            target = target[key]
        target[last] = data.draw(JSON)
    try:
        parse(body)
    except QuireError as error:
        assert len(str(error)) < 600  # noqa: PT017 - it may be accepted, too
