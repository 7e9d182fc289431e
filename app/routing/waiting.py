"""How long a new request would wait before anything is computed for it, wherever that is shortest.

The figures are those of ``app/routing/cost.py``, whose *wait* and *admission* parts this is, for a request like
those booked last. Its prefixes are unknown, so that it is taken to find none of the blocks that it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from app.routing import cost
from app.routing.booking import Entry, Standing
from app.routing.load import LoadReport
from app.routing.policies import Chooser

SAMPLED = 32
"""Bookings, the last ones that live, which say what a request is like."""


class ExpectedWait(NamedTuple):
    """``seconds`` on the replica where it is shortest, out of so many ``replicas`` that have reported."""

    seconds: float
    replicas: int


class Typical(NamedTuple):
    """A request: ``prefill`` tokens to compute, ``output`` tokens of each of its sequences."""

    prefill: float
    output: float


def typical(last: Iterable[Entry], output: float) -> Typical:
    """Like the ``SAMPLED`` first of ``last``; ``output`` is the learned one, and the most."""
    entries = list(islice(last, SAMPLED))
    if not entries:
        return Typical(0.0, output)
    booked = sum(entry.booking.decode for entry in entries) / sum(entry.rows for entry in entries)
    return Typical(sum(entry.booking.prefill for entry in entries) / len(entries), min(booked, output))


def expected_wait(
    standings: Sequence[Standing],
    members: Collection[str],
    entries: dict[int, Entry],
    chooser: Chooser,
    now: float,
) -> ExpectedWait | None:
    """On ``members`` of ``standings`` at ``now`` (monotonic seconds), of a request like the last ``entries``.

    ``None`` if none has reported. One that has not is left out: its report is a moment away.
    """
    request = typical(reversed(entries.values()), chooser.outputs.tokens)
    waits = [
        _seconds(standing, standing.load, request, chooser, now)
        for standing in standings
        if standing.load is not None and standing.replica in members
    ]
    return ExpectedWait(min(waits), len(waits)) if waits else None


def _seconds(standing: Standing, load: LoadReport, request: Typical, chooser: Chooser, now: float) -> float:
    tail, reported = request.output / 2, standing.reported
    at = cost.terms(load, standing.booked, chooser.steps, standing.speed, chooser.block_size, tail, reported)
    wait = at.wait + max(at.until - max(now, reported), 0.0)
    return wait + at.shortage.seconds(request.prefill - at.free, 1.0)
