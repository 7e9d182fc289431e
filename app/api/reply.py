"""How a route writes a response: whole, or as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from app.api.answers import Answer
from app.api.choices import TextDelta
from app.api.errors import ApiFault
from app.api.usage import Usage


def encoded(value: dict[str, Any]) -> bytes:
    """``value`` as JSON; half of a surrogate pair becomes its escape, which JSON may have."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


class Reply(Protocol):
    """Writes one response; of a streamed one, each method returns events as bytes."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The response that is not streamed, as JSON."""

    def delta(self, delta: TextDelta, usage: Usage) -> bytes:
        """One delta; ``usage`` is the usage so far."""

    def end(self, usage: Usage) -> bytes:
        """After the last delta."""

    def error(self, fault: ApiFault) -> bytes:
        """Instead of the end, once events have been sent."""
