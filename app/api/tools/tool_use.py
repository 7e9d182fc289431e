"""The tools of a request, checked, and which of them the model may, or must, call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from app.api.errors import show
from app.api.json_fields import boolean, check_names, only_known, said, text, texts_in, with_texts, wrong
from engine.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 * 1024
"""Of the JSON text of all tools together."""

MAX_SCHEMA_DEPTH = 32
"""Lists and objects inside one another in the parameters of a tool."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

_FUNCTION = ("name", "description", "parameters", "strict")
"""Fields of a tool's function."""

ToolChoice: TypeAlias = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form that OpenAI's chat route and chat templates use."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    def changed(self, change: Callable[[str], str]) -> Tool:
        """A copy with ``change`` applied to each text."""
        return Tool(change(self.name), change(self.description), with_texts(self.parameters, change))

    @property
    def texts(self) -> Iterator[str]:
        """All texts in it."""
        yield from (self.name, self.description)
        yield from texts_in(self.parameters)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is told of; with ``"named"`` it must call the tool ``named``."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    named: str = ""
    parallel: bool = True
    """Whether one answer may have several calls."""

    chars: int = 0
    """The length of the tools' JSON text."""


NO_TOOLS = ToolUse()


def parse_tool_use(fields: dict[str, Any]) -> ToolUse:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``, as OpenAI's chat route has them.

    Raises:
        InvalidRequestError: it names the field and what it must be.
    """
    tools = _tools(fields.get("tools", []))
    parallel = boolean({"parallel_tool_calls": True, **fields}, "parallel_tool_calls")
    wanted = fields.get("tool_choice", "auto" if tools else "none")
    if isinstance(wanted, dict) and wanted.get("type") == "allowed_tools":
        tools, wanted = _allowed(wanted.get("allowed_tools"), tools)
    choice, named = _choice(wanted, tools)
    if choice == "none":
        return NO_TOOLS
    chars = sum(len(json.dumps(tool.to_dict(), ensure_ascii=False)) for tool in tools)
    if chars > MAX_TOOLS_CHARS:
        raise InvalidRequestError(
            f"tools has {chars} characters of JSON but at most {MAX_TOOLS_CHARS} are allowed", "tools"
        )
    return ToolUse(tools, choice, named, parallel, chars)


def _tools(value: object) -> tuple[Tool, ...]:
    if not isinstance(value, list):
        raise wrong("tools", value, "a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(value)} entries but at most {MAX_TOOLS} are allowed", "tools"
        )
    tools = tuple(_tool(entry, f"tools[{i}]") for i, entry in enumerate(value))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequestError(f"tools[{i}] is a second tool with the name {tool.name!r}", "tools")
        names.add(tool.name)
    return tools


def _tool(entry: object, name: str) -> Tool:
    if not isinstance(entry, dict):
        raise wrong(name, entry, "an object with type and function", "tools")
    if entry.get("type") != "function":
        raise InvalidRequestError(
            f"{said(f'{name}.type', entry.get('type'))} but only 'function' is supported",
            "tools",
            "unsupported_parameter",
        )
    check_names(entry, name, ("type", "function"))
    function = entry.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{name}.function", function, "an object with name, description and parameters", "tools")
    only_known(function, f"{name}.function", _FUNCTION)
    parameters = function.get("parameters")
    if parameters is not None:
        check_schema(parameters, f"{name}.function.parameters")
    boolean(function, "strict", f"{name}.function.")
    description = function.get("description")
    return Tool(
        tool_name(function.get("name"), f"{name}.function.name"),
        "" if description is None else text(description, f"{name}.function.description", "tools"),
        parameters,
    )


def tool_name(value: object, name: str) -> str:
    """``value`` as a tool's name."""
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise wrong(name, value, "a name of 1 to 128 letters, digits, underscores and hyphens", "tools")
    return value


def check_schema(schema: object, name: str) -> None:
    """Refuse what is no schema of an object, or too deep; structured output looks at the rest."""
    if not isinstance(schema, dict):
        raise wrong(name, schema, "a JSON schema, which is an object", "tools")
    if schema.get("type", "object") != "object":
        raise wrong(f"{name}.type", schema["type"], "'object', because arguments are", "tools")
    for found in texts_in(schema):
        text(found, name, "tools")
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequestError(f"{name} nests deeper than {MAX_SCHEMA_DEPTH} lists and objects", "tools")
        waiting += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]


def _allowed(value: object, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], str]:
    """The tools that ``allowed_tools`` names, the only ones that the model is told of, and the choice."""
    name = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with tools and mode", "tool_choice")
    if value.get("mode") not in ("auto", "required"):
        raise wrong(f"{name}.mode", value.get("mode"), "'auto' or 'required'", "tool_choice")
    check_names(value, name, ("mode", "tools"))
    listed = value.get("tools")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
        raise wrong(f"{name}.tools", listed, f"a list of 1 to {MAX_TOOLS} tools", "tool_choice")
    if not all(isinstance(entry, dict) for entry in listed):
        raise wrong(f"{name}.tools", listed, "a list of objects that name tools", "tool_choice")
    named = {_choice(entry, tools, f"{name}.tools[{i}]")[1] for i, entry in enumerate(listed)}
    return tuple(tool for tool in tools if tool.name in named), value["mode"]


def _choice(value: object, tools: tuple[Tool, ...], name: str = "tool_choice") -> tuple[ToolChoice, str]:
    if value == "none" or (value == "auto" and not tools):
        return "none", ""
    if value == "auto":
        return "auto", ""
    if value == "required":
        if not tools:
            raise InvalidRequestError("tool_choice is 'required' but there are no tools", "tool_choice")
        return "required", ""
    if not isinstance(value, dict):
        raise wrong("tool_choice", value, "'none', 'auto', 'required' or an object that names a tool")
    check_names(value, name, ("type", "function"))
    if value.get("type") != "function":
        raise InvalidRequestError(
            f"{said(f'{name}.type', value.get('type'))} but only 'function' is supported",
            "tool_choice",
            "unsupported_parameter",
        )
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{name}.function", function, "an object with a name", "tool_choice")
    check_names(function, f"{name}.function", ("name",))
    named = text(function.get("name"), f"{name}.function.name", "tool_choice")
    if named not in [tool.name for tool in tools]:
        raise InvalidRequestError(f"tool_choice names {show(named)}, which is not in tools", "tool_choice")
    return "named", named
