"""One request on its way through the ingress, whichever replicas work at it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.generation import Delta, GenerateRequest, GenerationError
from app.channel import wire
from engine.errors import QuireError
from engine.request import FinishReason

EXPECTED_TOKENS = 256
"""Booked for the output of a request that may make more: most stop by themselves. Or what they come to here,
if that is more."""


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Its outputs are what has arrived here, one for each sequence. ``deltas`` is for the client's generator.

    ``interrupt`` tells the running attempt that it is over: the request has ended, the attempt's channel is
    gone, or its replica is leaving. ``faults`` counts replicas that failed under the request.
    """

    request: GenerateRequest
    keys: Sequence[int] = ()  # of the prompt's full blocks, where they are known
    typical: float = EXPECTED_TOKENS  # tokens that a sequence comes to here, on average
    arrived: float = field(default_factory=time.monotonic)  # monotonic seconds
    outputs: list[list[int]] = field(init=False)
    finished: list[bool] = field(init=False)  # of each sequence, whether its end record has come
    cached_tokens: int | None = None
    ended: bool = False
    complete: bool = False  # the final record has come
    deltas: asyncio.Queue[Delta | QuireError] = field(default_factory=asyncio.Queue)
    interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    faults: int = 0
    last_fault: str = ""
    avoid: str = ""  # the replica of the attempt before
    driver: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.request.params.n)]
        self.finished = [False] * self.request.params.n

    @property
    def num_tokens(self) -> int:
        """Tokens that have arrived, of all sequences."""
        return sum(map(len, self.outputs))

    def submission(self, attempt: int) -> wire.Submission:
        """What the next replica needs to go on.

        One sequence goes on as a longer prompt; of several, each goes on by itself. Ranked ones begin again:
        all their tokens come in the last frame, so nothing of them has arrived.
        """
        request = self.request
        single = len(self.outputs) == 1
        begun = not single and any(self.outputs)
        return wire.Submission(
            request_id=request.request_id,
            attempt=attempt,
            token_ids=request.token_ids + self.outputs[0] if single else request.token_ids,
            params=request.params,
            namespace=request.namespace,
            priority=request.priority,
            generated_before=len(self.outputs[0]) if single else 0,
            outputs=tuple(
                None if finished else tuple(output)
                for output, finished in zip(self.outputs, self.finished, strict=True)
            )
            if begun
            else (),
            age_s=time.monotonic() - self.arrived,
        )

    def routing_meta(self, attempt: int) -> dict[str, Any]:
        """What the router needs to choose and book; it adds ``epoch``, and takes out what the engine needs not.

        The prompt counts once, whatever the number of sequences.
        """
        params = self.request.params
        running = [output for output, finished in zip(self.outputs, self.finished, strict=True) if not finished]
        if params.ranked:
            running = [[]] * params.width
        wanted, expected = params.max_tokens, max(EXPECTED_TOKENS, math.ceil(self.typical))
        left = [expected if wanted is None else min(wanted - len(output), expected) for output in running]
        return {
            "request_id": self.request.request_id,
            "attempt": attempt,
            "prefill": len(self.request.token_ids) + sum(map(len, running)),
            "decode": sum(max(tokens, 1) for tokens in left),
            "avoid": self.avoid,
            "keys": self.keys,
            "sequences": len(running),
        }

    def is_due(self, record: wire.Record) -> bool:
        """Whether a record goes on where its sequence is; one that only ends the attempt always does."""
        if record.end in (FinishReason.ABORT, FinishReason.ERROR):
            return True
        sequence = record.sequence
        return (
            sequence < len(self.outputs)
            and not self.finished[sequence]
            and record.index == len(self.outputs[sequence])
        )

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
        """Take the tokens of a record that ``is_due``, or end."""
        if record.end is FinishReason.ERROR:
            self.fail(GenerationError(record.message or "the engine gave the request up"))
            return
        if record.end is FinishReason.ABORT:
            # Nobody here asked for it: the engine is closing the channel.
            self.interrupt.set()
            return
        if self.cached_tokens is None:
            self.cached_tokens = record.cached_tokens
        output = self.outputs[record.sequence]
        index = len(output)
        output.extend(record.token_ids)
        self.finished[record.sequence] = record.end is not None
        if record.final and not all(self.finished):
            self.fail(GenerationError("the engine ended the request before all of its sequences"))
            return
        self.deltas.put_nowait(
            Delta(
                tuple(record.token_ids),
                record.end.value if record.end is not None else None,
                self.cached_tokens,
                index,
                record.sequence,
                record.final,
            )
        )
        if record.final:
            self.ended = self.complete = True
            self.interrupt.set()
