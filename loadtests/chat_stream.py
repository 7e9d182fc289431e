"""Reads one streamed chat answer, notes when its tokens came, and says whether it was whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any


def events_of(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each server-sent event in a body that comes in blocks of any size."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + bytes(block)).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()


class ChatStream:
    """What one streamed answer brought, and when."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_token = 0.0
        self.last_token = 0.0
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.done = False

    def read(self, blocks: Iterable[bytes]) -> str | None:
        """Consume a body as it comes; returns what is wrong with it, if anything."""
        for event in events_of(blocks):
            if event == b"[DONE]":
                self.done = True
                continue
            try:
                chunk = json.loads(event)
            except ValueError:
                return f"a chunk that is no JSON: {event[:100]!r}"
            if "error" in chunk:
                return f"error chunk: {chunk['error']['message']}"
            self._add(chunk)
        if not self.done:
            return "the stream ended without [DONE]"
        if self.finish_reason is None:
            return "the stream ended without a finish reason"
        return None

    def _add(self, chunk: dict[str, Any]) -> None:
        if chunk.get("usage"):
            self.num_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if "role" not in choice["delta"]:
                self.last_token = time.perf_counter()
                self.first_token = self.first_token or self.last_token
                self.text += choice["delta"].get("content", "")
