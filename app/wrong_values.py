"""What pydantic's errors mean, in words for users, who know neither pydantic nor Python's types."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}
"""What a value must be, by the beginning of the error's type."""

_QUOTED = re.compile("'([^']*)'")


def must_be(error: Mapping[str, Any], form: str = "") -> str:
    """What the value of one of ``ValidationError.errors()`` must be.

    ``form`` describes a text that has to match a pattern.
    """
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}"
        case "greater_than":
            return f"must be above {context['gt']:g}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}"
        case "literal_error":
            return f"must be one of {', '.join(_QUOTED.findall(context['expected']))}"
        case "string_pattern_mismatch":
            return f"must be {form}" if form else f"must match {context['pattern']}"
        case "string_type" if isinstance(error["input"], int | float | datetime.date):  # as YAML reads it
            return f"must be text, in quotes{': ' if form else ''}{form}"
        case "string_type" if form:
            return f"must be {form}"
    words = next((words for name, words in _KINDS.items() if kind.startswith(name)), "")
    return f"must be {words}" if words else str(error["msg"])
