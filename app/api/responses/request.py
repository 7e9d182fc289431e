"""Requests of ``POST /v1/responses``: checked, and translated into one of the chat route.

Nothing is stored, so a request has its whole conversation in ``input``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as encode_text
from typing import Any

from app.api.chat_messages import TextPart, joined_text, listed
from app.api.errors import show
from app.api.json_fields import (
    boolean,
    bounded_text,
    check_names,
    integer,
    known_fields,
    one_of,
    only_known,
    text,
    wrong,
)
from app.api.openai_types import ChatRequest, GenerationOptions
from app.api.tools.tool_use import tool_name
from app.api.translation import chat_request
from engine.errors import InvalidRequestError

SAME = (
    "model", "temperature", "top_p", "user", "stream", "metadata", "service_tier", "prompt_cache_key",
    "safety_identifier", "parallel_tool_calls", "seed", "stop", "top_k", "min_p", "cache_salt", "priority",
)  # fmt: skip
"""Fields that are those of the chat route."""

OWN = (
    "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "reasoning", "truncation",
    "store", "include", "stream_options", "max_tool_calls", "top_logprobs", "prompt_cache_retention",
    "prompt_cache_options",
)  # fmt: skip

MAX_ECHO_BYTES = 1 << 21
"""Most that a response repeats of its request; each event that has the whole response contains it."""

VALUE_BYTES = 16
"""What a value counts there beside its text: it takes time and memory, too."""

MAX_WORD_CHARS = 64
"""Characters of a text that is one of a few words."""

_NOT_LATER = "this server stores no responses, so it cannot answer later"
_STATELESS = "this server stores no responses; send the whole conversation in input"
REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": _NOT_LATER,
    "background_options": _NOT_LATER,
    "prompt": "this server stores no prompts; use instructions and input",
    "moderation": "not supported; leave it out",
    "access_programs": "not supported; leave it out",
    "image": "not supported; leave it out",
    "context_management": "not supported; leave it out",
}
"""Fields with the reason why they are refused."""

_LOGPROBS = "message.output_text.logprobs"
_NEVER_THERE = frozenset({
    "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
})  # fmt: skip
"""Other values of ``include``: what they name, this server's output never has. Reasoning comes as text, and may
be sent back as it came."""

NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of this route by those of the chat route that they become."""

_PARTS = {
    "input_text": TextPart("text", ("prompt_cache_breakpoint",)),
    "output_text": TextPart("text", ("annotations", "logprobs")),
    "text": TextPart("text"),
    "refusal": TextPart("refusal"),
}
"""The parts that the content of a message may have, by their types."""

_REASONING_PARTS = {"reasoning_text": TextPart("text")}

# The fields of objects, by type where there are several; those that are not read have no effect.
_ITEMS = {
    "message": ("role", "content", "id", "status", "phase"),
    "function_call": ("call_id", "name", "arguments", "id", "status", "namespace", "caller"),
    "function_call_output": ("call_id", "output", "id", "status", "name", "namespace", "caller"),
    "reasoning": ("summary", "content", "encrypted_content", "id", "status"),
}
_TOOL = {"function": ("name", "description", "parameters", "strict")}
_TOOL_HINTS = ("allowed_callers", "async", "defer_loading", "output_schema")
_CHOICES = {"function": ("name",), "allowed_tools": ("mode", "tools")}
_FORMS = {"text": (), "json_object": (), "json_schema": ("name", "schema", "description", "strict")}
_REASONING = ("effort", "summary", "generate_summary", "context", "mode")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """The chat request, and the fields that the response repeats."""

    chat: ChatRequest
    echo: bytes  # a JSON object, made once: events contain it, and they are made on the event loop

    @property
    def options(self) -> GenerationOptions:
        """The options of the chat request."""
        return self.chat.options


def parse_responses(body: dict[str, Any]) -> ResponsesRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = known_fields(body, (*SAME, *OWN), REFUSED)
    boolean(fields, "store")
    if (truncation := fields.get("truncation", "disabled")) not in ("auto", "disabled"):
        raise wrong("truncation", truncation, "'auto' or 'disabled'")
    chat: dict[str, Any] = {name: fields[name] for name in SAME if name in fields}
    if truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    chat["messages"] = _messages(fields)
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = integer(fields, "max_output_tokens", 1)
    _add_logprobs(chat, fields)
    if "stream_options" in fields:
        chat["stream_options"] = _stream_options(fields["stream_options"])
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    if "tool_choice" in fields:
        chat["tool_choice"] = _tool_choice(fields["tool_choice"])
    form = _text_format(fields.get("text", {}))
    if form["type"] != "text":
        chat["response_format"] = _response_format(form)
    request = chat_request(chat, NAMES)
    echo = _echo(fields, form)
    _check_echo(echo)
    return ResponsesRequest(request, json.dumps(echo).encode())


def _echo(fields: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    reasoning = fields.get("reasoning")
    if not isinstance(reasoning, dict | None):
        raise wrong("reasoning", reasoning, "an object")
    check_names(reasoning or {}, "reasoning", _REASONING)
    given = {name: (reasoning or {}).get(name) for name in _REASONING}
    wanted = {
        name: bounded_text(value, f"reasoning.{name}", MAX_WORD_CHARS)
        for name, value in given.items()
        if value is not None
    }
    return {
        "background": False,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None, **wanted},
        "service_tier": "default",
        "store": False,
        "temperature": fields.get("temperature", 1.0),
        "text": {"format": form},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": fields.get("top_p", 1.0),
        "truncation": fields.get("truncation", "disabled"),
        "user": fields.get("user"),
    }


