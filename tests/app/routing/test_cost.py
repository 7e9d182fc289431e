"""The cost of a request in seconds, part by part, and what it is calibrated by."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import routing_support
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_support import BLOCK

from app.routing import cost
from app.routing.calibration import REMEMBERED, OutputLength, PrefixShare, ReuseShare, StepModel
from app.routing.cost import Booked, Demand, seconds, terms
from app.routing.load import LoadReport, sane

IDLE = replace(routing_support.IDLE, free=1000, num_blocks=1000)
REQUEST = Demand(tokens=4000, output=100.0, remaining=100.0)


def price(
    load: LoadReport,
    cached: int = 0,
    demand: Demand = REQUEST,
    reuse: float = 0.5,
    booked: Booked | None = None,
    age: float = 0.0,
) -> float:
    step = StepModel()
    at = terms(load, booked or Booked(), step, 1.0, BLOCK, 100.0)
    return seconds([at], [cached], demand, step, reuse, age)[0]


def test_each_kind_of_load_costs_more() -> None:
    idle = price(IDLE)
    for busier in (
        replace(IDLE, waiting_tokens=500),
        replace(IDLE, running=3),
        replace(IDLE, kv_tokens=50_000),
        replace(IDLE, prefill_rate=5_000.0),
        replace(IDLE, free=100, evictable=900),
        replace(IDLE, free=100, evictable=0, referenced=900),
    ):
        assert price(busier) > idle
    assert price(IDLE, cached=2000) < idle


def test_own_bookings_that_the_engine_has_not_seen_count_like_those_it_has() -> None:
    assert math.isclose(price(IDLE, booked=Booked(prefill=700)), price(replace(IDLE, waiting_tokens=700)))
    seen = Booked(seen_rows=4, seen_kv=4000)
    running = replace(IDLE, running=4, kv_tokens=4000)
    assert price(running, booked=seen) == price(running) == price(IDLE, booked=seen)
    assert price(running, booked=Booked(rows=1)) > price(running)


def test_warm_but_busy_loses_once_its_backlog_outweighs_the_prefix() -> None:
    cold, cached = price(IDLE), 3000
    costs = [price(replace(IDLE, waiting_tokens=waiting), cached) for waiting in (0, 1000, 5000, 7000, 60_000)]
    assert [cost < cold for cost in costs] == [True, True, True, False, False]


def test_load_counts_in_tokens_not_in_requests() -> None:
    one_long, many_short = replace(IDLE, waiting_tokens=20_000), replace(IDLE, waiting_tokens=20 * 100)
    assert price(one_long) > price(many_short)


def test_saving_is_absolute_not_a_ratio() -> None:
    def saving(tokens: int) -> float:
        demand = REQUEST._replace(tokens=tokens)
        return price(IDLE, 0, demand) - price(IDLE, tokens * 9 // 10, demand)

    assert saving(10_000) > 50 * saving(100)


def test_load_elsewhere_changes_nothing_here() -> None:
    step = StepModel()
    here = terms(IDLE, Booked(), step, 1.0, BLOCK, 100.0)
    loaded = terms(replace(IDLE, waiting_tokens=10**6, running=200), Booked(), step, 1.0, BLOCK, 100.0)
    alone = seconds([here], [1600], REQUEST, step, 0.5)[0]
    three = [loaded, here, loaded]
    assert seconds(three, [0, 1600, 4000], REQUEST, step, 0.5)[1] == alone


def test_full_cache_costs_what_is_evicted_times_its_reuse() -> None:
    full = replace(IDLE, free=0, evictable=1000)
    assert price(full, reuse=0.0) == price(IDLE)
    extra = price(full, reuse=1.0) - price(IDLE)
    assert math.isclose(extra, 2 * (price(full, reuse=0.5) - price(IDLE)))
    assert price(full, 3200, reuse=1.0) - price(IDLE, 3200) < extra / 2
    assert price(replace(IDLE, free=10_000, evictable=1000), reuse=1.0) == price(IDLE)


def test_saturated_replica_loses_even_its_own_sessions() -> None:
    # Not one block can be freed: what it holds is referenced by those that run, and others wait for it.
    busy = replace(IDLE, waiting_tokens=8000, running=30, kv_tokens=12_000)
    saturated = replace(busy, free=0, evictable=0, referenced=1000)
    merely_full = replace(busy, free=0, evictable=1000)
    cold = replace(busy, waiting_tokens=0)
    assert price(merely_full, 3600) < price(cold) < price(saturated, 3600)


def test_wait_for_blocks_grows_with_those_that_wait_and_with_what_they_have_left() -> None:
    saturated = replace(IDLE, running=30, kv_tokens=12_000, free=0, evictable=0, referenced=1000)
    more = replace(saturated, waiting_tokens=1000)
    step = StepModel()
    short, long = (terms(saturated, Booked(), step, 1.0, BLOCK, tail).shortage for tail in (50.0, 500.0))
    assert price(more) - price(saturated) > 1000 / IDLE.prefill_rate
    assert long.per_missing > 5 * short.per_missing


def test_blocks_of_those_that_wait_are_not_free() -> None:
    line = replace(IDLE, waiting_tokens=16_000, free=1000, evictable=100)
    roomy = replace(line, free=3000)
    assert price(line) > price(roomy)


# Steps of exactly 20 ms, sequences of 200 tokens: ten that run end 0.4 s apart.
STEADY = StepModel()
STEADY.base, STEADY.per_row, STEADY.per_kv_token = 0.02, 0.0, 0.0
FULL = replace(IDLE, running=10, kv_tokens=20_000, max_running=10)


def admission(load: LoadReport, booked: Booked | None = None, sequences: int = 1) -> float:
    """Seconds beyond what it would cost with seats and blocks enough."""
    demand = REQUEST._replace(sequences=sequences)
    costs = []
    for given_load in (load, replace(load, held_up=0, max_running=0, free=10**6, num_blocks=10**6)):
        at = terms(given_load, booked or Booked(), STEADY, 1.0, BLOCK, 100.0)
        costs.append(seconds([at], [0], demand, STEADY, 0.0)[0])
    return costs[0] - costs[1]


@pytest.mark.parametrize(
    ("load", "booked", "sequences", "turns"),
    [
        (replace(FULL, running=9), Booked(), 1, 0),  # the last seat
        (FULL, Booked(), 1, 1),
        (FULL, Booked(), 4, 4),
        (replace(FULL, waiting=3), Booked(), 1, 4),
        (replace(FULL, waiting=3, held_up=3), Booked(), 1, 4),
        (replace(FULL, max_running=12, waiting=3), Booked(), 1, 2),  # those wait for a prompt, but take seats
        (replace(FULL, max_running=12), Booked(), 4, 2),
        (FULL, Booked(rows=5), 1, 6),
        (FULL, Booked(seen_rows=14), 1, 5),  # those seen are running, or wait
        (replace(FULL, waiting=4), Booked(seen_rows=14, rows=2), 1, 7),
        (replace(FULL, max_running=100, waiting=20), Booked(), 1, 0),
        (replace(FULL, max_running=100, waiting=20, held_up=20), Booked(), 1, 21),  # blocks lack
        (replace(FULL, max_running=100, waiting=20, held_up=2), Booked(rows=3), 2, 7),
        (replace(FULL, max_running=0, waiting=20), Booked(rows=7), 3, 0),  # nobody knows
    ],
)
def test_admission_waits_for_as_many_ends_as_it_needs(
    load: LoadReport, booked: Booked, sequences: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weight in ("STREAMING", "STALL"):  # the rows that are there make a difference in these, too
        monkeypatch.setattr(cost, weight, 0.0)
    assert admission(load, booked, sequences) == pytest.approx(turns * 0.4)


def test_blocks_that_lack_are_released_by_those_that_end() -> None:
    # Each of the ten holds 1,600 tokens now and 1,700 at its end: 0.4 s for so many.
    out = replace(FULL, max_running=100, free=0, referenced=1000)
    needed = REQUEST.tokens + REQUEST.output
    assert admission(out) == pytest.approx(needed / 1700 * 0.4)
    assert admission(replace(out, waiting_tokens=3400)) == pytest.approx((needed + 3400) / 1700 * 0.4)


def test_admission_waits_once_for_seats_and_blocks_together() -> None:
    out = replace(FULL, free=0, referenced=1000, waiting_tokens=3400)
    for_blocks = (REQUEST.tokens + REQUEST.output + 3400) / 1700
    for waiting in (0, 2, 20):
        for held_up in (0, waiting):
            load = replace(out, waiting=waiting, held_up=held_up)
            assert admission(load) == pytest.approx(max(1 + waiting, for_blocks) * 0.4)


def test_those_that_are_held_up_slow_nobody_down_but_are_waited_for() -> None:
    # Their prefixes are cached, so that hardly a token is to be computed, but there are no blocks to run them.
    idle_looking = replace(IDLE, running=10, kv_tokens=60_000, waiting_tokens=140, free=200, evictable=300)
    held = replace(idle_looking, waiting=140, held_up=140, max_running=256)
    step, mine = StepModel(), Booked(seen_rows=150, seen_kv=900_000)
    at = terms(held, mine, step, 1.0, BLOCK, 100.0)
    assert at.crowd_drag == pytest.approx(10 * at.drag)
    turn = at.shortage.turn
    assert turn == pytest.approx(200 * step.seconds(10, 60_000) / 10)
    assert price(held, booked=mine) > price(idle_looking) + 140 * turn
    other = replace(IDLE, waiting_tokens=30_000, running=30, kv_tokens=200_000)
    assert price(other) < price(held, 3900)


def test_no_more_rows_are_expected_than_there_are_seats() -> None:
    at = terms(replace(FULL, waiting=30), Booked(rows=10), StepModel(), 1.0, BLOCK, 100.0)
    assert at.crowd_drag == pytest.approx(10 * at.drag)


@pytest.mark.parametrize("weight", [0.0, 1.0, 100.0])
def test_any_weight_of_streaming_will_do(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    saturated = replace(IDLE, running=30, kv_tokens=12_000, free=0, evictable=0, referenced=1000)
    before = admission(saturated)
    monkeypatch.setattr(cost, "STREAMING", weight)
    monkeypatch.setattr(cost, "STALL", weight)
    assert admission(saturated) == pytest.approx(before)
    assert price(saturated) > price(replace(saturated, free=1000)) > 0.0
    assert (price(replace(IDLE, running=30)) > price(IDLE)) is (weight > 0.0)


def test_copy_that_is_due_costs_nothing_but_the_rest_of_the_prompt() -> None:
    due = REQUEST._replace(shared=3000, due=1.0)
    assert math.isclose(price(IDLE, 0, due), price(IDLE, 3000))
    half = REQUEST._replace(shared=3000, due=0.5)
    assert price(IDLE, 3000) < price(IDLE, 0, half) < price(IDLE)


broken = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=True, allow_infinity=True))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.lists(broken, min_size=14, max_size=14),
    st.lists(st.integers(0, 2**40), min_size=5, max_size=5),
    st.integers(1, 2**30),
    st.floats(0, 1e7),
    st.floats(0, 1),
)
def test_no_report_makes_a_cost_that_is_not_a_number(
    fields: list[float], booked: list[int], tokens: int, output: float, share: float
) -> None:
    load = sane(LoadReport(*fields))  # type: ignore[arg-type]
    demand = Demand(tokens, output, output / 2, 3, tokens // 2, share)
    price_of_it = price(load, 0, demand, share, Booked(*booked))
    assert math.isfinite(price_of_it)
    assert price_of_it > 0.0


def test_step_model_finds_the_coefficients() -> None:
    model, draw = StepModel(), random.Random(1)
    for _ in range(2000):
        rows = draw.randint(1, 100)
        kv = sum(draw.randint(100, 8000) for _ in range(rows))
        model.learn(rows, kv, (0.008 + 3e-5 * rows + 5e-8 * kv) * draw.uniform(0.97, 1.03))
    for rows, kv in ((1, 500), (30, 60_000), (100, 400_000)):
        assert math.isclose(model.seconds(rows, kv), 0.008 + 3e-5 * rows + 5e-8 * kv, rel_tol=0.06)


def test_step_model_stays_sensible_where_reports_say_little() -> None:
    one = StepModel()
    one.learn(1, 100, 0.005)
    assert math.isclose(one.seconds(1, 100), 0.005, rel_tol=0.05)
    shrinking = StepModel()
    for rows in range(1, 300):  # faster with more rows: no coefficient may go below zero
        shrinking.learn(rows, 100 * rows, 0.02 / rows)
    assert min(shrinking.base, shrinking.per_row, shrinking.per_kv_token) >= 0.0
    assert not shrinking.learn(0, 0, 0.01)
    assert not shrinking.learn(5, 10, 0.0)


def test_step_model_follows_a_change() -> None:
    model = StepModel()
    for seconds_each in (0.01, 0.03):
        for index in range(4000):
            model.learn(1 + index % 50, 1000 * (1 + index % 7), seconds_each)
    assert math.isclose(model.seconds(10, 3000), 0.03, rel_tol=0.05)


def test_expected_output_follows_what_ends() -> None:
    outputs = OutputLength()
    for _ in range(400):
        outputs.learn(40)
    assert math.isclose(outputs.tokens, 40, rel_tol=0.02)


def test_reuse_is_the_share_of_what_is_made_again() -> None:
    reuse = ReuseShare()
    assert reuse.share == 0.0
    fresh = itertools.count()
    for _ in range(500):  # one prefix for all stays cached; the rest and the outputs are new each time
        reuse.learn([*range(-400, 0), *(next(fresh) for _ in range(64))], 400, 16)
    assert reuse.share == 0.0
    for _ in range(100):  # twenty prefixes are pushed out and computed again
        for prefix in range(20):
            reuse.learn(range(10_000 * (prefix + 100), 10_000 * (prefix + 100) + 320), 0, 80)
    assert math.isclose(reuse.share, 320 / 400, rel_tol=0.05)
    for _ in range(5000):
        reuse.learn([next(fresh) for _ in range(64)], 0, 16)
    assert 0.0 <= reuse.share < 0.01


def test_reuse_of_short_prompts_and_short_rests() -> None:
    for held in (0, 4, 9, 17, 40):  # a system prompt that stays cached, and a few blocks of one's own
        reuse = ReuseShare()
        for _ in range(200):
            for name in range(20):
                reuse.learn([*range(-held, 0), *range(100 * name, 100 * name + 3)], held, 9)
        assert math.isclose(reuse.share, 3 / 12, rel_tol=0.05), held
    for name in range(2000):  # siblings do not pass for each other
        reuse.learn([*range(-held, 0), *range(10_000 + 100 * name, 10_003 + 100 * name)], held, 9)
    assert reuse.share < 0.01


def test_what_reuse_remembers_is_bounded() -> None:
    reuse = ReuseShare()
    for start in range(0, 40_000_000, 16_000):
        reuse.learn(range(start, start + 16_000), 0, 0)
    assert len(reuse._known) == REMEMBERED
    assert reuse.share == 0.0


def test_reported_work_is_done_as_time_passes() -> None:
    waiting = replace(IDLE, waiting_tokens=1_000)
    rate = waiting.prefill_rate
    now, later, long_after = (price(waiting, age=age) for age in (0.0, 400 / rate, 5_000 / rate))
    assert math.isclose(now - later, 400 / rate)
    assert math.isclose(now - long_after, 1_000 / rate)
    # A replica that falls silent does not empty itself.
    long = replace(IDLE, waiting_tokens=100_000)
    assert math.isclose(price(long) - price(long, age=60.0), cost.SILENT_S)
    # What was sent there since then has not begun, and those without a seat do not.
    sent = Booked(prefill=1_000)
    assert price(IDLE, booked=sent, age=1.0) == price(IDLE, booked=sent)
    held_up = replace(waiting, waiting=1, held_up=1, running=4, max_running=4)
    assert price(held_up, age=1.0) == price(held_up)


def test_share_of_a_prefix_is_of_the_last_requests_only() -> None:
    hot = PrefixShare()
    for index in range(1000):
        hot.learn(1 if index % 2 else index + 10)
    assert math.isclose(hot.share(1), 0.5, abs_tol=0.01)
    for index in range(200):
        hot.learn(-index - 1)
    assert hot.share(1) == 0.0
