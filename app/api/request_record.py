"""What is known about one request: measured as its tokens arrive, logged at its end, and charged to its key."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.api.audit_log import audit
from app.api.caller import Caller
from app.api.errors import REFUSED, outcome_of
from app.api.request_trace import RequestTracer
from app.api.usage import Usage
from app.fleet.journal import Journal
from app.logs import FIELDS
from app.metrics.request_figures import RequestFigures

CLIENT_LEFT = 499
"""The status in the log of a request whose client left before its end, as nginx has it."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """Filled from admission on; ``outcome`` is ``ok``, ``disconnected``, or an error's code."""

    caller: Caller
    route: str
    stream: bool
    figures: RequestFigures = field(default_factory=RequestFigures)
    tracer: RequestTracer | None = None
    model: str = ""
    journals: list[Journal] = field(default_factory=list)  # of each prompt, once they are known
    usage: Usage = field(default_factory=Usage)
    ranked: bool = False  # its choices are the best of all sequences, and known only at its end
    drawn: Counter[int] = field(default_factory=Counter)  # tokens of each sequence, where all of them come here
    drawn_in_all: int = 0  # what remains of it once the request has ended
    finish_reasons: list[str] = field(default_factory=list)
    outcome: str = "disconnected"  # until it ends otherwise
    status: int = CLIENT_LEFT  # of the response; a stream that has begun has 200
    begun: bool = False  # whether the headers of a stream are out
    started: float = field(default_factory=time.monotonic)
    arrived: float = field(default_factory=time.time)  # the same moment, in seconds since 1970
    first_token: float | None = None  # monotonic seconds
    last_token: float = 0.0  # likewise
    choices: dict[int, tuple[int, float]] = field(default_factory=dict)  # of each: tokens, when the last came
    ended: float | None = None  # likewise
    trace_id: str = ""  # if it is traced

    @property
    def request_id(self) -> str:
        """The ID that its client knows."""
        return self.caller.request_id

    @property
    def parts(self) -> int:
        """Its prompts, of which each has a journal."""
        return max(len(self.journals), 1)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engines have generated for it, in all sequences, of which it returns the best.

        If the engines rank them, they report the number, while the tokens come at the end.
        """
        if self.drawn_in_all or self.drawn:
            return self.drawn_in_all or self.drawn.total()
        if self.ranked:
            return sum(journal.generated for journal in self.journals)
        return self.usage.completion_tokens

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for the work; notes how it ends."""
        with self.failing():
            yield
        self.outcome, self.status = "ok", 200

    @contextmanager
    def answering(self) -> Iterator[None]:
        """:meth:`running` within a response, whose errors no route sees: counts the refusals among them."""
        try:
            with self.running():
                yield
        except Exception as error:
            code, status = outcome_of(error)
            if status in REFUSED:
                self.figures.refused[code] += 1
            raise

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A context for what precedes the work; notes an error."""
        try:
            yield
        except Exception as error:
            self.outcome, self.status = outcome_of(error)
            if self.begun:
                self.status = 200
            raise

    def begin(self) -> None:
        """The headers of a stream go out, with status 200."""
        self.begun = True

    def token(self, choice: int, num_tokens: int, finish_reason: str | None) -> None:
        """Note how many tokens a choice has now, or that it has ended."""
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
            if not self.ranked:  # else it was generated long ago
                new = num_tokens - before[0]
                self.figures.inter_token.add((now - before[1]) / new, new)
        if finish_reason is not None:
            self.finish_reasons.append(finish_reason)

    def end(self) -> None:
        """The response has ended: count it, trace it, write the line, and charge the key."""
        now = self.ended = time.monotonic()
        self._count(now)
        if self.caller.limits is not None:
            self.caller.limits.release(self.usage.prompt_tokens + self.generated_tokens, self.stream)
        fields = self._fields(now)
        if self.tracer is not None:
            traced = self.tracer.export(fields, self.caller, self.journals, self.started, now)
            self.trace_id = traced.get("trace_id", "")
            fields |= traced
        logger.info("request ended", extra={FIELDS: fields})
        audit(fields, self.caller.address)
        # It is remembered for a while, without what there may be thousands of.
        self.choices.clear()
        self.drawn_in_all = self.drawn.total()
        self.drawn.clear()
        self.finish_reasons = sorted(set(self.finish_reasons))

    def _count(self, now: float) -> None:
        figures = self.figures
        figures.ended[self.route, self.outcome] += 1
        if self.caller.limits is not None:
            key = self.caller.limits.key.id
            figures.key_requests[key] += 1
            figures.key_prompt_tokens[key] += self.usage.prompt_tokens
            figures.key_cached_tokens[key] += self.usage.cached_tokens
            figures.key_output_tokens[key] += self.generated_tokens
        if self.outcome != "ok" or self.first_token is None:
            return
        figures.whole.add(now - self.started)
        figures.prompt_tokens.add(self.usage.prompt_tokens)
        figures.output_tokens.add(self.usage.completion_tokens)
        further = self.usage.completion_tokens / len(self.choices) - 1
        if further > 0 and not self.ranked:
            figures.per_output_token.add((self.last_token - self.first_token) / further)

    def _fields(self, now: float) -> dict[str, Any]:
        first = "none" if self.first_token is None else _ms(self.first_token - self.started)
        return {
            "request_id": self.caller.request_id,
            **({} if self.caller.limits is None else {"key": self.caller.limits.key.id}),
            "model": self.model,
            "route": self.route,
            "stream": self.stream,
            "outcome": self.outcome,
            "status": self.status,
            "finish": ",".join(sorted(set(self.finish_reasons))) or "none",
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.usage.completion_tokens,
            "generated_tokens": self.generated_tokens,
            "first_token_ms": first,
            "total_ms": _ms(now - self.started),
            **self._of_engines(),
        }

    def _of_engines(self) -> dict[str, Any]:
        """Where it ran, and how; of several prompts, the times are those of the first to get a token."""
        attempts = [attempt for journal in self.journals for attempt in journal.attempts]
        if not attempts:
            return {}
        begun = min(
            (journal.begun for journal in self.journals if journal.begun is not None),
            key=lambda attempt: attempt.first_token or 0.0,
            default=None,
        )
        queue_s = None if begun is None else begun.queue_s
        prefill_s = None if begun is None else begun.prefill_s
        replicas = dict.fromkeys(attempt.replica for attempt in attempts if attempt.replica)
        return {
            "replica": ",".join(replicas) or "none",
            "queue_ms": "none" if queue_s is None else _ms(queue_s),
            "prefill_ms": "none" if prefill_s is None else _ms(prefill_s),
            "moves": sum(journal.moves for journal in self.journals),
            "retries": sum(journal.retries for journal in self.journals),
            "preemptions": sum(attempt.preemptions for attempt in attempts),
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
