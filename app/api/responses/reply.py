"""Answers of ``POST /v1/responses``: the object, and events in OpenAI's order, each with a number."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from app.api.answers import Answer
from app.api.choices import TextDelta
from app.api.errors import ApiFault
from app.api.logprobs import TokenReport
from app.api.reply import encoded
from app.api.sse_event import named_event
from app.api.usage import Usage

REPEATS = 4
"""The events that end a text, its part, its item and the response each contain all log probabilities again."""

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}


class ResponsesReply:
    """Writes one response; ``echo`` has the fields that repeat the request, as a JSON object.

    ``report`` describes the tokens of its texts, if the request asks for it.
    """

    def __init__(self, request_id: str, model: str, echo: bytes, report: TokenReport | None = None) -> None:
        self._report = report
        self._described: defaultdict[int, int] = defaultdict(int)  # details of each text that have entries
        self._entries: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._id = request_id
        self._model = model
        self._repeated = b"," + echo[1:]
        self._created = int(time.time())
        self._sent = 0  # events
        self._answer = Answer()

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (self._answer,) = answers
        return encoded(self._response(self._status, usage)).removesuffix(b"}") + self._repeated

    def delta(self, delta: TextDelta, usage: Usage) -> bytes:
        events = self._opening()
        blocks = self._answer.blocks
        known = len(blocks)
        piece = self._answer.add(delta)
        if len(blocks) > known:
            if known:
                events += self._done(known - 1)
            events += self._added(known)
        if piece:
            events.append(self._delta(len(blocks) - 1, piece))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        blocks = self._answer.blocks
        last = self._done(len(blocks) - 1) if blocks else []
        status = self._status
        return b"".join([*last, self._whole(f"response.{status}", self._response(status, usage))])

    def error(self, fault: ApiFault) -> bytes:
        """After which nothing comes."""
        error = {"code": "server_error", "message": fault.message}
        opening = self._opening()  # clients take no other event first
        response = {**self._response("failed"), "error": error}
        return b"".join([*opening, self._whole("response.failed", response)])

    def _opening(self) -> list[bytes]:
        """The events before all others, unless they have been sent."""
        if self._sent:
            return []
        kinds = ("response.created", "response.in_progress")
        return [self._whole(kind, self._response("in_progress")) for kind in kinds]

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        done = usage is not None
        blocks = self._answer.blocks if done or status == "failed" else []
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": [self._item(i, "completed") for i in range(len(blocks))],
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sent
        self._sent += 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _whole(self, kind: str, response: dict[str, Any]) -> bytes:
        """An event with the whole response; what it repeats is not encoded again for each."""
        event = self._event(kind, response=response)
        return b"".join((event.removesuffix(b"}}\n\n"), self._repeated, b"}\n\n"))

    def _item_id(self, index: int) -> str:
        return f"{_PREFIXES[self._answer.blocks[index].kind]}_{self._id}_{index}"

    def _item(self, index: int, status: str) -> dict[str, Any]:
        block = self._answer.blocks[index]
        last = index + 1 == len(self._answer.blocks)
        if status == "completed" and last and self._status == "incomplete":
            status = "incomplete"
        begun = status != "in_progress"
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        if block.kind == "call":
            called = {"call_id": block.id, "name": block.name, "arguments": block.text if begun else ""}
            return {**item, "type": "function_call", **called}
        content = [self._part(index)] if begun else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _added(self, index: int) -> list[bytes]:
        block = self._answer.blocks[index]
        item = self._item(index, "in_progress")
        events = [self._event("response.output_item.added", output_index=index, item=item)]
        if block.kind != "call":
            where = self._where(index)
            events.append(self._event("response.content_part.added", **where, part=_part(block.kind, "", [])))
        return events

    def _delta(self, index: int, piece: str) -> bytes:
        block = self._answer.blocks[index]
        more: dict[str, Any] = {}
        if block.kind == "text":
            told = len(self._entries[index])
            more = {"logprobs": self._logprobs(index)[told:]}
        return self._event(_DELTAS[block.kind], **self._where(index), delta=piece, **more)

    def _done(self, index: int) -> list[bytes]:
        block = self._answer.blocks[index]
        where = self._where(index)
        if block.kind == "call":
            kind = "response.function_call_arguments.done"
            events = [self._event(kind, **where, name=block.name, arguments=block.text)]
        else:
            more: dict[str, Any] = {"logprobs": self._logprobs(index)} if block.kind == "text" else {}
            done = _DELTAS[block.kind].removesuffix("delta") + "done"
            events = [
                self._event(done, **where, text=block.text, **more),
                self._event("response.content_part.done", **where, part=self._part(index)),
            ]
        item = self._item(index, "completed")
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _part(self, index: int) -> dict[str, Any]:
        block = self._answer.blocks[index]
        return _part(block.kind, block.text, self._logprobs(index) if block.kind == "text" else [])

    def _logprobs(self, index: int) -> list[dict[str, Any]]:
        """Entries for the tokens of a text, each made once."""
        entries = self._entries[index]
        if self._report is not None:
            details = self._answer.blocks[index].details
            for one in details[self._described[index] :]:
                entries += self._report.of_tokens(one)
            self._described[index] = len(details)
        return entries

    def _where(self, index: int) -> dict[str, Any]:
        where = {"item_id": self._item_id(index), "output_index": index}
        return where if self._answer.blocks[index].kind == "call" else {**where, "content_index": 0}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
