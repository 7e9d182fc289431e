"""Messages and tools as a chat template takes them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from app.api.chat_messages import ChatMessage, ToolCall
from app.api.json_fields import texts_in
from app.api.json_pieces import parse_json
from app.api.tools.hermes import CLOSE, OPEN
from app.api.tools.tool_use import Tool

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")

_SECTION = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

To call one, answer with its name and its arguments as JSON, like this, and nothing after it:
{open}
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
{close}
The results come back in <tool_response></tool_response>."""


def with_values(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the arguments of calls as values, whose texts are what a template may write."""
    return [
        replace(message, tool_calls=tuple(replace(call, arguments=_value(call)) for call in message.tool_calls))
        if message.tool_calls
        else message
        for message in messages
    ]


def turns(messages: Sequence[ChatMessage], *, short_ids: bool) -> list[dict[str, Any]]:
    """The turns for a template with tools of messages ``with_values``.

    ``short_ids``: IDs of nine characters, as Mistral demands.
    """
    return [_turn(message, short_ids) for message in messages]


def plain_turns(messages: Sequence[ChatMessage], tools: Sequence[Tool], role: str) -> list[dict[str, Any]]:
    """The turns for a template without tools: these are described in the first message of ``role``.

    Calls and their results become text in the form that the description asks for.
    """
    found: list[dict[str, Any]] = []
    for is_tool, row in groupby(messages, lambda message: message.role == "tool"):
        if is_tool:
            results = (f"<tool_response>\n{message.content}\n</tool_response>" for message in row)
            found.append({"role": "user", "content": "\n".join(results)})
        else:
            found += [{"role": message.role, "content": _with_calls(message)} for message in row]
    if tools:
        _add_section(found, _section(tools), role)
    return found


def _turn(message: ChatMessage, short_ids: bool) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": _short_id(call.id) if short_ids else call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        turn["tool_call_id"] = _short_id(message.tool_call_id) if short_ids else message.tool_call_id
        if message.name:
            turn["name"] = message.name
    return turn


def _value(call: ToolCall) -> str | dict[str, Any]:
    """The arguments as a value, which templates write in their own way.

    What is no JSON object stays text, and so does one with an escape for half of a surrogate pair: no tokenizer
    takes what that stands for.
    """
    if not isinstance(call.arguments, str):
        return call.arguments
    try:
        found = parse_json(call.arguments)
        if isinstance(found, dict):
            for one in texts_in(found):
                one.encode("utf-8")
            return found
    except (ValueError, RecursionError):
        pass
    return call.arguments


def _short_id(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:9]


def _with_calls(message: ChatMessage) -> str:
    calls = [
        f'{OPEN}\n{{"name": {_quoted(call.name)}, "arguments": {call.arguments}}}\n{CLOSE}'
        for call in message.tool_calls
    ]
    return "\n".join([message.content] * bool(message.content or not calls) + calls)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _section(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.to_dict()["function"], ensure_ascii=False) for tool in tools)
    return _SECTION.format(tools=lines, open=OPEN, close=CLOSE)


def _add_section(found: list[dict[str, Any]], section: str, role: str) -> None:
    first = next((turn for turn in found if turn["role"] == role), None)
    if role == "system" and (first is None or first is not found[0]):
        found.insert(0, {"role": "system", "content": section})
    elif first is None:
        found.insert(0, {"role": role, "content": section})
    elif role == "system":
        first["content"] += f"\n\n{section}"
    else:
        first["content"] = f"{section}\n\n{first['content']}"
