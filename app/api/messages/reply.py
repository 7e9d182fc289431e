"""Answers of Anthropic's ``POST /v1/messages``: the message, and its events."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from app.api.answers import Answer, Block
from app.api.choices import TextDelta
from app.api.errors import ApiFault
from app.api.reply import encoded
from app.api.sse_event import named_event
from app.api.usage import Usage

PATH = "/v1/messages"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesReply:
    """Writes one message."""

    def __init__(self, request_id: str, model: str) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._answer = Answer()
        self._begun = False

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        content = [_block(block) for block in answer.blocks]
        return encoded({**self._head, "content": content, **_stop(answer), "usage": _usage(usage)})

    def delta(self, delta: TextDelta, usage: Usage) -> bytes:
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            start = {**self._head, **nothing, "usage": {**_usage(usage), "output_tokens": 0}}
            events.append(named_event({"type": "message_start", "message": start}))
        blocks = self._answer.blocks
        known = len(blocks)
        piece = self._answer.add(delta)
        if len(blocks) > known:
            if known:
                events.append(named_event({"type": "content_block_stop", "index": known - 1}))
            start = _empty_block(blocks[-1])
            events.append(named_event({"type": "content_block_start", "index": known, "content_block": start}))
        if piece:
            kind, key = _DELTAS[blocks[-1].kind]
            added = {"type": kind, key: piece}
            event = {"type": "content_block_delta", "index": len(blocks) - 1, "delta": added}
            events.append(named_event(event))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        blocks = self._answer.blocks
        events = [named_event({"type": "content_block_stop", "index": len(blocks) - 1})] if blocks else []
        end = {"type": "message_delta", "delta": _stop(self._answer), "usage": _usage(usage)}
        return b"".join([*events, named_event(end), named_event({"type": "message_stop"})])

    def error(self, fault: ApiFault) -> bytes:
        return f"event: error\ndata: {fault.to_json(PATH)}\n\n".encode()


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {**_empty_block(block), "input": _input(block.text)}
    return {**_empty_block(block), _DELTAS[block.kind][1]: block.text}


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as a value; empty if they are cut short."""
    try:
        found = json.loads(arguments, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _finite(text: str) -> float:
    """The nearest number that JSON may have."""
    value = float(text)
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
