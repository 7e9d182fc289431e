"""What a request would cost on each replica, in seconds: one sum, the same for every replica and load.

    wait        prompt tokens that are to be computed there before it, over the prefill rate, less the time
                since they were reported, 3 s at most
  + compute     its own uncached tokens over the prefill rate, once as its own delay and once as time of the
                machine that whoever comes next waits for: a sibling that waits for a prefix costs the fleet
                less than one that computes it again
  + streaming   its own decode time at the step time that it would see there, and the slowdown of those
                running by its rows and KV, weighted by ``STREAMING``; and by the steps that compute its prompt,
                weighted by ``STALL``
  + eviction    recomputing the blocks that it would really push out there, times the share of reuse
  + admission   where seats or blocks are out: the wait until enough of those running have ended to let in
                those before it, and then it

Those running end one by one, ``step time * output / rows`` apart: each end is a seat, and all the blocks that
no other sequence holds. Whether one lacks or both, admission waits once, for the later. Prompts of those before
it are computed in the same time, but in other steps, so that *wait* comes on top.

Rows and KV that are there now slow it down only while they remain, about half of an average output.
No part is a threshold and none concerns the fleet as a whole: a hot replica changes its own cost alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.routing.calibration import StepModel
from app.routing.load import LoadReport

STREAMING = 0.05
"""What a second of slower steps counts against a second of waiting for the first token."""

STALL = 0.1
"""What a second counts in which a stream stands still, because a prompt is computed."""

MACHINE = 1.0
"""What a second of computing counts, beside the delay of the request itself, for those that come next."""

PREFILL_RATE = 5000.0
"""Tokens/s of a replica of which nothing is known, in a fleet of which nothing is known."""

SILENT_S = 3.0
"""Reported work passes with time for so long after a report: an engine that hangs does not empty itself."""

PLENTY = 1 << 40
"""Free blocks, or seats, of a replica of which nothing is known."""


class Demand(NamedTuple):
    """A request: prompt ``tokens``, and ``output`` tokens expected of each of its ``sequences``.

    ``remaining`` is the number of tokens that a running sequence has still to make, on average. ``shared`` is
    the longest cached prefix anywhere, in tokens, and ``due`` (0 to 1) how much another copy of it is wanted.
    """

    tokens: int
    output: float
    remaining: float
    sequences: int = 1
    shared: int = 0
    due: float = 0.0


@dataclass(slots=True)
class Booked:
    """Own bookings on one replica that its engine has not acknowledged, and those that it has.

    ``prefill`` is released at the first token. ``kv`` counts the tokens that a booking's sequences read.
    """

    prefill: int = 0
    rows: int = 0
    kv: int = 0
    seen_rows: int = 0
    seen_kv: int = 0


class Terms(NamedTuple):
    """One replica's part of the sum, so that a decision only multiplies and adds."""

    wait: float
    """Seconds, as of the report."""
    started: float
    """How much of it passes with time, ``SILENT_S`` at most."""
    reported: float
    """When that was, in monotonic seconds."""
    per_token: float
    """Seconds of compute, its streaming part included; of a token pushed out, before the share of reuse."""
    drag: float
    """Streaming seconds for each second of a step by itself, and of what gets longer."""
    crowd: float
    """Streaming seconds for each output token while those running remain."""
    crowd_drag: float
    """Streaming seconds of those running, for each second that a step gets longer."""
    free: float
    """Tokens that fit in without eviction, after those that wait."""
    room: float
    """Tokens that fit in by eviction; below zero if not even those that wait do."""
    per_missing: float
    """Seconds for each token that does not fit in."""
    seats: float
    """Sequences that can start after those that wait; below zero if so many must end for those alone."""
    turn: float
    """Seconds between the ends of two sequences."""


def terms(
    load: LoadReport,
    booked: Booked,
    step: StepModel,
    speed: float,
    block_size: int,
    tail: float,
    reported: float = 0.0,
) -> Terms:
    """Of a replica with this ``load``; ``speed`` is its step time over the model's, ``tail`` its rows' rest.

    A report may lag behind own bookings, so there are at least as many rows as these, up to the seats.
    """
    rate = load.prefill_rate or PREFILL_RATE
    ahead = load.waiting_tokens + booked.prefill
    running, held_up, new = load.running, load.held_up, booked.rows
    rows = (running if running > booked.seen_rows else booked.seen_rows) + new
    kv: float = (load.kv_tokens if load.kv_tokens > booked.seen_kv else booked.seen_kv) + booked.kv
    most = load.max_running or PLENTY
    here = running + load.waiting
    seats = most - new - (here if here > booked.seen_rows else booked.seen_rows)
    if held_up:
        # What lacks may be blocks: whoever comes now stands behind these. None of them runs beside it.
        if -held_up - new < seats:
            seats = -held_up - new
        most = running or 1
    if rows > most:
        kv = kv * most / rows
        rows = most
    per_step = speed * (step.base + step.per_row * rows + step.per_kv_token * kv)
    drag = STREAMING * speed
    per_token = (1.0 + MACHINE + STALL * rows) / rate
    free = (load.free if load.num_blocks else PLENTY) * block_size - ahead
    room = load.evictable * block_size
    # A sequence makes twice the tail in all, and at its end each of those running holds a tail more than now.
    turn = 2.0 * tail * per_step / (rows or 1)
    held = (load.referenced * block_size / rows if rows else load.referenced * block_size) + tail
    missing = turn / (held if held > block_size else block_size)
    return Terms(
        ahead / rate,
        0.0 if held_up else min(load.waiting_tokens / rate, SILENT_S),
        reported,
        per_token,
        drag,
        drag * (step.per_row * rows + step.per_kv_token * kv),
        drag * rows,
        free if free > 0.0 else 0.0,
        room if free > 0.0 else room + free,
        missing if missing * rate > 1.0 else 1.0 / rate,
        seats,
        turn,
    )


def seconds(
    candidates: Sequence[Terms],
    cached: Sequence[int],
    demand: Demand,
    step: StepModel,
    reuse: float,
    now: float = 0.0,
) -> list[float]:
    """The cost of ``demand`` on each candidate, of which it finds ``cached`` tokens there; at ``now``."""
    tokens, output, remaining, sequences, copied, due = demand
    beside = output if output < remaining else remaining
    longer = sequences * (step.per_row + (tokens + output / 2) * step.per_kv_token)
    own, theirs = output * (step.base + longer), beside * longer
    needed = tokens + sequences * output
    fresh, kept = tokens - due * copied, 1.0 - due
    costs: list[float] = []
    for at, held in zip(candidates, cached, strict=True):
        wait, started, reported, per_token, drag, crowd, crowd_drag, free, room, per_missing, seats, turn = at
        age = now - reported
        computed = fresh - kept * held if held < copied else tokens - held
        over = needed - held - free
        if over > room or sequences > seats:
            missing, queue = (over - room) * per_missing, (sequences - seats) * turn
            wait += missing if missing > queue else queue
            if over > room:
                over = room
        if over > 0.0:
            computed += over * reuse
        costs.append(
            wait
            - (started if started < age else age)
            + computed * per_token
            + own * drag
            + beside * crowd
            + theirs * crowd_drag
        )
    return costs
