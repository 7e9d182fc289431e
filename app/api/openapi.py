"""``GET /openapi.json``: the routes and their parameters, with the names, limits and defaults of the code.

A parameter that the code knows and this page does not describe is there without a description.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from app.api import chat_messages, openai_types, output_options
from app.api.messages import request as messages
from app.api.responses import request as responses
from app.api.tools import tool_use
from engine.kv.block_groups import GroupBy
from engine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
)
from engine.structured_output import MAX_CHARS, MAX_CHOICES

Schema = dict[str, Any]

_BOOLEAN: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_EVENTS = "text/event-stream"


def _integer(low: int | None = None, high: int | None = None, description: str = "") -> Schema:
    return _described(_bounded({"type": "integer"}, low, high), description)


def _number(low: float | None = None, high: float | None = None, description: str = "") -> Schema:
    return _described(_bounded({"type": "number"}, low, high), description)


def _bounded(schema: Schema, low: float | None, high: float | None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {**schema, **{name: bound for name, bound in bounds.items() if bound is not None}}


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema


def _list(of: Schema, least: int = 0, most: int | None = None, description: str = "") -> Schema:
    schema: Schema = {"type": "array", "items": of}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return _described(schema, description)


def _any(*schemas: Schema, description: str = "") -> Schema:
    return _described({"anyOf": list(schemas)}, description)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _nullable(schema: Schema) -> Schema:
    if not schema:
        return schema
    bare = {key: value for key, value in schema.items() if key != "description"}
    return _any(bare, {"type": "null"}, description=schema.get("description", ""))


_STOP: Schema = {"type": "string", "maxLength": openai_types.MAX_STOP_CHARS}
_TOKENS = _list({"type": "integer", "minimum": 0})
_BAD_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": output_options.MAX_BAD_WORD_CHARS}
_PROMPT = _any(_STRING, _TOKENS, _list(_any(_STRING, _TOKENS), 1, openai_types.MAX_PROMPTS))
_PRIORITY = _integer(-openai_types.MAX_PRIORITY, openai_types.MAX_PRIORITY, "Lower values run first.")

PARAMETERS: dict[str, Schema] = {
    "model": _described(_STRING, "A served model, by default the first; any other is a 404."),
    "prompt": _described(_PROMPT, "Text, token ids, or a list of these."),
    "messages": _list(_ref("ChatMessage"), 1, chat_messages.MAX_MESSAGES),
    "max_tokens": _integer(0, description="0 only with `echo` or `prompt_logprobs`."),
    "max_completion_tokens": _integer(0, description="The newer name of `max_tokens`."),
    "min_tokens": _integer(0),
    "temperature": _number(0, 2),
    "top_p": {**_number(None, 1), "exclusiveMinimum": 0},
    "top_k": {"type": "integer"},
    "min_p": _number(0, 1),
    "seed": _integer(-MAX_SEED - 1, MAX_SEED),
    "stop": _any(_STRING, _list(_STOP, 0, openai_types.MAX_STOPS)),
    "stop_token_ids": _list({"type": "integer", "minimum": 0}, 0, MAX_STOP_TOKEN_IDS),
    "ignore_eos": _BOOLEAN,
    "stream": _described(_BOOLEAN, "Server-sent events."),
    "stream_options": _OBJECT,
    "user": _STRING,
    "cache_salt": {"type": "string", "maxLength": openai_types.MAX_SALT_CHARS},
    "n": _integer(1, MAX_SEQUENCES),
    "best_of": _integer(1, MAX_SEQUENCES),
    "use_beam_search": _BOOLEAN,
    "beam_width": _integer(1, MAX_SEQUENCES),
    "length_penalty": _number(-10, 10),
    "early_stopping": _any(_BOOLEAN, {"const": "never"}),
    "priority": _PRIORITY,
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY, "Over the tokens of the output."),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY, "Over the tokens of the output."),
    "repetition_penalty": _number(
        1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "Over the tokens of prompt and output."
    ),
    "logit_bias": {"type": "object", "maxProperties": MAX_BIAS_ENTRIES, "description": "By token id."},
    "bad_words": _list(_BAD_WORD, 0, output_options.MAX_BAD_WORDS),
    "allowed_token_ids": _list({"type": "integer", "minimum": 0}, 1, MAX_ALLOWED_TOKEN_IDS),
    "logprobs": _any(_BOOLEAN, _integer(0, MAX_LOGPROBS), description="Chat: a switch; completions: how many."),
    "top_logprobs": _described({"type": "integer"}, f"Chat, with `logprobs`: up to {MAX_LOGPROBS}."),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "echo": _described(_BOOLEAN, "Completions: the text begins with the prompt."),
    "include_stop_str_in_output": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
    "truncate_prompt_tokens": _integer(
        -1, description="Keep only this many tokens from the end; -1: as many as fit."
    ),
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
    "chat_template_kwargs": {"type": "object", "maxProperties": output_options.MAX_TEMPLATE_OPTIONS},
    "tools": _list(_ref("ChatTool"), 0, tool_use.MAX_TOOLS),
    "tool_choice": _any({"enum": ["none", "auto", "required"]}, _OBJECT),
    "parallel_tool_calls": _BOOLEAN,
    "response_format": _described(_OBJECT, "`type`: text, json_object, or json_schema."),
    "structured_outputs": _described(_OBJECT, "One of `json`, `regex`, `choice`, `grammar`, or `json_object`."),
    "guided_json": _any(_OBJECT, _STRING, _BOOLEAN, description="A JSON schema."),
    "guided_regex": {"type": "string", "minLength": 1, "maxLength": MAX_CHARS["regex"]},
    "guided_choice": _list({"type": "string", "minLength": 1}, 1, MAX_CHOICES),
    "guided_grammar": {"type": "string", "minLength": 1, "maxLength": MAX_CHARS["grammar"]},
}
"""Of the completions and the chat route."""

RESPONSES_PARAMETERS: dict[str, Schema] = {
    **PARAMETERS,
    "input": _any(_STRING, _list(_OBJECT, 1, chat_messages.MAX_MESSAGES), description="Text or items."),
    "instructions": _STRING,
    "max_output_tokens": _integer(1),
    "tools": _list(_OBJECT, 0, tool_use.MAX_TOOLS, "Functions."),
    "text": _described(_OBJECT, "`format`: text, json_object, or json_schema."),
    "store": _described(_BOOLEAN, "Nothing is stored."),
    "truncation": _described({"enum": ["disabled", "auto"]}, "`auto`: as much of the prompt's end as fits."),
    "include": _described(_list(_STRING), "`message.output_text.logprobs`; other known values have no effect."),
    "top_logprobs": _described(
        {"type": "integer"}, f"With `message.output_text.logprobs` in `include`: up to {MAX_LOGPROBS}."
    ),
    "reasoning": _OBJECT,
}

MESSAGES_PARAMETERS: dict[str, Schema] = {
    **PARAMETERS,
    "messages": _list(_OBJECT, 1, chat_messages.MAX_MESSAGES),
    "max_tokens": _integer(1),
    "system": _any(_STRING, _list(_OBJECT)),
    "stop_sequences": _list(_STOP, 0, openai_types.MAX_STOPS),
    "tools": _list(_OBJECT, 0, tool_use.MAX_TOOLS, "With `name`, `description` and `input_schema`."),
    "tool_choice": _OBJECT,
    "metadata": _OBJECT,
    "thinking": _OBJECT,
    "output_config": _OBJECT,
}

_CHAT_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": sorted(chat_messages.ROLES)},
        "content": _any(_STRING, _list(_OBJECT), {"type": "null"}),
        "tool_calls": _nullable(_list(_OBJECT, 0, chat_messages.MAX_CALLS, "Of the assistant.")),
        "tool_call_id": _nullable(_described(_STRING, "Of a tool.")),
    },
    "required": ["role"],
}

_CHAT_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{tool_use.NAME.pattern}$"},
                "description": _STRING,
                "parameters": _described(_OBJECT, "A JSON schema of an object."),
                "strict": _BOOLEAN,
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
}

_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _STRING, "message": _STRING},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}


def _defaults(request: openai_types.CompletionRequest | openai_types.ChatRequest) -> dict[str, Any]:
    """What fields have that a request leaves out, by what became of ``request``, the smallest one."""
    options = request.options
    parts: list[Any] = [options, options.params, options.output]
    renamed = {"include_stop": "include_stop_str_in_output", "token_ids": "return_token_ids"}
    if isinstance(request, openai_types.ChatRequest):
        parts += [request.template, request.tools]
        renamed["parallel"] = "parallel_tool_calls"
    found = {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
    return {
        renamed.get(name, name): value for name, value in found.items() if isinstance(value, bool | int | float)
    }


def _body(
    known: Collection[str],
    required: Collection[str],
    schemas: dict[str, Schema],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Schema:
    """The schema of a body; a field that is ``null`` counts as absent, unless it is required."""
    properties = {
        name: schemas.get(name, {}) if name in required else _nullable(schemas.get(name, {}))
        for name in sorted(known)
    }
    for name in properties.keys() & defaults.keys() - set(required):
        properties[name] = {**properties[name], "default": defaults[name]}
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(required),
        "additionalProperties": False,
    }


def _operation(
    summary: str, *, body: str = "", answer: Schema | None = None, text: str = "", error: str = "Error"
) -> Schema:
    """``answer`` is the schema of an answer in JSON, and ``text`` the type of one that is text."""
    content: Schema = {} if answer is None else {"application/json": {"schema": answer}}
    if text:
        content[text] = {} if text == _EVENTS else {"schema": _STRING}  # each event has a schema of its own
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", **({"content": content} if content else {})},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": _ref(error)}},
            },
        },
    }
    if body:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return operation


def _object(*required: str) -> Schema:
    return {"type": "object", "required": list(required)}


def _paths() -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": _STRING}
    of_model = {"name": "model", "in": "query", "schema": _STRING}
    of_replica = {**of_model, "name": "replica", "required": True}
    of_grouping = {**of_model, "name": "by", "schema": {"enum": list(GroupBy), "default": GroupBy.STATE}}
    reset = "Empty the prefix caches of all engines, or of one model's; requires the option admin_routes."
    anthropic: Any = {"error": "AnthropicError"}
    no_embeddings = _operation("404 with the reason: no model that is served is made for it.")
    no_embeddings["responses"].pop("200")
    chat_answer = _object("id", "object", "created", "model", "choices", "usage")
    return {
        "/": {
            "get": _operation(
                "A page with the served models, an example to copy and a chat box.", text="text/html"
            )
        },
        "/docs": {"get": _operation("This document as a page.", text="text/html")},
        "/openapi.json": {"get": _operation("This document.", answer=_object("openapi", "paths"))},
        "/health": {"get": _operation("Whether an engine can take a request.", answer=_object("status"))},
        "/ping": {
            "get": _operation("The status of /health without a body."),
            "post": _operation("As GET."),
        },
        "/version": {"get": _operation("Quire's version.", answer=_object("version"))},
        "/metrics": {"get": _operation("Metrics in Prometheus's text format.", text="text/plain")},
        "/dashboard": {"get": _operation("The fleet, live, as a page.", text="text/html")},
        "/dashboard/events": {"get": _operation("The live page's data, as server-sent events.", text=_EVENTS)},
        "/dashboard/blocks": {
            "get": {
                **_operation("The KV blocks of a replica.", answer=_object("each", "device", "host")),
                "parameters": [of_model, of_replica, of_grouping],
            }
        },
        "/dashboard/prefixes": {
            "get": {
                **_operation("Shared prefixes: where their prompts went, and why.", answer=_object("prefixes")),
                "parameters": [of_model],
            }
        },
        "/dashboard/requests/{request_id}": {
            "get": {
                **_operation("The life of one request.", answer=_object("requests")),
                "parameters": [{**name, "name": "request_id"}],
            }
        },
        "/v1/models": {"get": _operation("The served models.", answer=_object("object", "data"))},
        "/v1/models/{name}": {
            "get": {**_operation("One model.", answer=_object("id", "object")), "parameters": [name]}
        },
        "/v1/completions": {
            "post": _operation("Continue prompts.", body="CompletionRequest", answer=chat_answer, text=_EVENTS)
        },
        "/v1/chat/completions": {
            "post": _operation("Answer a chat.", body="ChatRequest", answer=chat_answer, text=_EVENTS)
        },
        "/v1/responses": {
            "post": _operation(
                "Answer in the format of OpenAI's Responses; nothing is stored.",
                body="ResponsesRequest",
                answer=_object("id", "object", "status", "output", "usage"),
                text=_EVENTS,
            )
        },
        "/v1/messages": {
            "post": _operation(
                "Answer in Anthropic's format.",
                body="MessagesRequest",
                answer=_object("id", "type", "role", "content", "stop_reason", "usage"),
                text=_EVENTS,
                **anthropic,
            )
        },
        "/v1/messages/count_tokens": {
            "post": _operation(
                "Count the tokens of a request in Anthropic's format.",
                body="CountTokensRequest",
                answer=_object("input_tokens"),
                **anthropic,
            )
        },
        "/v1/embeddings": {"post": no_embeddings},
        "/v1/score": {"post": no_embeddings},
        "/tokenize": {
            "post": _operation(
                "Convert text or messages to tokens.",
                body="TokenizeRequest",
                answer=_object("count", "max_model_len", "tokens"),
            )
        },
        "/detokenize": {
            "post": _operation("Convert tokens to text.", body="DetokenizeRequest", answer=_object("prompt"))
        },
        "/admin/reset_prefix_cache": {
            "post": {**_operation(reset, answer=_OBJECT), "parameters": [of_model]},
        },
    }


def _schemas() -> dict[str, Schema]:
    shared = openai_types.KNOWN | openai_types.OFF.keys()
    message_fields = {*messages.SAME, *messages.OWN}
    hello = [{"role": "user", "content": "a"}]
    of_completion = _defaults(openai_types.parse_completion({"prompt": "a"}))
    of_chat = _defaults(openai_types.parse_chat({"messages": hello}))
    of_response = _defaults(responses.parse_responses({"input": "a"}).chat)
    of_message = _defaults(messages.parse_count_tokens({"messages": hello}))
    return {
        "CompletionRequest": _body({*shared, "prompt"}, ["prompt"], PARAMETERS, of_completion),
        "ChatRequest": _body({*shared, *openai_types.CHAT_ONLY}, ["messages"], PARAMETERS, of_chat),
        "ResponsesRequest": _body(
            {*responses.SAME, *responses.OWN}, ["input"], RESPONSES_PARAMETERS, of_response
        ),
        "MessagesRequest": _body(message_fields, ["messages", "max_tokens"], MESSAGES_PARAMETERS, of_message),
        "CountTokensRequest": _body(message_fields, ["messages"], MESSAGES_PARAMETERS, of_message),
        "TokenizeRequest": _body(
            ["model", "prompt", "messages", "add_special_tokens", "return_token_strs"],
            [],
            {
                **PARAMETERS,
                "prompt": _STRING,
                "add_special_tokens": _BOOLEAN,
                "return_token_strs": _BOOLEAN,
            },
            {"add_special_tokens": True, "return_token_strs": False},
        ),
        "DetokenizeRequest": _body(["model", "tokens"], ["tokens"], {**PARAMETERS, "tokens": _TOKENS}),
        "ChatMessage": _CHAT_MESSAGE,
        "ChatTool": _CHAT_TOOL,
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
    }


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": metadata.version("quire")},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


@cache
def _content() -> bytes:
    return json.dumps(document()).encode()


def openapi() -> Response:
    """The answer to ``GET /openapi.json``."""
    return Response(_content(), media_type="application/json")
