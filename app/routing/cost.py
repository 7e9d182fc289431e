"""What a request would cost on each replica, in seconds: one sum, the same for every replica and load.

    wait        prompt tokens that are to be computed there before it, over the prefill rate
  + compute     its own uncached tokens over the prefill rate, once as its own delay and once as time of the
                machine that whoever comes next waits for: a sibling that waits for a prefix costs the fleet
                less than one that computes it again
  + streaming   weighted by ``STREAMING``: its own decode time at the step time that it would see there, the
                slowdown of those running by its rows and KV, and by the steps that compute its prompt
  + eviction    recomputing the blocks that it would really push out there, times the share of reuse
  + blocks      where not even eviction makes room: the wait until those running have released enough

Rows and KV that are there now slow it down only while they remain, about half of an average output.
No part is a threshold and none concerns the fleet as a whole: a hot replica changes its own cost alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.routing.calibration import StepModel
from app.routing.load import LoadReport

STREAMING = 0.1
"""What a second of slower streaming counts against a second of waiting for the first token."""

MACHINE = 1.0
"""What a second of computing counts, beside the delay of the request itself, for those that come next."""

PREFILL_RATE = 5000.0
"""Tokens/s of a replica of which nothing is known, in a fleet of which nothing is known."""

PLENTY = 1 << 40
"""Free blocks of a pool of which nothing is known."""


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
    """Seconds."""
    per_token: float
    """Seconds of compute, its streaming part included."""
    base: float
    """Streaming seconds for each output token."""
    crowd: float
    """Streaming seconds for each output token while those running remain."""
    drag: float
    """Streaming seconds for each second that a step gets longer."""
    rows: float
    free: float
    """Tokens that fit in without eviction, after those that wait."""
    room: float
    """Tokens that fit in by eviction; below zero if not even those that wait do."""
    per_eviction: float
    """Seconds for each token pushed out, before the share of reuse."""
    per_missing: float
    """Seconds for each token that does not fit in."""


def terms(
    load: LoadReport, booked: Booked, step: StepModel, speed: float, block_size: int, tail: float
) -> Terms:
    """Of a replica that reports ``load``; ``speed`` is its step time over the model's, ``tail`` its rows' rest.

    A report may lag behind own bookings, so there are at least as many rows as these.
    """
    rate = load.prefill_rate or PREFILL_RATE
    ahead = load.waiting_tokens + booked.prefill
    running, kv = load.running, load.kv_tokens
    rows = (running if running > booked.seen_rows else booked.seen_rows) + booked.rows
    kv = (kv if kv > booked.seen_kv else booked.seen_kv) + booked.kv
    drag = STREAMING * speed
    base = drag * step.base
    crowd = drag * (step.per_row * rows + step.per_kv_token * kv)
    per_token = (1.0 + MACHINE + STREAMING * rows) / rate
    free = (load.free if load.num_blocks else PLENTY) * block_size - ahead
    room = load.evictable * block_size
    # Those running release their blocks over their remaining steps, less what they still grow by.
    released = load.referenced * block_size - rows * tail
    missing = tail * (base + crowd) / (STREAMING * (released if released > block_size else block_size))
    return Terms(
        ahead / rate,
        per_token,
        base,
        crowd,
        drag,
        rows,
        free if free > 0.0 else 0.0,
        room if free > 0.0 else room + free,
        per_token,
        missing if missing * rate > 1.0 else 1.0 / rate,
    )


def seconds(
    candidates: Sequence[Terms], cached: Sequence[int], demand: Demand, step: StepModel, reuse: float
) -> list[float]:
    """The cost of ``demand`` on each candidate, of which it finds ``cached`` tokens there."""
    tokens, output, remaining, sequences, copied, due = demand
    beside = output if output < remaining else remaining
    longer = sequences * step.per_row + sequences * (tokens + output / 2) * step.per_kv_token
    made = sequences * output
    costs = []
    for (wait, per_token, base, crowd, drag, rows, free, room, per_eviction, per_missing), held in zip(
        candidates, cached, strict=True
    ):
        uncached = tokens - held
        cost = (
            wait
            + (uncached - due * (copied - held) if held < copied else uncached) * per_token
            + output * base
            + beside * crowd
            + (output + rows * beside) * drag * longer
        )
        over = uncached + made - free
        if over > 0.0:
            if over > room:
                cost += (over - room) * per_missing
                over = room
            if over > 0.0:
                cost += over * per_eviction * reuse
        costs.append(cost)
    return costs
