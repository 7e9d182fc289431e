"""What a chat answer consists of, in the order of the model's text."""

from __future__ import annotations

import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call ``index`` of one answer: the first has ``id`` and ``name``, the others ``arguments``."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""  # a piece of JSON text


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: one of content, reasoning, and a call."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


def new_call_id() -> str:
    """An ID that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"
