"""How long a new request would wait before anything is computed for it, on the replica where that is shortest.

This is the sum of the *wait* and *admission* terms of ``app/routing/cost.py`` for a request like those booked
last. Its prefix is unknown, so it is assumed to find none of its blocks cached. It is assumed to overtake no
other request, because the waiting ones are like it.

The *admission* term says how many running sequences must end first, but assumes that they end evenly over time.
Those that began together end together, so the time comes from the engine's report of expected ends, if it has
them: an engine knows the ages of its sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from app.routing.cost import view_of
from app.routing.fleet_estimates import FleetEstimates
from app.routing.load import LoadReport
from app.routing.replica_state import Booking, ReplicaState, ReplicaView

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
            waits.append(view.wait_s(now) + _admission_s(view, load, prefill, output))
    return ExpectedWait(min(waits), len(waits)) if waits else None


def _admission_s(view: ReplicaView, load: LoadReport, prefill: float, output: float) -> float:
    """Seconds until enough running sequences have ended to admit one of ``prefill`` tokens."""
    evenly = view.admission_s(prefill - view.free_tokens, sequences=1)
    if not load.first_end or not load.running or evenly <= 0.0 or view.slot_s <= 0.0:
        return evenly
    step_s = view.slot_s * (view.rows or 1) / output
    # The engine knows the limits of what runs and waits: it may expect longer outputs than those learned here.
    return step_s * tokens_until(evenly / view.slot_s, load, max(output, load.all_ended))


def tokens_until(ends: float, load: LoadReport, output: float) -> float:
    """Tokens that each running sequence makes until so many have ended, those in their place included.

    ``load`` has the expected ends; after as many as run, all begins again an ``output`` later. Never falls as
    ``ends`` rises.
    """
    again = load.first_end + output
    rows, last = load.running, min(max(load.all_ended, load.first_end), again)
    half = min(max(load.half_ended, load.first_end), last)
    turns, place = divmod(max(ends, 1.0) - 1.0, rows)
    tokens, before = load.first_end, 0.0
    for after, later in ((rows / 2 - 1.0, half), (rows - 1.0, last), (float(rows), again)):
        if place <= after:
            if after > before:
                tokens += (later - tokens) * (place - before) / (after - before)
            break
        if after > before:
            tokens, before = later, after
    return tokens + turns * output


def _typical(bookings: Sequence[Booking], learned_output: float) -> tuple[float, float]:
    """Tokens to compute, and of output for each sequence: no more than is learned."""
    if not bookings:
        return 0.0, learned_output
    output = sum(booking.decode for booking in bookings) / sum(booking.rows for booking in bookings)
    return sum(booking.prefill for booking in bookings) / len(bookings), min(output, learned_output)
