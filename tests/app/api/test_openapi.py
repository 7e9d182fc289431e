"""``/openapi.json`` says what the code does: its routes, its fields, their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from local_server import MODEL
from starlette.routing import Route

from app.api.messages.request import parse_count_tokens, parse_messages_request
from app.api.openai_types import parse_chat, parse_completion
from app.api.openapi import document
from app.api.responses.request import parse_responses
from app.api.routes import ROUTES
from app.api.tokenization import parse_detokenize, parse_tokenize
from engine.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "a"}]
PARSERS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "CompletionRequest": (parse_completion, {"prompt": "a"}),
    "ChatRequest": (parse_chat, {"messages": HELLO}),
    "ResponsesRequest": (parse_responses, {"input": "a"}),
    "MessagesRequest": (parse_messages_request, {"messages": HELLO, "max_tokens": 1}),
    "CountTokensRequest": (parse_count_tokens, {"messages": HELLO}),
    "TokenizeRequest": (parse_tokenize, {"prompt": "a"}),
    "DetokenizeRequest": (parse_detokenize, {"tokens": [1]}),
}
SCHEMAS: dict[str, Any] = document()["components"]["schemas"]


def bare(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the alternative ``null``."""
    found: list[dict[str, Any]] = [s for s in schema.get("anyOf", [schema]) if s != {"type": "null"}]
    return found[0] if len(found) == 1 else {"anyOf": found}


def accepted(name: str, body: dict[str, Any]) -> bool:
    try:
        PARSERS[name][0](body)
    except InvalidRequestError:
        return False
    return True


def test_every_route_is_there_with_its_methods() -> None:
    routes = {
        route.path.replace(":path", ""): {method.lower() for method in route.methods or ()} - {"head"}
        for route in ROUTES
        if isinstance(route, Route)
    }
    routes["/admin/reset_prefix_cache"] = {"post"}  # other methods are a 405 of its own
    assert {path: set(methods) for path, methods in document()["paths"].items()} == routes


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    waiting: list[Any] = [document()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].rpartition("/")[2] in SCHEMAS
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", PARSERS)
def test_exactly_the_fields_there_are_known(name: str) -> None:
    parse, body = PARSERS[name]
    assert accepted(name, body)
    assert set(body) <= set(SCHEMAS[name]["properties"])
    unknown = []
    for field in SCHEMAS[name]["properties"]:
        try:
            parse({**body, field: body.get(field, object())})
        except InvalidRequestError as error:
            unknown += [field] if error.code == "unknown_parameter" else []
    assert unknown == []
    with pytest.raises(InvalidRequestError) as caught:
        parse({**body, "no_such_field": 1})
    assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize("name", PARSERS)
def test_required_fields_are_required(name: str) -> None:
    _, body = PARSERS[name]
    assert set(SCHEMAS[name]["required"]) <= set(body)
    for field in SCHEMAS[name]["required"]:
        assert not accepted(name, {key: value for key, value in body.items() if key != field})


@pytest.mark.parametrize("name", PARSERS)
def test_defaults_change_nothing(name: str) -> None:
    parse, body = PARSERS[name]
    defaults = {
        field: schema["default"] for field, schema in SCHEMAS[name]["properties"].items() if "default" in schema
    }
    for field, value in defaults.items():
        assert parse({**body, field: value}) == parse(body), field
        jsonschema.validate(value, SCHEMAS[name]["properties"][field])
    assert len(defaults) >= {"CompletionRequest": 20, "ChatRequest": 21, "DetokenizeRequest": 0}.get(name, 2)


def test_each_route_has_a_summary_of_its_own() -> None:
    summaries = [
        operation["summary"]
        for path, methods in document()["paths"].items()
        for operation in methods.values()
        if path != "/v1/score"  # refused as /v1/embeddings is
    ]
    assert len(set(summaries)) == len(summaries)


@pytest.mark.parametrize("name", PARSERS)
def test_bounds_of_numbers_are_those_of_the_code(name: str) -> None:
    _, body = PARSERS[name]
    searching = {"use_beam_search": True, "temperature": 0}
    tried = 0
    for field, schema in SCHEMAS[name]["properties"].items():
        bounds = bare(schema)
        whole = bounds.get("type") == "integer"
        if bounds.get("type") not in ("integer", "number") or field == "priority":
            continue
        given = {**body, **(searching if field in ("beam_width", "length_penalty") else {})}
        if name in ("CompletionRequest", "ChatRequest") and field in ("max_tokens", "max_completion_tokens"):
            assert bounds["minimum"] == 0
            given["prompt_logprobs"] = 1  # without it, at least 1
        for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
            if key in bounds:
                bound = bounds[key]
                beyond = bound + step if whole else bound + step * 0.001
                if key != "exclusiveMinimum":
                    assert accepted(name, {**given, field: bound}), (field, bound)
                assert not accepted(name, {**given, field: beyond}), (field, beyond)
                tried += 1
    assert tried >= (0 if "oken" in name else 6)


def test_the_document_and_its_page_are_served(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == document()
    page = http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "https://" not in page.text
    assert "/openapi.json" in page.text


def test_answers_and_errors_have_the_shapes_that_are_promised(http: httpx.Client) -> None:
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": HELLO, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": HELLO},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        promised = document()["paths"][path]["post"]["responses"]
        answer = http.post(path, json={**body, "model": MODEL})
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), promised["200"]["content"]["application/json"]["schema"])
        error = http.post(path, json={**body, "no_such": 1})
        schema = promised["default"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        jsonschema.validate(error.json(), SCHEMAS[schema])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_what_no_decoder_is_made_for_is_not_found_with_the_reason(http: httpx.Client, path: str) -> None:
    error = http.post(path, json={"input": "a"})
    assert error.status_code == 404
    assert error.json()["error"]["code"] == "not_supported_by_model"
    assert "generate text" in error.json()["error"]["message"]
