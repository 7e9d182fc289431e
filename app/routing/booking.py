"""What is booked: the work of one attempt, on one route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.routing.policies import Standing


@dataclass(frozen=True, slots=True)
class Route:
    """An open channel: attempts live and die with exactly this one."""

    replica: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Booking:
    """Work of one attempt on one route, in tokens: ``prefill`` is to be computed, ``cached`` is found there."""

    request_id: str
    attempt: int
    route: Route
    prefill: int
    decode: int
    cached: int = 0


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
