"""What is known of one request: measured as its tokens come, logged at its end, and charged to its key."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.api.audit_log import audit
from app.api.caller import Caller
from app.api.errors import fault_code
from app.api.usage import Usage
from app.logs import FIELDS
from app.metrics.request_figures import RequestFigures

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """Filled from admission on; ``outcome`` is ``ok``, ``disconnected``, or an error's code."""

    caller: Caller
    route: str
    stream: bool
    figures: RequestFigures = field(default_factory=RequestFigures)
    usage: Usage = field(default_factory=Usage)
    finish_reasons: list[str] = field(default_factory=list)
    outcome: str = "disconnected"  # until it ends otherwise
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # monotonic seconds
    last_token: float = 0.0  # likewise
    choices: dict[int, tuple[int, float]] = field(default_factory=dict)  # of each: tokens, when the last came

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

    def token(self, choice: int, num_tokens: int, finish_reason: str | None) -> None:
        """A choice has so many tokens now, or has ended."""
        now = time.monotonic()
        before = self.choices.get(choice)
        if before is None:
            self.choices[choice] = num_tokens, now
            if self.first_token is None:
                self.first_token = self.last_token = now
                self.figures.first_token.add(now - self.started)
        elif num_tokens > before[0]:
            self.choices[choice] = num_tokens, now
            self.last_token = now
            new = num_tokens - before[0]
            self.figures.inter_token.add((now - before[1]) / new, new)
        if finish_reason is not None:
            self.finish_reasons.append(finish_reason)

    def end(self) -> None:
        """The response has ended: count it, write the line, and charge the key."""
        self._count()
        if self.caller.limits is not None:
            self.caller.limits.release(self.usage.prompt_tokens + self.usage.completion_tokens, self.stream)
        fields = self._fields()
        logger.info("request ended", extra={FIELDS: fields})
        audit(fields, self.caller.address)

    def _count(self) -> None:
        figures = self.figures
        figures.ended[self.route, self.outcome] += 1
        if self.caller.limits is not None:
            key = self.caller.limits.key.id
            figures.key_requests[key] += 1
            figures.key_prompt_tokens[key] += self.usage.prompt_tokens
            figures.key_cached_tokens[key] += self.usage.cached_tokens
            figures.key_output_tokens[key] += self.usage.completion_tokens
        if self.outcome != "ok" or self.first_token is None:
            return
        figures.whole.add(time.monotonic() - self.started)
        figures.prompt_tokens.add(self.usage.prompt_tokens)
        figures.output_tokens.add(self.usage.completion_tokens)
        further = self.usage.completion_tokens / len(self.choices) - 1
        if further > 0:
            figures.per_output_token.add((self.last_token - self.first_token) / further)

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
