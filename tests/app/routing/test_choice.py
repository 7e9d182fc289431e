"""The choice against a plain one that computes every part of the sum anew, for every replica and request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_support import BLOCK, IDLE

from app.routing import cost
from app.routing.booking import Standing, name_key
from app.routing.calibration import StepModel
from app.routing.cost import Booked, Demand
from app.routing.load import LoadReport
from app.routing.policies import Chooser, Policy, Wanted, rendezvous

NOW = 10.0


@dataclass(frozen=True)
class Parts:
    """What a request costs on one replica, each part by itself."""

    wait: float
    compute: float
    streaming: float
    eviction: float
    admission: float

    @property
    def total(self) -> float:
        return self.wait + self.compute + self.streaming + self.eviction + self.admission


def plain(
    load: LoadReport,
    booked: Booked,
    speed: float,
    age: float,
    cached: int,
    demand: Demand,
    step: StepModel,
    reuse: float,
) -> Parts:
    """The sum as it stands at the head of ``cost.py``; ``demand.remaining`` is a running sequence's rest."""
    tail = demand.remaining
    ahead = load.waiting_tokens + booked.prefill
    rows: float = max(load.running, booked.seen_rows) + booked.rows
    kv: float = max(load.kv_tokens, booked.seen_kv) + booked.kv
    most: float = load.max_running or math.inf
    seats = most - max(load.running + load.waiting, booked.seen_rows) - booked.rows
    if load.held_up:
        seats = min(seats, -load.held_up - booked.rows)
        most = max(load.running, 1)
    if rows > most:
        rows, kv = most, kv * most / rows
    per_token = (1 + cost.MACHINE + cost.STALL * rows) / load.prefill_rate
    uncached = demand.tokens - cached
    charged = uncached - demand.due * max(demand.shared - cached, 0)

    beside = min(demand.output, tail)
    longer = demand.sequences * (step.per_row + (demand.tokens + demand.output / 2) * step.per_kv_token)
    own = demand.output * (step.base + longer) + beside * (step.per_row * rows + step.per_kv_token * kv)
    streaming = cost.STREAMING * speed * (own + rows * beside * longer)

    free = load.free * BLOCK - ahead
    room = load.evictable * BLOCK + min(free, 0)
    over = max(uncached + demand.sequences * demand.output - max(free, 0), 0)
    turn = 2 * tail * speed * (step.base + step.per_row * rows + step.per_kv_token * kv) / (rows or 1)
    held = max(load.referenced * BLOCK / (rows or 1) + tail, BLOCK)
    missing = max(over - room, 0) * max(turn / held, 1 / load.prefill_rate) if over else 0.0
    started = 0.0 if load.held_up else load.waiting_tokens / load.prefill_rate
    return Parts(
        wait=ahead / load.prefill_rate - min(age, started, cost.SILENT_S),
        compute=charged * per_token,
        streaming=streaming,
        eviction=max(min(over, room), 0) * per_token * reuse,
        admission=max((demand.sequences - seats) * turn, missing, 0.0),
    )


