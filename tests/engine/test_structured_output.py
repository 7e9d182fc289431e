"""The form of an output as a parameter: what is one, and what is refused with words."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.structured_output import MAX_CHARS, MAX_CHOICES, MAX_NESTING, StructuredOutput


def nested(levels: int) -> str:
    return '{"not":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", ""),
        ("json_schema", "true"),
        ("json_schema", '{"type": "string"}'),
        ("json_schema", nested(MAX_NESTING)),
        ("regex", "a+"),
        ("choice", '["a", "b"]'),
        ("grammar", 'start: "a"'),
    ],
)
def test_what_is_a_form(kind: str, text: str) -> None:
    form = StructuredOutput(kind, text)
    assert SamplingParams(structured_output=form).structured_output == form
    hash(form)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("xml", "", "kind 'xml' but must have one of"),
        (["regex"], "a", "kind"),
        ("regex", 5, "must have a string"),
        ("regex", "", "is empty"),
        ("grammar", "", "is empty"),
        ("regex", "\ud800", "surrogates"),
        ("json_object", "{}", "at most 0"),
        *((kind, "x" * (limit + 1), f"at most {limit} ") for kind, limit in MAX_CHARS.items()),
        ("json_schema", "{", "no valid JSON"),
        ("json_schema", '{"minimum": NaN}', "NaN"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", "[" * 100_000, "no valid JSON"),
        ("json_schema", nested(MAX_NESTING + 1), f"more than {MAX_NESTING} levels"),
        ("choice", '{"a": 1}', "list of strings"),
        ("choice", '["a", 1]', "list of strings"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", "[]", f"1 to {MAX_CHOICES}"),
        ("choice", str(["a"] * (MAX_CHOICES + 1)).replace("'", '"'), f"1 to {MAX_CHOICES}"),
    ],
)
def test_what_is_none_is_refused(kind: Any, text: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        StructuredOutput(kind, text)
    assert caught.value.param == "structured_output"
    assert len(caught.value.message) < 250


def test_forms_are_made_of_values() -> None:
    assert StructuredOutput.of_choices(["a", "ü"]) == StructuredOutput("choice", '["a", "ü"]')
    assert StructuredOutput.of_schema({"type": "null"}) == StructuredOutput("json_schema", '{"type": "null"}')
    circular: list[Any] = []
    circular.append(circular)
    for value in ({1}, float("nan"), circular):
        with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
            StructuredOutput.of_schema(value)


@pytest.mark.parametrize("value", ["json", {"kind": "json_object"}, 5, True])
def test_only_a_form_is_one(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutput"):
        SamplingParams(structured_output=value)


def test_beams_are_not_held_to_a_form() -> None:
    with pytest.raises(InvalidRequestError, match="use_beam_search"):
        SamplingParams(structured_output=StructuredOutput("json_object"), use_beam_search=True)
