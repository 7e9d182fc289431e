"""What is known of an attempt that is to be booked. Where Serve's router chooses, it is the call's ``meta``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.routing.requirement import Requirement


@dataclass(frozen=True, slots=True)
class RoutingMeta:
    """One attempt to be routed and booked.

    ``prefill`` counts all prompt tokens, cached or not; ``keys`` are those of its full blocks. ``decode`` is
    the most that its ``sequences`` generate together. ``avoid`` is taken only if there is no other replica.
    ``requirement`` rules replicas out; ``None`` rules out none.
    """

    request_id: str
    attempt: int
    prefill: int
    decode: int
    avoid: str = ""
    keys: Sequence[int] = ()
    sequences: int = 1
    requirement: Requirement | None = None
