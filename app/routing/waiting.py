"""How long a new request would wait before anything is computed for it, on the replica where that is shortest.

This is the sum of the *wait* and *admission* terms of ``app/routing/cost.py`` for a request like those booked
last. Its prefix is unknown, so it is assumed to find none of its blocks cached. It is assumed to overtake no
other request, because the waiting ones are like it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from app.routing.cost import view_of
from app.routing.fleet_estimates import FleetEstimates
from app.routing.replica_state import Booking, ReplicaState

SAMPLED = 32
"""Bookings, the last ones that live, which say what a request is like."""


class ExpectedWait(NamedTuple):
    """``seconds`` on the replica where it is shortest; ``replicas`` is the number that have reported."""

    seconds: float
    replicas: int


def expected_wait(
    replicas: Sequence[ReplicaState],
    members: Collection[str],
    latest: Iterable[Booking],
    estimates: FleetEstimates,
    now: float,
) -> ExpectedWait | None:
    """The wait on ``members`` of ``replicas`` at ``now`` (monotonic seconds) of a request like the ``latest``.

    ``None`` if none has reported. One that has not is left out: its report is a moment away.
    """
    prefill, output = _typical(list(islice(latest, SAMPLED)), estimates.outputs.tokens)
    waits = []
    for state in replicas:
        if state.load is not None and state.replica in members:
            load = replace(state.load, num_blocked=state.load.num_lacking)
            view = view_of(state, load, state.reported_at, estimates, output)
            if load.num_blocks and not load.num_lacking:
                block = estimates.block_size
                blocks = prefill // block + 1 + load.running  # each running one is left a block to grow into
                if blocks * block > view.free_tokens + view.evictable_tokens:  # so one has to end first
                    view = replace(view, free_slots=min(view.free_slots, 0))
            waits.append(view.wait_s(now) + view.admission_s(prefill - view.free_tokens, sequences=1))
    return ExpectedWait(min(waits), len(waits)) if waits else None


def _typical(bookings: Sequence[Booking], learned_output: float) -> tuple[float, float]:
    """Tokens to compute, and of output for each sequence: no more than is learned."""
    if not bookings:
        return 0.0, learned_output
    output = sum(booking.decode for booking in bookings) / sum(booking.rows for booking in bookings)
    return sum(booking.prefill for booking in bookings) / len(bookings), min(output, learned_output)
