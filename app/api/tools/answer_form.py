"""The form of an answer that must be calls: a JSON schema, which structured output enforces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.tools.tool_use import Tool, ToolUse
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each name."""

_VALUES = ("const", "enum", "default", "examples", "required")
"""Keywords whose value is no schema."""


def answer_form(use: ToolUse) -> StructuredOutput | None:
    """What ``tool_choice`` makes of the answer; ``None`` if the model decides; see ``app/api/tools/forced.py``.

    Raises:
        InvalidRequestError: the tools' parameters are too large for it, or no schemas.
    """
    if use.choice == "named":
        schema = arguments_schema(next(tool for tool in use.tools if tool.name == use.named))
    elif use.choice == "required":
        schema = calls_schema(use.tools, one=not use.parallel)
    else:
        return None
    try:
        return StructuredOutput.of_schema(schema)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"the schema of the calls: {error.message}", "tools", error.code) from error


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """What the arguments of ``tool`` must match; without ``parameters`` there are none."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def calls_schema(tools: Sequence[Tool], *, one: bool) -> dict[str, Any]:
    """A list of at least one call, or of just one, of any of ``tools``."""
    definitions = {
        f"tool{i}": _moved(arguments_schema(tool), f"#/$defs/tool{i}") for i, tool in enumerate(tools)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return {**schema, "maxItems": 1} if one else schema


def _moved(schema: Any, to: str) -> Any:
    """``schema`` when its root is at ``to``: references within it lead there."""
    if isinstance(schema, list):
        return [_moved(entry, to) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for keyword, inner in schema.items():
        if keyword == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            moved[keyword] = to + inner[1:]
        elif keyword in _MAPS and isinstance(inner, dict):
            moved[keyword] = {name: _moved(entry, to) for name, entry in inner.items()}
        elif keyword in _VALUES:
            moved[keyword] = inner
        else:
            moved[keyword] = _moved(inner, to)
    return moved
