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


@dataclass(frozen=True, slots=True)
class Demand:
    """A request: prompt ``tokens``, and ``output`` tokens expected of each of its ``sequences``.

    ``remaining`` is the number of tokens that a running sequence has still to make, on average. ``shared`` is
    the longest cached prefix anywhere, in tokens, and ``due`` (0 to 1) how much another copy of it is wanted.
    """

    tokens: int
    output: float
    sequences: int
    remaining: float
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
    """One replica's part of the sum, so that a decision only multiplies and adds; seconds, tokens, blocks."""

    wait: float
    per_token: float  # compute, its streaming part included
    base: float  # streaming, per output token
    crowd: float  # streaming, per output token while those running remain
    per_row: float  # streaming, per row of the request and step that it is in
    per_kv_token: float
    rows: float
    free: float  # blocks, after those that the waiting ones will take
    evictable: float
    per_eviction: float  # per block, before the share of reuse
    per_missing: float  # per block


def terms(
    load: LoadReport, booked: Booked, step: StepModel, speed: float, block_size: int, tail: float
) -> Terms:
    """Of a replica that reports ``load``; ``speed`` is its step time over the model's, ``tail`` its rows' rest.

    A report may lag behind own bookings, so there are at least as many rows as these.
    """
    rate = load.prefill_rate or PREFILL_RATE
    ahead = load.waiting_tokens + booked.prefill
    rows = max(load.running, booked.seen_rows) + booked.rows
    kv = max(load.kv_tokens, booked.seen_kv) + booked.kv
    taken = ahead / block_size
    per_token = (1.0 + MACHINE + STREAMING * rows) / rate
    crowd = step.per_row * rows + step.per_kv_token * kv
    # Those running release their blocks over their remaining steps.
    release = tail * speed * (step.base + crowd) / max(load.referenced, 1)
    return Terms(
        wait=ahead / rate,
        per_token=per_token,
        base=STREAMING * speed * step.base,
        crowd=STREAMING * speed * crowd,
        per_row=STREAMING * speed * step.per_row,
        per_kv_token=STREAMING * speed * step.per_kv_token,
        rows=float(rows),
        free=max(load.free - taken, 0.0),
        evictable=load.evictable - max(taken - load.free, 0.0),
        per_eviction=per_token * block_size,
        per_missing=max(release, block_size / rate),
    )


def seconds(
    candidates: Sequence[Terms], cached: Sequence[int], demand: Demand, reuse: float, block_size: int
) -> list[float]:
    """The cost of ``demand`` on each candidate, of which it finds ``cached`` tokens there."""
    tokens, output, sequences = demand.tokens, demand.output, demand.sequences
    copied, due = demand.shared, demand.due
    beside = min(output, demand.remaining)
    kv = sequences * (tokens + output / 2)
    made = sequences * output + block_size
    costs = []
    for at, held in zip(candidates, cached, strict=True):
        wait, per_token, base, crowd, per_row, per_kv, rows, free, room, per_eviction, per_missing = at
        uncached = tokens - held
        cost = (
            wait
            + (uncached - due * (copied - held) if held < copied else uncached) * per_token
            + output * base
            + beside * crowd
            + (output + rows * beside) * (sequences * per_row + kv * per_kv)
        )
        over = (uncached + made) / block_size - free
        if over > 0.0:
            if over > room:
                cost += (over - room) * per_missing
                over = room
            if over > 0.0:
                cost += over * per_eviction * reuse
        costs.append(cost)
    return costs
