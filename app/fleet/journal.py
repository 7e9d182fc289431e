"""What happens to one request on its way through the fleet, for its log line and its trace."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.routing.replica_state import Booking, Compared
from engine.request import RequestStats


@dataclass(slots=True)
class AttemptNotes:
    """One attempt; times are monotonic seconds of this process, ``None`` until then."""

    began: float = field(default_factory=time.monotonic)
    replica: str = ""  # of the booking, if there was one
    reason: str = ""  # what decided for it
    compared: tuple[Compared, ...] = ()  # what it would have cost there, and elsewhere
    predicted_tokens: int = 0  # of the prompt, that the router expected in its cache
    placed: float | None = None
    first_token: float | None = None
    ended: float | None = None
    tokens_before: int = 0  # that the request had from earlier attempts
    queue_s: float | None = None
    prefill_s: float | None = None
    preemptions: int = 0
    generated: int = 0  # tokens in all sequences, if the engine ranks them
    failure: str = ""  # why it ended early; empty if it did not
    planned: bool = False  # the request was moved: its replica stops, or is cordoned

    def book(self, booking: Booking) -> None:
        """Note where it runs."""
        self.replica, self.reason, self.placed = booking.route.replica, booking.reason, booking.placed_at
        self.predicted_tokens, self.compared = booking.cached, booking.compared

    def engine_stats(self, stats: RequestStats, ended: bool) -> None:
        """What the engine says with a delta: the last of a sequence, if that has ``ended``."""
        if stats.queue_s is not None:
            self.queue_s, self.prefill_s = stats.queue_s, stats.prefill_s
        self.generated = max(self.generated, stats.generated)
        if ended:
            self.preemptions += stats.preemptions


@dataclass(slots=True, eq=False)
class Journal:
    """What the ingress notes of one prompt."""

    arrived: float = 0.0  # monotonic seconds; from then on it is in the queue
    attempts: list[AttemptNotes] = field(default_factory=list)

    @property
    def begun(self) -> AttemptNotes | None:
        """The first attempt that has a token: of it are the times that count for the request."""
        return next((attempt for attempt in self.attempts if attempt.first_token is not None), None)

    @property
    def generated(self) -> int:
        """Tokens in all sequences, if the engine ranks them, of one attempt: no client pays for retries."""
        return max((attempt.generated for attempt in self.attempts), default=0)

    @property
    def moves(self) -> int:
        """Attempts that ended because the request was moved."""
        return sum(attempt.planned for attempt in self.attempts)

    @property
    def retries(self) -> int:
        """Attempts that ended early by themselves, and after which another one began."""
        return sum(bool(attempt.failure) and not attempt.planned for attempt in self.attempts[:-1])
