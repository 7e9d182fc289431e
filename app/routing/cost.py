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
from math import inf
from typing import NamedTuple

from app.routing.calibration import StepModel
from app.routing.load import PREFILL_RATE, LoadReport

STREAMING = 0.05
"""What a second of slower steps counts against a second of waiting for the first token."""

STALL = 0.1
"""What a second counts in which a stream stands still, because a prompt is computed."""

MACHINE = 1.0
"""What a second of computing counts, beside the delay of the request itself, for those that come next."""

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


class Shortage(NamedTuple):
    """How long one replica's seats and blocks keep a request waiting, where they are out."""

    room: float
    """Tokens that fit in by eviction; below zero if not even those that wait do."""
    per_missing: float
    """Seconds for each token that does not fit in."""
    seats: float
    """Sequences that can start after those that wait; below zero if so many must end for those alone."""
    turn: float
    """Seconds between the ends of two sequences."""

    def seconds(self, over: float, sequences: float) -> float:
        """Until ``over`` tokens beyond the free blocks, and seats for ``sequences``, can be had; or 0."""
        missing, queue = (over - self.room) * self.per_missing, (sequences - self.seats) * self.turn
        return max(missing, queue, 0.0)


class Terms(NamedTuple):
    """One replica's part of the sum, so that a decision only multiplies and adds; floats, which is quicker."""

    wait: float
    """Seconds that are left of it when all that has started is done."""
    until: float
    """When that is, in monotonic seconds; ``SILENT_S`` after the report at most."""
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
    fits: float
    """Tokens that fit in at all, without a wait; none if there is not one seat."""
    shortage: Shortage
    """Of more than that, or of several sequences."""


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
    longer = step.per_row * rows + step.per_kv_token * kv
    drag = STREAMING * speed
    free = float((load.free if load.num_blocks else PLENTY) * block_size - ahead)
    room = float(load.evictable * block_size)
    if free <= 0.0:
        free, room = 0.0, room + free
    started = 0.0 if held_up else load.waiting_tokens / rate
    if started > SILENT_S:
        started = SILENT_S
    # A sequence makes twice the tail in all, and at its end each of those running holds a tail more than now.
    some = rows or 1
    turn = 2.0 * tail * speed * (step.base + longer) / some
    held = load.referenced * block_size / some + tail
    missing = turn / (held if held > block_size else block_size)
    return Terms(
        ahead / rate - started,
        reported + started,
        (1.0 + MACHINE + STALL * rows) / rate,
        drag,
        drag * longer,
        drag * rows,
        free,
        free + room if seats >= 1 else -inf,
        Shortage(room, missing if missing * rate > 1.0 else 1.0 / rate, seats, turn),
    )


def seconds(
    candidates: Sequence[Terms],
    cached: Sequence[int],
    demand: Demand,
    step: StepModel,
    reuse: float,
    now: float = 0.0,
    block: int = 1,
) -> list[float]:
    """The cost of ``demand`` on each candidate, which holds ``cached`` blocks of ``block`` tokens; at ``now``.

    None holds more than ``demand.shared`` if a copy is due.
    """
    tokens, output, remaining, sequences, copied, due = demand
    beside = output if output < remaining else remaining
    longer = sequences * (step.per_row + (tokens + output / 2) * step.per_kv_token)
    own, theirs = output * (step.base + longer), beside * longer
    needed = float(tokens + sequences * output)
    fresh, kept = tokens - due * copied, (1.0 - due) * block
    several = sequences > 1
    # There are few different numbers of blocks: what follows from each, once.
    depths = {blocks: (fresh - kept * blocks, needed - blocks * block) for blocks in set(cached)}
    costs: list[float] = []
    for at, blocks in zip(candidates, cached, strict=True):
        wait, until, per_token, drag, crowd, crowd_drag, free, fits, shortage = at
        computed, needs = depths[blocks]
        if needs > fits or several:
            room, per_missing, seats, turn = shortage
            over = needs - free
            if over > room or sequences > seats:
                missing, queue = (over - room) * per_missing, (sequences - seats) * turn
                wait += missing if missing > queue else queue
                if over > room:
                    over = room
            if over > 0.0:
                computed += over * reuse
        elif needs > free:
            computed += (needs - free) * reuse
        if now < until:
            wait += until - now
        costs.append(wait + computed * per_token + own * drag + beside * crowd + theirs * crowd_drag)
    return costs
