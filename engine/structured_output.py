"""The form that a request's output must have."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.errors import InvalidRequestError, shown

MAX_CHARS = {"json_object": 0, "json_schema": 1 << 17, "regex": 1 << 14, "choice": 1 << 17, "grammar": 1 << 16}
"""The kinds of structured output, and the most characters that the text of each may have."""

FORM_FAILED = "the structured output cannot be continued"
"""How the error of a request begins whose form became too complex for the engine amid its output."""

MAX_CHOICES = 4096
MAX_NESTING = 64
"""Levels of lists and objects in a JSON schema."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What every output of a request must match, from its first token to its last.

    Validated on creation, apart from what only compiling shows: that the schema, expression, or grammar means
    something, and is not too large for the engine.

    Attributes:
        kind: ``json_object`` (any JSON object), ``json_schema`` (a JSON value that the schema accepts),
            ``regex`` (a text that the whole expression matches), ``choice`` (one of several texts), or
            ``grammar`` (a text of a context-free grammar in Lark's notation).
        text: the schema as JSON, the expression, the choices as a JSON list of strings, or the grammar; empty
            for ``json_object``.

    Raises:
        InvalidRequestError: names what is wrong and the limit.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        kind, text = self.kind, self.text
        if not isinstance(kind, str) or kind not in MAX_CHARS:
            raise _wrong(f"has the kind {shown(kind)} but must have one of {', '.join(MAX_CHARS)}")
        if not isinstance(text, str):
            raise _wrong(f"has {shown(text)} for a text but must have a string")
        limit = MAX_CHARS[kind]
        if len(text) > limit:
            raise _wrong(f"of kind {kind} has {len(text)} characters but at most {limit} are allowed")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _wrong(f"of kind {kind} has lone surrogates, which no text may have") from None
        if kind == "json_schema":
            _check_schema(text)
        elif kind == "choice":
            _check_choices(text)
        elif kind != "json_object" and not text:
            raise _wrong(f"of kind {kind} is empty")

    @classmethod
    def of_schema(cls, schema: object) -> StructuredOutput:
        """A JSON value that ``schema`` (an object, or true or false) accepts."""
        return cls("json_schema", _dumped(schema))

    @classmethod
    def of_choices(cls, choices: object) -> StructuredOutput:
        """One of ``choices``, a list of strings."""
        return cls("choice", _dumped(choices))


def _check_schema(text: str) -> None:
    schema = _loaded("json_schema", text)
    if not isinstance(schema, dict | bool):
        raise _wrong(f"of kind json_schema is {shown(schema)} but must be an object, true or false")
    level, depth = [schema], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            raise _wrong(f"of kind json_schema is nested more than {MAX_NESTING} levels deep")
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]


def _check_choices(text: str) -> None:
    choices = _loaded("choice", text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise _wrong("of kind choice must be a list of strings that are not empty")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _wrong(f"of kind choice has {len(choices)} choices but must have 1 to {MAX_CHOICES}")


def _loaded(kind: str, text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"of kind {kind} is no valid JSON: {error}") from None


def _dumped(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"cannot be written as JSON: {error}") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _wrong(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_output {problem}", "structured_output")
