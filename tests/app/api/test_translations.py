"""Any JSON in the place of any field is accepted or refused with words, and misspelt fields are refused at any
depth; nothing else comes of it."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.messages.request import parse_count_tokens, parse_messages_request
from app.api.openai_types import parse_chat, parse_completion
from app.api.responses.request import parse_responses
from app.api.tokenization import parse_detokenize
from engine.errors import InvalidRequestError, QuireError

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


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path in a JSON value."""
    return functools.reduce(operator.getitem, path, value)


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


SCHEMAS = {"parameters", "input_schema", "schema"}
OBJECTS = [
    (route, path)
    for route, (_, body) in ROUTES.items()
    for path in places(body)
    if isinstance(at(body, path), dict) and not SCHEMAS.intersection(path)
]
STRICT: dict[str, tuple[tuple[Any, ...], ...]] = {
    "chat": ((), ("messages", 0), ("messages", 1), ("messages", 2), ("tools", 0, "function")),
    "responses": ((), ("tools", 0), ("text",), ("text", "format")),
    "messages": ((),),
}
"""Objects that take no field that is not known; clients have fields of their own in others."""


def with_field(route: str, path: tuple[Any, ...], name: str, value: Any) -> dict[str, Any]:
    """The example of ``route`` with one field more in the object at ``path``."""
    body: dict[str, Any] = json.loads(json.dumps(ROUTES[route][1]))
    at(body, path)[name] = value
    return body


def renamed(route: str, path: tuple[Any, ...], name: str, other: str) -> dict[str, Any]:
    """The example of ``route`` with another name for a field of the object at ``path``."""
    body: dict[str, Any] = json.loads(json.dumps(ROUTES[route][1]))
    fields = at(body, path)
    fields[other] = fields.pop(name)
    return body


def beside(route: str, path: tuple[Any, ...], name: str, other: str) -> dict[str, Any]:
    """The example of ``route`` with a further field ``other``; the one of that ``name`` stays."""
    return with_field(route, path, other, "x")


WANTED = ("type", "role")
"""Without these, what an object must have comes first."""


@pytest.mark.parametrize(
    ("route", "path", "name"),
    [(route, path, name) for route, path in OBJECTS for name in WANTED if name in at(ROUTES[route][1], path)],
)
def test_a_misspelt_type_or_role_is_refused(route: str, path: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"\b(type|role)\b"):
        ROUTES[route][0](renamed(route, path, name, f"{name}s"))


@pytest.mark.parametrize(("route", "path"), OBJECTS)
def test_a_misspelt_field_is_refused_with_the_name_that_was_meant(route: str, path: tuple[Any, ...]) -> None:
    parse, example = ROUTES[route]
    change = beside if path in STRICT[route] else renamed
    for name in [name for name in at(example, path) if len(name) > 3 and name not in WANTED]:
        camel = "".join(word.capitalize() for word in name.split("_"))
        swapped = name[:2] + name[3] + name[2] + name[4:]
        for misspelt in {f"{name}s", name[:-2] + name[-1], f"{name[:-1]}z", swapped, camel} - {name}:
            with pytest.raises(InvalidRequestError) as caught:
                parse(change(route, path, name, misspelt))
            assert f"{misspelt!r}" in caught.value.message or f".{misspelt} " in caught.value.message
            assert f"did you mean {name!r}?" in caught.value.message
            assert caught.value.code in ("unknown_parameter", "unsupported_parameter")
            assert (caught.value.param or "").endswith(misspelt)
            parse(with_field(route, path, misspelt, None))


