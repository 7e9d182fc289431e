"""What is known of one request: written to the log at its end, and charged to its key."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.api.caller import Caller
from app.api.errors import fault_code
from app.api.usage import Usage
from app.logs import FIELDS

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """Filled from admission on; ``outcome`` is ``ok``, ``disconnected``, or an error's code."""

    caller: Caller
    route: str
    stream: bool
    usage: Usage = field(default_factory=Usage)
    finish_reasons: list[str] = field(default_factory=list)
    outcome: str = "disconnected"  # until it ends otherwise
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # monotonic seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the work; notes how it ends."""
        with self.failing():
            yield
        self.outcome = "ok"

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Around what precedes the work; notes an error."""
        try:
            yield
        except Exception as error:
            self.outcome = fault_code(error)
            raise

    def token(self, finish_reason: str | None) -> None:
        """A choice has new tokens, or has ended."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        if finish_reason is not None:
            self.finish_reasons.append(finish_reason)

    def end(self) -> None:
        """The response has ended: write the line, and charge the key."""
        if self.caller.limits is not None:
            self.caller.limits.release(self.usage.prompt_tokens + self.usage.completion_tokens)
        logger.info("request ended", extra={FIELDS: self._fields()})

    def _fields(self) -> dict[str, Any]:
        now = time.monotonic()
        first = "none" if self.first_token is None else round(1000 * (self.first_token - self.started), 1)
        return {
            "request_id": self.caller.request_id,
            **({} if self.caller.limits is None else {"key": self.caller.limits.key.id}),
            "route": self.route,
            "stream": self.stream,
            "outcome": self.outcome,
            "finish": ",".join(sorted(set(self.finish_reasons))) or "none",
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.usage.completion_tokens,
            "first_token_ms": first,
            "total_ms": round(1000 * (now - self.started), 1),
        }
