"""Requests of Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``: checked, and translated into
one of the chat route."""

from __future__ import annotations

import json
from typing import Any

from app.api.chat_messages import joined_text, listed
from app.api.json_fields import boolean, check_names, integer, known_fields, one_of, text, wrong
from app.api.openai_types import ChatRequest
from app.api.tools.tool_use import tool_name
from app.api.translation import chat_request

SAME = ("model", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "cache_salt", "priority")
"""Fields that are those of the chat route."""

OWN = (
    "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "metadata", "thinking",
    "output_config", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id",
)  # fmt: skip

REFUSED = {
    "mcp_servers": "this server calls no other servers; give tools",
    "container": "not supported; leave it out",
    "context_management": "not supported; leave it out",
    "diagnostics": "not supported; leave it out",
}
"""Fields with the reason why they are refused."""

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields of this route by those of the chat route that they become."""

# The fields of objects, by type where there are several; those that are not read have no effect.
_TEXT = ("text", "cache_control", "citations")
_USER = {
    "text": _TEXT,
    "tool_result": ("tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
}
_ASSISTANT = {
    "text": _TEXT,
    "tool_use": ("id", "name", "input", "cache_control", "caller", "toolset_name"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
_TOOL = {
    "custom": (
        "name", "description", "input_schema", "cache_control", "strict", "defer_loading", "allowed_callers",
        "eager_input_streaming", "input_examples",
    )
}  # fmt: skip
_THINKING = {
    "enabled": ("budget_tokens", "display", "block_binding"),
    "adaptive": ("display", "block_binding"),
    "between_tools": (),
    "disabled": (),
}
_CHOICES = dict.fromkeys(("auto", "none", "any", "tool"), ("name", "disable_parallel_tool_use"))
_OUTPUT = ("format", "effort", "task_budget")

_CHOSEN = {"auto": "auto", "none": "none", "any": "required"}
"""The chat route's choices of tools, by those of this route."""


def parse_messages_request(body: dict[str, Any]) -> ChatRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    if body.get("max_tokens") is None:
        raise wrong("max_tokens", None, "an integer, at least 1")
    return parse_count_tokens(body)


def parse_count_tokens(body: dict[str, Any]) -> ChatRequest:
    """Like :func:`parse_messages_request`, for a request that generates nothing."""
    fields = known_fields(body, (*SAME, *OWN), REFUSED)
    chat = {"max_completion_tokens": integer(fields, "max_tokens", 1)} if "max_tokens" in fields else {}
    return _chat(fields, chat)


def _chat(fields: dict[str, Any], chat: dict[str, Any]) -> ChatRequest:
    chat |= {name: fields[name] for name in SAME if name in fields}
    chat["messages"] = _messages(fields)
    last = chat["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        chat["continue_final_message"] = True
    if "stop_sequences" in fields:
        if not isinstance(fields["stop_sequences"], list):
            raise wrong("stop_sequences", fields["stop_sequences"], "a list of strings")
        chat["stop"] = fields["stop_sequences"]
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    if "tool_choice" in fields:
        _add_choice(chat, fields["tool_choice"])
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise wrong("metadata", metadata, "an object")
    check_names(metadata, "metadata", ("user_id",))
    if metadata.get("user_id") is not None:
        chat["user"] = text(metadata["user_id"], "metadata.user_id")
    if "thinking" in fields:
        thinking = one_of(fields["thinking"], "thinking", _THINKING)["type"]
        if thinking in ("enabled", "disabled"):
            chat["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    form = _format(fields.get("output_config", {}))
    if form is not None:
        chat["response_format"] = form
    return chat_request(chat, NAMES)


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "system" in fields:
        messages.append({"role": "system", "content": joined_text(fields["system"], "system")})
    for i, message in enumerate(listed(fields.get("messages"), "messages")):
        name = f"messages[{i}]"
        if not isinstance(message, dict):
            raise wrong(name, message, "an object with role and content")
        check_names(message, name, ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            messages.append(_assistant(content, f"{name}.content"))
        elif role in ("user", "system"):
            messages += _user(role, content, f"{name}.content")
        else:
            raise wrong(f"{name}.role", role, "user or assistant")
    return messages


def _user(role: str, content: object, name: str) -> list[dict[str, Any]]:
    """One message for each result of a tool, and one for the text before or after."""
    if not isinstance(content, list):
        return [{"role": role, "content": joined_text(content, name)}]
    if not content:
        raise wrong(name, content, "a string or a list of blocks")
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        found = one_of(block, f"{name}[{i}]", _USER)
        if found["type"] == "text":
            part = text(found.get("text"), f"{name}[{i}].text")
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"].append(part)
            else:
                messages.append({"role": role, "content": [part]})
            continue
        call_id = text(found.get("tool_use_id"), f"{name}[{i}].tool_use_id")
        result = joined_text(found.get("content") or "", f"{name}[{i}].content")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": [result]})
    # Joined at the end: a text that grew block by block would be copied for each of thousands.
    return [{**message, "content": "\n".join(message["content"])} for message in messages]


def _assistant(content: object, name: str) -> dict[str, Any]:
    if not isinstance(content, list):
        return {"role": "assistant", "content": joined_text(content, name)}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        where = f"{name}[{i}]"
        found = one_of(block, where, _ASSISTANT)
        if found["type"] == "text":
            texts.append(text(found.get("text"), f"{where}.text"))
        elif found["type"] == "thinking":
            thoughts.append(text(found.get("thinking"), f"{where}.thinking"))
        elif found["type"] == "tool_use":
            calls.append(_call(found, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], name: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong(f"{name}.input", arguments, "an object")
    function = {
        "name": text(block.get("name"), f"{name}.name"),
        "arguments": text(json.dumps(arguments, ensure_ascii=False), f"{name}.input"),
    }
    return {"id": text(block.get("id"), f"{name}.id"), "function": function}


def _tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of tools")
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") is None:
            tool = {**tool, "type": "custom"}
        one_of(tool, f"tools[{i}]", _TOOL)
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise wrong(f"tools[{i}].input_schema", schema, "a JSON schema, which is an object", "tools")
        name = tool_name(tool.get("name"), f"tools[{i}].name")
        function = {"name": name, "description": tool.get("description"), "parameters": schema}
        found.append({"type": "function", "function": function})
    return found


def _add_choice(chat: dict[str, Any], choice: object) -> None:
    found = one_of(choice, "tool_choice", _CHOICES)
    if found["type"] == "tool":
        name = text(found.get("name"), "tool_choice.name", "tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        chat["tool_choice"] = _CHOSEN[found["type"]]
    chat["parallel_tool_calls"] = not boolean(found, "disable_parallel_tool_use", "tool_choice.")


def _format(config: object) -> dict[str, Any] | None:
    if not isinstance(config, dict):
        raise wrong("output_config", config, "an object")
    check_names(config, "output_config", _OUTPUT)
    form = config.get("format")
    if form is None:
        return None
    found = one_of(form, "output_config.format", {"json_schema": ("schema",)})
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": found.get("schema")}}