@pytest.mark.parametrize(("route", "path"), OBJECTS)
def test_a_field_that_is_like_none_passes_where_clients_have_their_own(
    route: str, path: tuple[Any, ...]
) -> None:
    parse, _ = ROUTES[route]
    metadata = (route, path) == ("responses", ("metadata",))  # has texts alone
    body = with_field(route, path, "x_client", "a" if metadata else {"a": 1})
    if path in STRICT[route]:
        with pytest.raises(InvalidRequestError, match="x_client"):
            parse(body)
    else:
        parse(body)


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        (
            "responses",
            {"reasoning": {"efort": "low"}},
            "reasoning has 'efort', which is not a known field of it; did you mean 'effort'?",
        ),
        (
            "responses",
            {"text": {"verbose": "low"}},
            "text has 'verbose', which is not a known field of it; did you mean 'verbosity'?",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "texts": "b"}]}]},
            "input[0].content[0] has 'texts', which is not a known field of it; did you mean 'text'?",
        ),
        (
            "messages",
            {"metadata": {"user": "u"}},
            "metadata has 'user', which is not a known field of it; did you mean 'user_id'?",
        ),
        (
            "messages",
            {"thinking": {"type": "enabled", "budgetTokens": 1024}},
            "thinking has 'budgetTokens', which is not a known field of it; did you mean 'budget_tokens'?",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "contents": "a", "content": "b"}]},
            "messages[0].contents is not supported; did you mean 'content'?",
        ),
    ],
)
def test_the_place_of_a_misspelt_field_is_told(route: str, fields: dict[str, Any], message: str) -> None:
    parse, example = ROUTES[route]
    with pytest.raises(InvalidRequestError) as caught:
        parse({**json.loads(json.dumps(example)), **fields})
    assert caught.value.message == message


