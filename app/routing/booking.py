"""What is booked: the work of one attempt, on one route; and what a replica's bookings add up to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.routing import cost
from app.routing.load import PREFILL_RATE, LoadReport
from engine.errors import QuireError


class NoRouteError(QuireError):
    """No replica has an open channel at the moment, or the attempt to be routed is over."""


SHORTEST_CLAIM_S, LONGEST_CLAIM_S = 0.5, 10.0


class Route(NamedTuple):
    """An open channel: attempts live and die with exactly this one."""

    replica: str
    epoch: int


class Booking(NamedTuple):
    """Work of one attempt on one route, in tokens: ``prefill`` is to be computed, ``cached`` is found there."""

    request_id: str
    attempt: int
    route: Route
    prefill: int
    decode: int
    cached: int = 0


@dataclass(slots=True, eq=False)
class Standing:
    """A replica as a choice sees it; owned by the ledger.

    ``route`` is the open one, ``reported`` when ``load`` came. ``tokens`` and ``count`` are of the bookings
    that live there. ``terms`` is ``None`` when out of date.
    """

    replica: str
    route: Route | None = None
    load: LoadReport | None = None
    reported: float = 0.0
    booked: cost.Booked = field(default_factory=cost.Booked)
    tokens: int = 0
    count: int = 0
    speed: float = 1.0
    terms: cost.Terms | None = None
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = name_key(self.replica)

    def claim_seconds(self) -> float:
        """How long blocks count that are sent for now: twice the time that the work here takes, in bounds.

        Siblings that come before the first event find them.
        """
        ahead, rate, load = self.booked.prefill, PREFILL_RATE, self.load
        if load is not None:
            ahead += load.waiting_tokens
            rate = load.prefill_rate or rate
        lasts = 2.0 * ahead / rate
        if lasts < SHORTEST_CLAIM_S:
            return SHORTEST_CLAIM_S
        return lasts if lasts < LONGEST_CLAIM_S else LONGEST_CLAIM_S


@dataclass(slots=True, eq=False)
class Entry:
    """A live booking, and what of it still counts; owned by the ledger."""

    booking: Booking
    standing: Standing
    keys: Sequence[int]
    rows: int
    kv: int
    prefilled: bool = False
    acknowledged: bool = False

    def acknowledge(self) -> None:
        """The engine's reports have it from now on."""
        booked = self.standing.booked
        self.acknowledged = True
        if not self.prefilled:
            booked.prefill -= self.booking.prefill
        booked.rows -= self.rows
        booked.kv -= self.kv
        booked.seen_rows += self.rows
        booked.seen_kv += self.kv

    def release_prefill(self) -> None:
        """The prompt is computed; once only."""
        self.prefilled = True
        self.keys = ()
        self.standing.tokens -= self.booking.prefill
        if not self.acknowledged:
            self.standing.booked.prefill -= self.booking.prefill
        self.standing.terms = None


def name_key(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
