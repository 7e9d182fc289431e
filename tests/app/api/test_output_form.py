"""Every way to ask for a form of the output, and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.openai_types import parse_chat, parse_completion
from app.api.output_form import output_form
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = StructuredOutput.of_schema(SCHEMA)
ANY_OBJECT = StructuredOutput("json_object")
CHOICES = StructuredOutput.of_choices(["yes", "no"])


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ANY_OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": None},
                }
            },
            OF_SCHEMA,
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": OF_SCHEMA.text}, OF_SCHEMA),
        ({"guided_regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["yes", "no"]}, CHOICES),
        ({"guided_grammar": "start: A"}, StructuredOutput("grammar", "start: A")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICES),
        ({"structured_outputs": {"grammar": "start: A"}}, StructuredOutput("grammar", "start: A")),
        ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, ANY_OBJECT),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, StructuredOutput("regex", "a")),
    ],
)
def test_every_way_to_ask(fields: dict[str, Any], form: StructuredOutput | None) -> None:
    assert output_form(fields) == form
    chat = parse_chat({"messages": [{"role": "user", "content": "a"}], **fields})
    assert chat.options.params.structured_output == form
    assert parse_completion({"prompt": "a", **fields}).options.params.structured_output == form


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "json"}, "'json' but must be one of text, json_object, json_schema"),
        ({"response_format": {"type": ["text"]}}, "must be one of"),
        ({"response_format": {}}, "must be one of"),
        ({"response_format": {"type": "json_schema"}}, "must be an object with name and schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "'schema', which is not a known field",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schemas": SCHEMA}}},
            "'schemas', which is not a known field",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format of kind json_schema is a list of 0 but must be an object",
        ),
        ({"structured_outputs": "a"}, "must be an object with one of"),
        ({"structured_outputs": {}}, "has 0 forms"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "has 2 forms"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "'whitespace_pattern', which is not a known"),
        ({"structured_outputs": {"json_object": 1}}, "must be true or false"),
        ({"guided_regex": 5}, "guided_regex is 5 but must be a string"),
        ({"guided_regex": ""}, "guided_regex of kind regex is empty"),
        ({"guided_choice": "yes"}, "guided_choice of kind choice must be a list"),
        ({"guided_json": "{"}, "guided_json of kind json_schema is no valid JSON"),
        ({"guided_json": {"a": "x" * 200_000}}, "at most 131072"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex are given"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse_completion({"prompt": "a", **fields})
    (*_, name) = fields
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0] == name
    assert len(caught.value.message) < 300


def test_beams_have_no_form() -> None:
    with pytest.raises(InvalidRequestError, match="use_beam_search is true"):
        parse_completion({"prompt": "a", "guided_regex": "a", "use_beam_search": True})