def dotted(path: tuple[Any, ...]) -> str:
    """A path as messages for clients have it."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


ALLOWED = {"type": "function", "name": "f"}
REQUIRED: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any], set[str]]] = {
    "chat": (
        parse_chat,
        CHAT,
        {
            *("messages", "messages[0].role", "messages[0].content", "messages[0].content[0].type"),
            *("messages[0].content[0].text", "messages[1].role", "messages[2].role", "messages[2].content"),
            *("messages[1].tool_calls[0].id", "messages[1].tool_calls[0].function"),
            *("messages[1].tool_calls[0].function.name", "messages[1].tool_calls[0].function.arguments"),
            *("messages[2].tool_call_id", "tools[0].type", "tools[0].function", "tools[0].function.name"),
            *("tool_choice.type", "tool_choice.function", "tool_choice.function.name"),
        },
    ),
    "chat, allowed tools": (
        parse_chat,
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": CHAT["tools"],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        },
        {
            *("messages", "messages[0].role", "messages[0].content"),
            *("tools[0].type", "tools[0].function", "tools[0].function.name", "tool_choice.type"),
            *("tool_choice.allowed_tools", "tool_choice.allowed_tools.mode", "tool_choice.allowed_tools.tools"),
            *("tool_choice.allowed_tools.tools[0].type", "tool_choice.allowed_tools.tools[0].function"),
            "tool_choice.allowed_tools.tools[0].function.name",
        },
    ),
    "chat, a form": (
        parse_chat,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        },
        {
            *("messages", "messages[0].role", "messages[0].content"),
            *("response_format.type", "response_format.json_schema"),
        },
    ),
    "completions": (parse_completion, {"prompt": "a"}, set()),  # it may not be empty either, and is told so
    "responses": (
        parse_responses,
        RESPONSES,
        {
            *("input", "input[0].role", "input[0].content", "input[0].content[0].type"),
            *("input[0].content[0].text", "input[1].content[0].type", "input[1].content[0].text"),
            *("input[2].call_id", "input[2].name", "input[2].arguments", "input[3].call_id", "input[3].output"),
            *("tools[0].type", "tools[0].name", "tool_choice.type", "tool_choice.name", "text.format.type"),
        },
    ),
    "responses, allowed tools": (
        parse_responses,
        {
            "input": "a",
            "tools": RESPONSES["tools"],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ALLOWED]},
        },
        {
            *("input", "tools[0].type", "tools[0].name"),
            *("tool_choice.type", "tool_choice.mode", "tool_choice.tools"),
            *("tool_choice.tools[0].type", "tool_choice.tools[0].name"),
        },
    ),
    "messages": (
        parse_messages_request,
        MESSAGES,
        {
            *("max_tokens", "system[0].type", "system[0].text", "messages", "tool_choice.type"),
            *("messages[0].role", "messages[0].content", "messages[0].content[0].type"),
            *("messages[0].content[0].text", "messages[1].role", "messages[1].content"),
            *("messages[1].content[0].type", "messages[1].content[0].thinking", "messages[1].content[1].type"),
            *("messages[1].content[1].id", "messages[1].content[1].name", "messages[1].content[1].input"),
            *("messages[2].role", "messages[2].content", "messages[2].content[0].type"),
            *("messages[2].content[0].tool_use_id", "tools[0].name", "tools[0].input_schema"),
            *("tool_choice.name", "output_config.format.type", "thinking.type"),
        },
    ),
    "count_tokens": (
        parse_count_tokens,
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages", "messages[0].role", "messages[0].content"},
    ),
    "detokenize": (parse_detokenize, {"tokens": [1]}, {"tokens"}),
}
"""Requests, and the fields that must be there."""


@pytest.mark.parametrize("name", REQUIRED)
def test_a_field_that_must_be_there_is_said_to_be_missing(name: str) -> None:
    parse, example, required = REQUIRED[name]
    parse(json.loads(json.dumps(example)))
    for absent in ("left out", "null"):
        missing = set()
        for path in places(example):
            if not path or isinstance(path[-1], int) or SCHEMAS.intersection(path[:-1]):
                continue
            body = json.loads(json.dumps(example))
            fields = at(body, path[:-1])
            fields[path[-1]] = None
            if absent == "left out":
                del fields[path[-1]]
            try:
                parse(body)
            except InvalidRequestError as error:
                assert "is null" not in error.message  # noqa: PT017 - some fields need not be there
                if error.message.startswith(f"{dotted(path)} is missing or null but "):
                    missing.add(dotted(path))
        assert missing == required, absent


@pytest.mark.parametrize(
    ("route", "path"),
    [
        ("chat", ("messages", 1, "tool_calls", 0, "type")),
        ("responses", ("input", 0, "type")),
        ("messages", ("tools", 0, "type")),
        ("messages", ("tool_choice", "disable_parallel_tool_use")),
    ],
)
def test_a_nested_field_that_is_null_counts_as_absent(route: str, path: tuple[Any, ...]) -> None:
    parse, example = ROUTES[route]
    absent = json.loads(json.dumps(example))
    at(absent, path[:-1]).pop(path[-1], None)
    assert parse(with_field(route, path[:-1], path[-1], None)) == parse(absent)


def test_an_entry_of_a_list_is_null_not_missing() -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages\[0\] is null but must be an object"):
        parse_chat({"messages": [None]})
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\] is null but must be an object"):
        parse_chat({**CHAT, "tools": [None]})


@pytest.mark.parametrize(
    ("route", "path", "name"),
    [
        ("messages", ("messages", 0), "context"),
        ("responses", ("input", 0), "context"),
        ("messages", ("metadata",), "user"),
    ],
)
def test_a_field_beside_the_one_that_it_is_almost_spelled_like_passes(
    route: str, path: tuple[Any, ...], name: str
) -> None:
    """Some servers put a context beside the content of their answers, and clients send these back."""
    ROUTES[route][0](with_field(route, path, name, "x"))


class Uncopied(str):
    """A text that does not grow piece by piece: each time, all of it would be copied."""

    __slots__ = ()

    def __add__(self, other: str, /) -> NoReturn:
        raise AssertionError

    def __format__(self, form: str, /) -> NoReturn:
        raise AssertionError


def test_texts_in_a_row_become_one_message() -> None:
    texts = ["", "a", "", "b", *map(str, range(20))]
    blocks = [{"type": "text", "text": text} for text in texts]
    result = {"type": "tool_result", "tool_use_id": "1", "content": "r"}
    asked: dict[str, Any] = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [*blocks, result, *blocks]}],
    }
    messages = [(one.role, one.content) for one in parse_messages_request(asked).messages]
    assert messages == [("user", "\n".join(texts)), ("tool", "r"), ("user", "\n".join(texts))]

    items: list[Any] = [{"role": "assistant", "content": text} for text in texts]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    chat = parse_responses({"input": [*items, call, {"role": "user", "content": "u"}, *items[:1]]}).chat
    first = "\n".join(texts[1:])  # nothing precedes the first text
    assert [(one.role, one.content) for one in chat.messages] == [
        ("assistant", first),
        ("user", "u"),
        ("assistant", ""),
    ]
    assert len(chat.messages[0].tool_calls) == 1

    blocks[0], items[0] = (
        {"type": "text", "text": Uncopied("c")},
        {"role": "assistant", "content": Uncopied("c")},
    )
    asked["messages"] = [{"role": "user", "content": blocks[:2]}]
    assert parse_messages_request(asked).messages[0].content == "c\na"
    assert parse_responses({"input": items[:2]}).chat.messages[0].content == "c\na"
