"""The tools of a request: what is accepted, what is refused and why, and the schema that forced calls match."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from app.api.openai_types import parse_chat
from app.api.tools.answer_form import answer_form
from app.api.tools.tool_use import MAX_SCHEMA_DEPTH, MAX_TOOLS, MAX_TOOLS_CHARS, NO_TOOLS, Tool, parse_tool_use
from engine.errors import InvalidRequestError

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "$ref": {"const": {"$ref": "#"}}}}
LINKED = {"type": "object", "properties": {"head": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "x": nested(depth - 1)} if depth > 1 else {}


def test_tools_arrive_and_the_model_chooses() -> None:
    use = parse_tool_use(
        {"tools": [function("f", description="d", parameters=CITY, strict=True), function("g")]}
    )
    assert use.tools == (Tool("f", "d", CITY), Tool("g"))
    assert (use.choice, use.named, use.parallel) == ("auto", "", True)
    assert use.chars > len(json.dumps(CITY))


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [], "tool_choice": "auto"}])
def test_no_tools_are_none(fields: dict[str, Any]) -> None:
    assert parse_tool_use(fields) == NO_TOOLS


def test_the_model_is_not_told_of_tools_that_it_must_not_call() -> None:
    assert parse_tool_use({"tools": [function()], "tool_choice": "none"}) == NO_TOOLS


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", ["an object", "a list of tools"]),
        ({"tools": [1]}, "tools", ["tools[0] is 1"]),
        ({"tools": [{"type": "web_search"}]}, "tools", ["'web_search'", "'function'"]),
        ({"tools": [{"type": "function"}]}, "tools", ["tools[0].function is missing or null"]),
        ({"tools": [function("a b")]}, "tools", ["'a b'", "1 to 128"]),
        ({"tools": [function("a" * 129)]}, "tools", ["1 to 128"]),
        ({"tools": [function(["f"])]}, "tools", ["a list of 1"]),  # type: ignore[arg-type]
        ({"tools": [function(), function()]}, "tools", ["tools[1]", "second", "'f'"]),
        ({"tools": [function(parameters=[])]}, "tools", ["parameters is a list of 0", "JSON schema"]),
        ({"tools": [function(parameters={"type": "array"})]}, "tools", ["'array'", "'object'"]),
        ({"tools": [function(parameters={"type": {}})]}, "tools", ["an object", "'object'"]),
        ({"tools": [function(more=1)]}, "tools[0].function.more", ["'more'", "not a known field of it"]),
        ({"tools": [function(description=1)]}, "tools", ["description is 1"]),
        ({"tools": [function(description="\ud800")]}, "tools", ["surrogate"]),
        ({"tools": [function(parameters={"\ud800": 1})]}, "tools", ["surrogate"]),
        ({"tools": [function(strict=1)]}, "tools[0].function.strict", ["true or false"]),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools", ["129", "128"]),
        ({"tools": [function(parameters=nested(MAX_SCHEMA_DEPTH + 1))]}, "tools", ["nests", "32"]),
        ({"tools": [function(description="x" * MAX_TOOLS_CHARS)]}, "tools", [str(MAX_TOOLS_CHARS)]),
        ({"tools": [function()], "tool_choice": "some"}, "tool_choice", ["'some'", "'required'"]),
        ({"tools": [function()], "tool_choice": function("g")}, "tool_choice", ["'g'", "not in tools"]),
        ({"tools": [function()], "tool_choice": {"type": "custom"}}, "tool_choice", ["'custom'"]),
        ({"tool_choice": function("g")}, "tool_choice", ["'g'", "not in tools"]),
        ({"tool_choice": "required"}, "tool_choice", ["no tools"]),
        ({"tools": [function()], "parallel_tool_calls": 1}, "parallel_tool_calls", ["true or false"]),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tool_use(fields)
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message


def test_what_is_at_the_limits_is_accepted() -> None:
    tools = [function(f"{i}", parameters=nested(MAX_SCHEMA_DEPTH)) for i in range(MAX_TOOLS)]
    assert len(parse_tool_use({"tools": tools}).tools) == MAX_TOOLS


def schema_of(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    form = parse_chat(body).options.params.structured_output
    return None if form is None else json.loads(form.text)


def test_a_named_tool_is_held_to_its_parameters() -> None:
    tools = [function("f", parameters={"properties": CITY["properties"]}), function("g")]
    assert schema_of(tools=tools) is None
    schema = schema_of(tools=tools, tool_choice=function("f"))
    assert schema == {"type": "object", "properties": CITY["properties"]}
    none = schema_of(tools=tools, tool_choice=function("g"))
    jsonschema.validate({}, none)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"x": 1}, none)


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([{"name": "city", "arguments": {"city": "a"}}], True),
        (
            [
                {"name": "list", "arguments": {"head": {"next": {"next": {}}}}},
                {"name": "none", "arguments": {}},
            ],
            True,
        ),
        ([{"name": "list", "arguments": {"head": {"$ref": {"$ref": "#"}}}}], True),
        ([{"name": "list", "arguments": {"head": {"next": 1}}}], False),
        ([{"name": "city", "arguments": {"city": 1}}], False),
        ([{"name": "none", "arguments": {"x": 1}}], False),
        ([{"name": "other", "arguments": {}}], False),
        ([{"name": "city"}], False),
        ([], False),
    ],
)
def test_required_calls_are_held_to_the_parameters_of_each_tool(calls: list[Any], valid: bool) -> None:
    tools = [function("city", parameters=CITY), function("list", parameters=LINKED), function("none")]
    validator = jsonschema.Draft202012Validator(schema_of(tools=tools, tool_choice="required"))
    assert validator.is_valid(calls) == valid


def test_one_call_where_they_may_not_be_parallel() -> None:
    schema = schema_of(tools=[function()], tool_choice="required", parallel_tool_calls=False)
    call = {"name": "f", "arguments": {}}
    assert jsonschema.Draft202012Validator(schema).is_valid([call])
    assert not jsonschema.Draft202012Validator(schema).is_valid([call, call])


def test_parameters_too_large_to_be_forced_are_the_tools_fault() -> None:
    tools = [function("f", parameters={"type": "object", "enum": ["x" * 200_000]})]
    assert answer_form(parse_tool_use({"tools": tools})) is None
    with pytest.raises(InvalidRequestError, match="at most") as caught:
        parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"})
    assert caught.value.param == "tools"