def _check_echo(echo: dict[str, Any]) -> None:
    """Refuse a request of which the response would repeat too much."""
    sizes = {name: _size(value, MAX_ECHO_BYTES) for name, value in echo.items()}
    if sum(sizes.values()) > MAX_ECHO_BYTES:
        name = max(sizes, key=lambda name: sizes[name])
        raise InvalidRequestError(
            f"instructions, tools, and other fields that the response repeats exceed {MAX_ECHO_BYTES} bytes "
            f"of JSON together (with {VALUE_BYTES} more for each value), and {name} is the longest; put long "
            "text in input, which is not repeated",
            name,
        )


def _size(value: object, most: int) -> int:
    """The bytes of ``value`` as JSON, about; or some number above ``most``."""
    size, pending = 0, [value]
    while pending and size <= most:
        one = pending.pop()
        size += VALUE_BYTES
        if isinstance(one, str):
            size += len(one) if len(one) > most else len(encode_text(one))
        elif isinstance(one, dict | list):
            if len(one) * VALUE_BYTES > most:
                return most + 1
            pending += one
            if isinstance(one, dict):
                pending += one.values()
    return size


def _add_logprobs(chat: dict[str, Any], fields: dict[str, Any]) -> None:
    include = fields.get("include", [])
    if not isinstance(include, list):
        raise wrong("include", include, "a list of strings")
    for name in include:
        if not isinstance(name, str) or name not in {_LOGPROBS, *_NEVER_THERE}:
            raise InvalidRequestError(
                f"include has {show(name)}, which is not known", "include", "unknown_parameter"
            )
    chat["logprobs"] = _LOGPROBS in include
    if "top_logprobs" in fields:
        most = integer(fields, "top_logprobs", 0)
        if most and _LOGPROBS not in include:
            raise InvalidRequestError(
                f"top_logprobs is {show(most)} but include does not have {_LOGPROBS!r}; add it, or leave "
                "top_logprobs out",
                "top_logprobs",
            )
        chat["top_logprobs"] = most


def _stream_options(options: object) -> dict[str, Any]:
    """As on the chat route, apart from what events of this route have no place for; the last has the usage."""
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if options.get("continuous_usage_stats"):
        raise InvalidRequestError(
            "stream_options.continuous_usage_stats is not supported here; the last event has the usage",
            "stream_options.continuous_usage_stats",
            "unsupported_parameter",
        )
    return options


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "instructions" in fields:
        messages.append({"role": "system", "content": text(fields["instructions"], "instructions")})
    given = fields.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": text(given, "input")}]
    for i, item in enumerate(listed(given, "input", "a string or a list of at least 1 item")):
        _add_item(messages, item, f"input[{i}]")
    for message in messages:
        if message["role"] == "assistant":
            # Only now: a text that grew item by item would be copied for each of thousands.
            message["content"] = "\n".join(message["content"])
    return messages


def _add_item(messages: list[dict[str, Any]], item: object, name: str) -> None:
    """Items of one turn of the assistant become one message."""
    if isinstance(item, dict) and item.get("type") is None:
        item = {**item, "type": "message"}
    found = one_of(item, name, _ITEMS)
    kind = found["type"]
    if kind == "message":
        role = found.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise wrong(f"{name}.role", role, "one of user, assistant, system, developer", "input")
        content = joined_text(found.get("content"), f"{name}.content", _PARTS, param="input")
        if role == "assistant":
            turn = _turn(messages)
            if turn["content"] or content:
                turn["content"].append(content)
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call = {part: text(found.get(part), f"{name}.{part}", "input") for part in ("name", "arguments")}
        call_id = text(found.get("call_id"), f"{name}.call_id", "input")
        _turn(messages).setdefault("tool_calls", []).append({"id": call_id, "function": call})
    elif kind == "function_call_output":
        call_id = text(found.get("call_id"), f"{name}.call_id", "input")
        output = joined_text(found.get("output"), f"{name}.output", _PARTS, param="input")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    else:
        _add_reasoning(messages, found, name)


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, which may have to be added; its content is a list of texts."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _add_reasoning(messages: list[dict[str, Any]], item: dict[str, Any], name: str) -> None:
    thoughts = joined_text(item.get("content") or [], f"{name}.content", _REASONING_PARTS, param="input")
    if thoughts:
        messages.append({"role": "assistant", "content": [], "reasoning_content": thoughts})


def _tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of tools")
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        given = one_of(tool, f"tools[{i}]", _TOOL)
        only_known(given, f"tools[{i}]", ("type", *_TOOL["function"], *_TOOL_HINTS))
        tool_name(given.get("name"), f"tools[{i}].name")
        function = {name: given[name] for name in _TOOL["function"] if name in given}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: object, name: str = "tool_choice") -> object:
    if not isinstance(choice, dict):
        return choice
    if one_of(choice, name, _CHOICES)["type"] == "allowed_tools":
        mode, tools = text(choice.get("mode"), f"{name}.mode", "tool_choice"), choice.get("tools")
        if not isinstance(tools, list):
            raise wrong(f"{name}.tools", tools, "a list of tools", "tool_choice")
        tools = [_tool_choice(entry, f"{name}.tools[{i}]") for i, entry in enumerate(tools)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {
        "type": "function",
        "function": {"name": text(choice.get("name"), f"{name}.name", "tool_choice")},
    }


def _text_format(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong("text", value, "an object with format")
    only_known(value, "text", ("format", "verbosity"))
    form = value.get("format")
    if form is None:
        return {"type": "text"}
    found = one_of(form, "text.format", _FORMS)
    if found["type"] == "json_schema":
        only_known(found, "text.format", ("type", *_FORMS["json_schema"]))
    return found


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form["type"] == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {key: part for key, part in form.items() if key != "type"}}
