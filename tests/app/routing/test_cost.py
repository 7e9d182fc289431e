"""The cost of a request in seconds: each term worked out by hand, and what holds for the sum of any numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import routing_support
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routing_cases import BROKEN_LOADS, FLEETS, LOADS, REPLICAS, REQUESTS, TOTALS
from routing_support import BLOCK, replica, view

from app.routing import cost
from app.routing.cost import TERMS, RoutingRequest, costs
from app.routing.fleet_estimates import FleetEstimates
from app.routing.load import LoadReport, sane
from app.routing.replica_state import ReplicaState

IDLE = replace(routing_support.IDLE, free=1000, num_blocks=1000)
RATE = IDLE.prefill_rate
"""10,000 tokens/s."""
REQUEST = RoutingRequest("request", tokens=4000, output=100.0)

STEP = 0.02
PER_ROW = 0.001
PER_KV_TOKEN = 1e-6
OUTPUT = 200.0


def calibrated(reuse: float = 0.0, output: float = OUTPUT) -> FleetEstimates:
    """Sequences of 200 tokens, running ones half done; steps of 20 ms, 1 ms a row, 1 µs a KV token."""
    fleet = FleetEstimates(BLOCK)
    fleet.steps.base, fleet.steps.per_row, fleet.steps.per_kv_token = STEP, PER_ROW, PER_KV_TOKEN
    fleet.outputs.tokens = output
    fleet.reuse._lost, fleet.reuse._made = reuse, 1.0
    return fleet


def price(
    load: LoadReport,
    cached: int = 0,
    request: RoutingRequest = REQUEST,
    *,
    reuse: float = 0.0,
    now: float = 0.0,
    copy_deficit: float = 0.0,
    fleet: FleetEstimates | None = None,
    slowness: float = 1.0,
    **totals: int,
) -> float:
    """The cost on one replica that holds ``cached`` blocks; what was booked there is given by ``totals``."""
    fleet = fleet or calibrated(reuse)
    state = replica(load, **totals)
    state.history.slowness = slowness
    return costs([view(state, fleet)], [cached], request, fleet, now, copy_deficit)[0]


# ---- worked out by hand

OWN_STEP = PER_ROW + (4000 + 50) * PER_KV_TOKEN
"""By which the request lengthens each step: its row, its prompt, and half its output."""
COMPUTE = 2 * 4000 / RATE
DECODE = 0.05 * 100 * (STEP + OWN_STEP)
ALONE = COMPUTE + DECODE
TEN = replace(IDLE, running=10, kv_tokens=20_000)
TEN_STEP = 10 * PER_ROW + 20_000 * PER_KV_TOKEN


@pytest.mark.parametrize(
    ("load", "cached", "expected"),
    [
        pytest.param(IDLE, 0, ALONE, id="alone"),
        pytest.param(IDLE, 100, 2 * 2400 / RATE + DECODE, id="prefix-is-not-computed"),
        pytest.param(replace(IDLE, waiting_tokens=700), 0, ALONE + 0.07, id="prompts-ahead"),
        pytest.param(replace(IDLE, prefill_rate=2500.0), 0, 4 * COMPUTE + DECODE, id="prefill-rate"),
        pytest.param(
            TEN,
            0,
            # Ten streams stand still for 0.4 s, its steps take longer by theirs, and theirs by its own.
            COMPUTE + 10 * 0.1 * 0.4 + DECODE + 0.05 * (100 * TEN_STEP + 10 * 100 * OWN_STEP),
            id="beside-ten-that-run",
        ),
    ],
)
def test_wait_compute_and_streaming(load: LoadReport, cached: int, expected: float) -> None:
    assert price(load, cached) == pytest.approx(expected, rel=1e-12)


def test_a_slow_replica_streams_slowly() -> None:
    assert price(IDLE, slowness=3.0) == pytest.approx(COMPUTE + 3 * DECODE)


def test_steps_are_shared_only_while_those_that_run_have_something_left() -> None:
    long = REQUEST._replace(output=1000.0)  # they have 100 tokens left
    own_step = PER_ROW + (4000 + 500) * PER_KV_TOKEN
    assert price(TEN, request=long) == pytest.approx(
        1.5 * COMPUTE + 0.05 * (1000 * (STEP + own_step) + 100 * TEN_STEP + 10 * 100 * own_step)
    )


def test_each_of_several_sequences_reads_the_prompt() -> None:
    three = REQUEST._replace(sequences=3)
    assert price(IDLE, request=three) == pytest.approx(COMPUTE + 0.05 * 100 * (STEP + 3 * OWN_STEP))


def test_eviction_costs_what_is_pushed_out_times_its_reuse() -> None:
    # 4,100 tokens are needed, 1,600 are free: 2,500 are pushed out, and half of them are asked for again.
    full = replace(IDLE, free=100, evictable=900)
    assert price(full, reuse=0.5) == pytest.approx(ALONE + 0.5 * 2 * 2500 / RATE)
    assert price(full, cached=50, reuse=0.5) == pytest.approx(ALONE - 2 * 800 / RATE + 0.5 * 2 * 1700 / RATE)
    assert price(full, reuse=0.0) == pytest.approx(ALONE)
    assert price(replace(full, free=257), reuse=1.0) == pytest.approx(ALONE), "all of it fits"
    assert price(full, request=REQUEST._replace(sequences=3), reuse=1.0) - price(
        full, request=REQUEST._replace(sequences=3)
    ) == pytest.approx(2 * (4000 + 300 - 1600) / RATE)


def test_what_waits_takes_free_blocks_first() -> None:
    full = replace(IDLE, free=100, evictable=900, waiting_tokens=1000)
    assert price(full, reuse=1.0) == pytest.approx(ALONE + 0.1 + 2 * 3500 / RATE)
    overfull = replace(full, waiting_tokens=16_000)  # 14,400 of them are pushed out already: nothing is left
    assert price(overfull, reuse=1.0) - price(overfull) == 0.0


def test_an_unknown_number_of_blocks_or_slots_keeps_nobody_waiting() -> None:
    unknown = replace(IDLE, free=0, num_blocks=0, max_running=0, running=10**6)
    assert price(unknown, reuse=1.0) == pytest.approx(price(unknown))
    assert price(replace(unknown, num_blocks=1), reuse=1.0) > price(unknown)


FULL = replace(
    IDLE, running=10, kv_tokens=20_000, max_running=10, referenced=1000, free=10**6, num_blocks=10**6
)
TURN = 0.4
"""Seconds between the ends of ten sequences of 200 tokens, in steps of 20 ms."""


def admission(load: LoadReport, sequences: int = 1, **totals: int) -> float:
    """Seconds beyond what it would cost with slots and blocks enough; streaming counts nothing."""
    fleet, request = calibrated(), REQUEST._replace(sequences=sequences)
    fleet.steps.per_row = fleet.steps.per_kv_token = 0.0
    roomy = replace(load, num_blocked=0, max_running=0, free=10**6, num_blocks=10**6)
    return price(load, request=request, fleet=fleet, **totals) - price(
        roomy, request=request, fleet=fleet, **totals
    )


@pytest.mark.parametrize(
    ("load", "totals", "sequences", "turns"),
    [
        (replace(FULL, running=9), {}, 1, 0),  # the last slot
        (FULL, {}, 1, 1),
        (FULL, {}, 4, 4),
        (replace(FULL, waiting=3), {}, 1, 4),
        (replace(FULL, waiting=3, num_blocked=3), {}, 1, 4),
        (replace(FULL, max_running=12, waiting=3), {}, 1, 2),  # those wait for a prompt, but take slots
        (replace(FULL, max_running=12), {}, 4, 2),
        (FULL, {"pending_rows": 5}, 1, 6),
        (FULL, {"acknowledged_rows": 14}, 1, 5),  # these run, or wait
        (replace(FULL, waiting=4), {"acknowledged_rows": 14, "pending_rows": 2}, 1, 7),
        (replace(FULL, max_running=100, waiting=20), {}, 1, 0),
        (replace(FULL, max_running=100, waiting=20, num_blocked=20), {}, 1, 21),  # blocks are out
        (replace(FULL, max_running=100, waiting=20, num_blocked=2), {"pending_rows": 3}, 2, 7),
        (replace(FULL, max_running=0, waiting=20), {"pending_rows": 7}, 3, 0),  # unknown
    ],
)
def test_admission_waits_for_as_many_ends_as_it_needs(
    load: LoadReport, totals: dict[str, int], sequences: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weight in ("STREAMING", "STALL"):  # the rows that are there make a difference in these, too
        monkeypatch.setattr(cost, weight, 0.0)
    assert admission(load, sequences, **totals) == pytest.approx(turns * TURN)


def test_missing_blocks_are_released_by_those_that_end() -> None:
    # Each of the ten holds 1,600 tokens now and 1,700 at its end: 0.4 s for so many.
    out = replace(FULL, max_running=100, free=0)
    assert admission(out) == pytest.approx(4100 / 1700 * TURN)
    assert admission(replace(out, evictable=100)) == pytest.approx(2500 / 1700 * TURN)
    assert admission(replace(out, waiting_tokens=3400)) == pytest.approx(7500 / 1700 * TURN)
    assert admission(replace(out, free=100, waiting_tokens=3400)) == pytest.approx(5900 / 1700 * TURN)


def test_blocks_are_missing_for_as_long_as_they_take_to_compute_at_least() -> None:
    idle = replace(IDLE, free=0, referenced=10**6)  # one that holds everything ends in 4 s
    assert admission(idle) == pytest.approx(4100 / RATE)


def test_admission_waits_once_for_slots_and_blocks_together() -> None:
    out = replace(FULL, free=0, waiting_tokens=3400)
    for waiting in (0, 2, 20):
        for num_blocked in (0, waiting):
            load = replace(out, waiting=waiting, num_blocked=num_blocked)
            assert admission(load) == pytest.approx(max(1 + waiting, 7500 / 1700) * TURN)


def test_blocked_sequences_slow_nobody_down_but_are_waited_for() -> None:
    # Their prefixes are cached, so that hardly a token is to be computed, but there are no blocks to run them.
    held = replace(TEN, waiting=140, num_blocked=140, max_running=256)
    mine = {"acknowledged_rows": 150, "acknowledged_kv_tokens": 900_000}
    here = view(replica(held, **mine), calibrated())
    assert (here.rows, here.free_slots) == (10, -140)
    assert here.load_step_s == pytest.approx(10 * PER_ROW + 10 / 150 * 900_000 * PER_KV_TOKEN)
    assert here.slot_s == pytest.approx(OUTPUT * (STEP + here.load_step_s) / 10)
    assert price(held, **mine) > price(TEN) + 140 * here.slot_s
    other = replace(IDLE, waiting_tokens=9_000, running=30, kv_tokens=200_000)
    assert price(other) < price(held, 240)


def test_no_more_rows_are_expected_than_there_are_slots() -> None:
    crowded = view(replica(replace(FULL, waiting=30), pending_rows=10, pending_kv_tokens=20_000), calibrated())
    assert crowded.rows == 10
    assert crowded.load_step_s == pytest.approx(10 * PER_ROW + 20_000 * PER_KV_TOKEN)


def test_a_copy_that_the_fleet_lacks_costs_only_the_rest_of_the_prompt() -> None:
    fleet = calibrated()
    two = [view(replica(IDLE, name), fleet) for name in ("r0", "r1")]
    for deficit, charged in ((0.0, 4000), (0.5, 2400), (1.0, 800)):
        here, there = costs(two, [200, 0], REQUEST, fleet, 0.0, deficit)
        assert here == pytest.approx(2 * 800 / RATE + DECODE)
        assert there == pytest.approx(2 * charged / RATE + DECODE)


def test_reported_work_is_done_as_time_passes() -> None:
    waiting = replace(IDLE, waiting_tokens=1_000)
    assert [price(waiting, now=now) for now in (-5.0, 0.0, 0.04, 0.1, 50.0)] == pytest.approx(
        [ALONE + 5.1, ALONE + 0.1, ALONE + 0.06, ALONE, ALONE]
    )
    # A replica that falls silent does not empty itself.
    long = replace(IDLE, waiting_tokens=100_000)
    assert price(long) - price(long, now=60.0) == pytest.approx(3.0)
    # What was sent there since has not begun, and what has no slot does not.
    assert price(IDLE, pending_prefill=1_000, now=1.0) == price(IDLE, pending_prefill=1_000)
    blocked = replace(waiting, waiting=1, num_blocked=1, running=4, max_running=4)
    assert price(blocked, now=1.0) == price(blocked)


def test_own_bookings_that_the_engine_has_not_seen_count_like_those_it_has() -> None:
    assert price(IDLE, pending_prefill=700) == pytest.approx(price(replace(IDLE, waiting_tokens=700)))
    running = replace(IDLE, running=4, kv_tokens=4000)
    seen = {"acknowledged_rows": 4, "acknowledged_kv_tokens": 4000}
    assert price(running, **seen) == price(running) == price(IDLE, **seen)
    assert price(running, pending_rows=1) == pytest.approx(price(replace(running, running=5)))
    assert price(running, pending_kv_tokens=500) == pytest.approx(price(replace(running, kv_tokens=4500)))


# ---- what holds of any numbers


@pytest.mark.parametrize("weight", [0.0, 1.0, 100.0])
def test_any_weight_of_streaming_will_do(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    saturated = replace(IDLE, running=30, kv_tokens=12_000, free=0, evictable=0, referenced=1000)
    before = admission(saturated)
    monkeypatch.setattr(cost, "STREAMING", weight)
    monkeypatch.setattr(cost, "STALL", weight)
    assert admission(saturated) == pytest.approx(before)
    assert price(saturated) > price(replace(saturated, free=1000)) > 0.0
    assert (price(replace(IDLE, running=30)) > price(IDLE)) is (weight > 0.0)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(REPLICAS, REQUESTS, FLEETS, st.integers(0, 300), st.integers(1, 100))
def test_a_longer_prefix_never_costs_more(
    state: ReplicaState, request: RoutingRequest, fleet: FleetEstimates, cached: int, more: int
) -> None:
    here = view(state, fleet)
    longer = min(cached + more, request.tokens // BLOCK)
    shorter = min(cached, longer)
    less, most = costs([here, here], [longer, shorter], request, fleet, 0.0)
    assert less <= most


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    LOADS,
    TOTALS,
    REQUESTS,
    FLEETS,
    st.sampled_from(
        [
            ("waiting_tokens", 1000),
            ("waiting", 3),
            ("pending_prefill", 1000),
            ("pending_kv_tokens", 1000),
            ("acknowledged_kv_tokens", 400_000),
            ("kv_tokens", 1000),
            ("free", -40),
            ("evictable", -50),
        ]
    ),
)
@example(
    replace(IDLE, running=6, free=0, evictable=50, prefill_rate=500.0),
    {},
    RoutingRequest("request", tokens=16, output=5000.0),
    calibrated(reuse=1.0, output=1.0),
    ("waiting_tokens", 1000),
)
def test_more_load_never_costs_less(
    load: LoadReport,
    totals: dict[str, int],
    request: RoutingRequest,
    fleet: FleetEstimates,
    busier: tuple[str, int],
) -> None:
    field, more = busier
    if field in totals:
        heavier = view(replica(load, **{**totals, field: totals[field] + more}), fleet)
    else:
        value = max(getattr(load, field) + more, 0)
        heavier = view(replica(replace(load, **{field: value}), **totals), fleet)
    lighter = view(replica(load, **totals), fleet)
    if field == "evictable":  # what cannot be evicted is not evicted, but waited for: recomputing is cheaper
        assert heavier.admission_s(5000.0, 1) >= lighter.admission_s(5000.0, 1)
        return
    cached = min(10, request.tokens // BLOCK)
    parts: list[tuple[float, ...]] = []
    less, most = costs([lighter, heavier], [cached, cached], request, fleet, 0.0, parts=parts)
    if heavier.evictable_tokens < lighter.evictable_tokens:  # likewise
        less, most = (sum(terms) - terms[TERMS.index("eviction")] for terms in parts)
    assert less <= most * (1 + 1e-12)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(REPLICAS, min_size=1, max_size=6), REQUESTS, FLEETS, st.data())
def test_a_replica_costs_the_same_whoever_is_beside_it_and_in_any_order(
    states: list[ReplicaState], request: RoutingRequest, fleet: FleetEstimates, data: st.DataObject
) -> None:
    views = [view(state, fleet) for state in states]
    cached = [data.draw(st.integers(0, request.tokens // BLOCK)) for _ in views]
    parts: list[tuple[float, ...]] = []
    together = costs(views, cached, request, fleet, 5.0, parts=parts)
    assert together == pytest.approx([sum(of_one) for of_one in parts])
    assert {len(of_one) for of_one in parts} == {len(cost.TERMS)}
    order = data.draw(st.permutations(range(len(views))))
    shuffled = costs([views[at] for at in order], [cached[at] for at in order], request, fleet, 5.0)
    assert shuffled == [together[at] for at in order]
    assert together == [
        costs([here], [blocks], request, fleet, 5.0)[0] for here, blocks in zip(views, cached, strict=True)
    ]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(REPLICAS, REQUESTS, FLEETS, st.floats(0, 1e6), st.floats(0, 1e4))
def test_time_moves_all_costs_alike(
    state: ReplicaState, request: RoutingRequest, fleet: FleetEstimates, start: float, later: float
) -> None:
    """Only how long ago a report came matters, not when."""
    state.reported_at = 0.0
    (then,) = costs([view(state, fleet)], [0], request, fleet, later)
    state.reported_at = start
    (now,) = costs([view(state, fleet)], [0], request, fleet, start + later)
    assert now == pytest.approx(then, rel=1e-9, abs=1e-6)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(REPLICAS, REQUESTS, FLEETS, st.floats(0, 1e6))
def test_a_backlog_adds_its_own_seconds_whatever_the_rest(
    state: ReplicaState, request: RoutingRequest, fleet: FleetEstimates, seconds: float
) -> None:
    here = view(state, fleet)
    before, after = costs(
        [here, replace(here, backlog_s=here.backlog_s + seconds)], [0, 0], request, fleet, 0.0
    )
    assert after == pytest.approx(before + seconds)


def test_warm_but_busy_loses_once_its_backlog_outweighs_the_prefix() -> None:
    cold, cached = price(IDLE), 188
    found = [price(replace(IDLE, waiting_tokens=waiting), cached) for waiting in (0, 1000, 5000, 7000, 60_000)]
    assert [seconds < cold for seconds in found] == [True, True, True, False, False]


def test_load_counts_in_tokens_not_in_requests() -> None:
    one_long, many_short = replace(IDLE, waiting_tokens=20_000), replace(IDLE, waiting_tokens=20 * 100)
    assert price(one_long) > price(many_short)


def test_saving_is_absolute_not_a_ratio() -> None:
    def saving(blocks: int) -> float:
        request = REQUEST._replace(tokens=blocks * BLOCK)
        return price(IDLE, 0, request) - price(IDLE, blocks * 9 // 10, request)

    assert saving(1000) > 50 * saving(10)


def test_saturated_replica_loses_even_its_own_sessions() -> None:
    # Not one block can be freed: what it holds is referenced by those that run, and others wait for it.
    busy = replace(IDLE, waiting_tokens=8000, running=30, kv_tokens=12_000)
    saturated = replace(busy, free=0, evictable=0, referenced=1000)
    merely_full = replace(busy, free=0, evictable=1000)
    cold = replace(busy, waiting_tokens=0)
    assert price(merely_full, 225) < price(cold) < price(saturated, 225)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(BROKEN_LOADS, TOTALS, REQUESTS, FLEETS, st.floats(0, 1), st.floats(0, 1e9))
def test_no_report_makes_a_cost_that_is_not_a_number(
    load: LoadReport,
    totals: dict[str, int],
    request: RoutingRequest,
    fleet: FleetEstimates,
    copy_deficit: float,
    now: float,
) -> None:
    here = view(replica(sane(load), **totals), fleet)
    assert all(math.isfinite(value) for value in asdict(here).values() if isinstance(value, float))
    (seconds,) = costs([here], [0], request, fleet, now, copy_deficit)
    assert math.isfinite(seconds)
    assert seconds > 0.0