def plain_choice(
    chooser: Chooser, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted
) -> tuple[set[int], list[float]]:
    """Whoever may be chosen, where a cost at the very edge of a tie decides; and all costs."""
    size, output = chooser.block_size, chooser.expected_output(wanted)
    deepest = max(held)
    most = min(deepest * size, (wanted.tokens - 1) // size * size)
    cached = [min(blocks * size, most) for blocks in held]
    due = 0.0
    if deepest:
        share = list(chooser.hot._last).count(wanted.keys[deepest - 1]) / 128
        due = min(max(share * len(held) - cached.count(most), 0.0), 1.0)
    demand = Demand(wanted.tokens, output, chooser.outputs.tokens / 2, wanted.sequences, most, due)
    costs, quick = [], []
    for standing, found in zip(standings, cached, strict=True):
        assert standing.load is not None
        parts = plain(
            standing.load,
            standing.booked,
            standing.speed,
            NOW - standing.reported,
            found,
            demand,
            chooser.steps,
            chooser.reuse.share,
        )
        costs.append(parts.total)
        at = cost.terms(
            standing.load,
            standing.booked,
            chooser.steps,
            standing.speed,
            size,
            demand.remaining,
            standing.reported,
        )
        quick += cost.seconds([at], [found], demand, chooser.steps, chooser.reuse.share, NOW)
    assert quick == pytest.approx(costs, rel=1e-9)
    least = min(costs)
    allowed = set()
    for place in [place for place, seconds in enumerate(costs) if seconds <= least + 1e-9]:
        standing, load = standings[place], standings[place].load
        assert load is not None
        at = cost.terms(load, standing.booked, chooser.steps, standing.speed, size, demand.remaining)
        margin = (
            1.01 * max(min(size, max(wanted.tokens, 16)), (wanted.tokens - cached[place]) // 50) * at.per_token
        )
        for edge in (least + margin - 1e-9, least + margin + 1e-9):
            ties = [place for place, seconds in enumerate(costs) if seconds <= edge]
            key = wanted.keys[deepest] if deepest < len(wanted.keys) else name_key(wanted.request_id)
            allowed.add(
                min(
                    ties,
                    key=lambda place: (
                        standings[place].tokens,
                        standings[place].count,
                        -rendezvous(key, standings[place].seed),
                    ),
                )
            )
    return allowed, costs


LOADS = st.builds(
    LoadReport,
    waiting_tokens=st.sampled_from([0, 0, 300, 5000, 200_000]),
    running=st.integers(0, 40),
    kv_tokens=st.sampled_from([0, 5000, 400_000]),
    referenced=st.integers(0, 5000),
    free=st.sampled_from([0, 40, 1000, 100_000]),
    evictable=st.sampled_from([0, 50, 5000]),
    num_blocks=st.just(100_000),
    block_size=st.just(BLOCK),
    prefill_rate=st.sampled_from([500.0, 10_000.0, 11_000.0]),
    step_seconds=st.just(0.02),
    acknowledged=st.just(0),
    waiting=st.integers(0, 30),
    held_up=st.sampled_from([0, 0, 0, 12]),
    max_running=st.sampled_from([0, 32]),
)
BOOKED = st.builds(
    Booked,
    prefill=st.sampled_from([0, 0, 900, 60_000]),
    rows=st.integers(0, 9),
    kv=st.sampled_from([0, 9000]),
    seen_rows=st.integers(0, 50),
    seen_kv=st.sampled_from([0, 90_000]),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[Standing]:
    """A few kinds of replicas, so that many are alike."""
    kinds = draw(st.lists(st.tuples(LOADS | st.just(IDLE), BOOKED), min_size=1, max_size=3))
    standings = []
    for number in range(draw(st.integers(1, 8))):
        load, booked = kinds[draw(st.integers(0, len(kinds) - 1))]
        standing = Standing(f"r{number}", None, load, booked=replace(booked))
        standing.speed = draw(st.sampled_from([1.0, 1.0, 1.5]))
        standing.reported = draw(st.sampled_from([NOW, NOW - 0.04, 0.0]))
        standing.tokens, standing.count = draw(st.sampled_from([(0, 0), (500, 1), (500, 2)]))
        standings.append(standing)
    return standings


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    fleets(),
    st.lists(
        st.tuples(
            st.integers(1, 4000),
            st.integers(1, 5000),
            st.integers(1, 3),
            st.lists(st.integers(0, 300), min_size=8, max_size=8),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_choices_are_those_of_the_plain_sum(
    standings: list[Standing], requests: list[tuple[int, int, int, list[int]]]
) -> None:
    chooser = Chooser(Policy.PREFIX, BLOCK)
    for number, (tokens, output, sequences, depths) in enumerate(requests):
        keys = [7 << 32 | block for block in range(tokens // BLOCK)]
        held = [min(depth, len(keys)) for depth in depths[: len(standings)]]
        wanted = Wanted(f"request-{number}", tokens, output, sequences, keys)
        chooser.settle()
        allowed, costs = plain_choice(chooser, standings, held, wanted)
        chosen = chooser.choose(standings, held, wanted, NOW)
        assert chosen in allowed, costs
        # What is kept of a replica from one choice to the next must not be out of date.
        standings[chosen].booked.prefill += tokens
        standings[chosen].terms = None
        standings[chosen].tokens += tokens
