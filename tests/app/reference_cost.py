"""The sum of :mod:`app.routing.cost` as it was before it was made fast, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.routing import cost
from app.routing.calibration import StepModel
from app.routing.load import PREFILL_RATE, LoadReport


class Terms(NamedTuple):
    """One replica's part of the sum, so that a decision only multiplies and adds."""

    wait: float
    started: float
    reported: float
    per_token: float
    drag: float
    crowd: float
    crowd_drag: float
    free: float
    room: float
    per_missing: float
    seats: float
    turn: float


def terms(
    load: LoadReport,
    booked: cost.Booked,
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
    most = load.max_running or cost.PLENTY
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
    drag = cost.STREAMING * speed
    per_token = (1.0 + cost.MACHINE + cost.STALL * rows) / rate
    free = (load.free if load.num_blocks else cost.PLENTY) * block_size - ahead
    room = load.evictable * block_size
    # A sequence makes twice the tail in all, and at its end each of those running holds a tail more than now.
    turn = 2.0 * tail * per_step / (rows or 1)
    held = (load.referenced * block_size / rows if rows else load.referenced * block_size) + tail
    missing = turn / (held if held > block_size else block_size)
    return Terms(
        ahead / rate,
        0.0 if held_up else min(load.waiting_tokens / rate, cost.SILENT_S),
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
    demand: cost.Demand,
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
