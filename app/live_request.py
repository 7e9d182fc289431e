"""One request on its way through the ingress, whichever replicas work at it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from app import wire
from app.generation import Delta, GenerateRequest, GenerationError
from engine.errors import QuireError
from engine.request import FinishReason

EXPECTED_TOKENS = 256
"""Booked for the output of a request that may make more: most stop by themselves."""


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Its output is what has arrived here. ``deltas`` is read by the client's generator.

    ``interrupt`` tells the running attempt that it is over: the request has ended, the attempt's channel is
    gone, or its replica is leaving. ``faults`` counts replicas that failed under the request.
    """

    request: GenerateRequest
    arrived: float = field(default_factory=time.monotonic)  # monotonic seconds
    output: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    ended: bool = False
    complete: bool = False  # the end record has come
    deltas: asyncio.Queue[Delta | QuireError] = field(default_factory=asyncio.Queue)
    interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    faults: int = 0
    last_fault: str = ""
    avoid: str = ""  # the replica of the attempt before
    driver: asyncio.Task[None] | None = None

    def submission(self, attempt: int) -> wire.Submission:
        """What the next replica needs to go on."""
        request = self.request
        return wire.Submission(
            request_id=request.request_id,
            attempt=attempt,
            token_ids=request.token_ids + self.output,
            params=request.params,
            namespace=request.namespace,
            priority=request.priority,
            generated_before=len(self.output),
            age_s=time.monotonic() - self.arrived,
        )

    def routing_meta(self, attempt: int) -> dict[str, Any]:
        """What the router needs to choose and book; it adds ``epoch``."""
        wanted = self.request.params.max_tokens
        left = EXPECTED_TOKENS if wanted is None else min(wanted - len(self.output), EXPECTED_TOKENS)
        return {
            "request_id": self.request.request_id,
            "attempt": attempt,
            "prefill": len(self.request.token_ids) + len(self.output),
            "decode": max(left, 1),
            "avoid": self.avoid,
        }

    def fault(self, reason: str) -> None:
        """A replica failed under this request."""
        self.faults += 1
        self.last_fault = reason

    def fail(self, error: QuireError) -> None:
        """End it with an error, unless it has ended."""
        if not self.ended:
            self.ended = True
            self.deltas.put_nowait(error)
            self.interrupt.set()

    def driver_ended(self, driver: asyncio.Task[None]) -> None:
        """Nothing else would end a request whose driver is gone."""
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            logger.error("request %s lost its driver", self.request.request_id, exc_info=error)
        self.fail(GenerationError("an internal error ended this request; the log says more"))

    def accept(self, record: wire.Record) -> None:
        """Take the tokens of a record whose offset is the one that is due, or end."""
        if record.end is FinishReason.ERROR:
            self.fail(GenerationError(record.message or "the engine gave the request up"))
            return
        if record.end is FinishReason.ABORT:
            # Nobody here asked for it: the engine is closing the channel.
            self.interrupt.set()
            return
        if self.cached_tokens is None:
            self.cached_tokens = record.cached_tokens
        index = len(self.output)
        self.output.extend(record.token_ids)
        reason = record.end.value if record.end is not None else None
        self.deltas.put_nowait(Delta(tuple(record.token_ids), reason, self.cached_tokens, index))
        if record.end is not None:
            self.ended = self.complete = True
            self.interrupt.set()
