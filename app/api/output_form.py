"""The form that a client wants the output to have, under any of the names that clients use for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.api.json_fields import only_known, text, wrong
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""The fields that ask for a form; one of them may be given."""

_RESPONSE_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_HINTS = frozenset({"name", "description", "strict"})
"""Fields beside a schema; every schema is kept to strictly, whatever ``strict`` says."""


def output_form(fields: dict[str, Any]) -> StructuredOutput | None:
    """The form that the fields of a request ask for, none of which is ``null``.

    Raises:
        InvalidRequestError: names the field that is wrong, or two that contradict each other.
    """
    found: list[tuple[str, StructuredOutput]] = []
    for name in FORM_FIELDS:
        if name not in fields:
            continue
        try:
            form = _read(name, fields[name])
        except InvalidRequestError as error:
            if error.param != "structured_output":
                raise
            message = error.message.replace("structured_output", name, 1)
            raise InvalidRequestError(message, name, error.code) from None
        if form is not None:
            found.append((name, form))
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[0][0]} and {found[1][0]} are given, but the output can have one form; leave one out",
            found[1][0],
        )
    return found[0][1] if found else None


def _read(name: str, value: Any) -> StructuredOutput | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _KINDS[name.removeprefix("guided_")](value, name)


def _response_format(value: Any) -> StructuredOutput | None:
    if not isinstance(value, dict) or value.get("type") not in _RESPONSE_FORMATS:
        asked = value.get("type") if isinstance(value, dict) else value
        must_be = f"one of {', '.join(_RESPONSE_FORMATS)}"
        raise wrong("response_format.type", asked, must_be, "response_format")
    kind = value["type"]
    only_known(value, "response_format", {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object")
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise wrong(
            "response_format.json_schema", described, "an object with name and schema", "response_format"
        )
    only_known(described, "response_format.json_schema", {"schema", *_SCHEMA_HINTS})
    schema = described.get("schema")
    return StructuredOutput("json_object") if schema is None else _schema(schema, "response_format")


def _structured_outputs(value: Any) -> StructuredOutput | None:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise wrong(name, value, f"an object with one of {', '.join(_KINDS)}")
    given = {key: entry for key, entry in value.items() if entry is not None and entry is not False}
    only_known(given, name, _KINDS)
    if len(given) != 1:
        raise InvalidRequestError(
            f"{name} has {len(given)} forms but must have one of {', '.join(_KINDS)}", name
        )
    ((kind, entry),) = given.items()
    return _KINDS[kind](entry, f"{name}.{kind}")


def _schema(value: Any, name: str) -> StructuredOutput:
    """A schema as JSON, or as text that is JSON."""
    if isinstance(value, str):
        return StructuredOutput("json_schema", text(value, name))
    return StructuredOutput.of_schema(value)


def _text(kind: str) -> Callable[[Any, str], StructuredOutput]:
    return lambda value, name: StructuredOutput(kind, text(value, name))


def _json_object(value: Any, name: str) -> StructuredOutput:
    if value is not True:
        raise wrong(name, value, "true or false")
    return StructuredOutput("json_object")


_KINDS: dict[str, Callable[[Any, str], StructuredOutput]] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": lambda value, name: StructuredOutput.of_choices(value),
    "grammar": _text("grammar"),
    "json_object": _json_object,
}
