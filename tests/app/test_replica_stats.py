"""What a replica reports to the scaling policy is what its engine has and expects."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from engine_stats import STATS
from hypothesis import given
from hypothesis import strategies as st
from kv_simulation import KVSimulation, make_request, make_scheduler

from app.autoscaling.snapshot import ReplicaStats
from app.replica_stats import StatsReporter
from engine.scheduling.load_report import EngineLoad, LoadReporter
from engine.scheduling.step import StepTiming
from engine.stats import EngineStats

NODE = "f" * 56
LOAD = EngineLoad(
    waiting_tokens=50,
    running=4,
    kv_tokens=100,
    referenced=30,
    free=50,
    evictable=20,
    prefill_rate=2000.0,
    step_seconds=0.05,
    waiting=3,
    num_blocked=0,
    num_lacking=0,
    max_running=8,
    first_end=0.0,
    half_ended=0.0,
    all_ended=0.0,
)


class Clock:
    """Told what time it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def engine(**figures: Any) -> EngineStats:
    return dataclasses.replace(STATS, scheduler=dataclasses.replace(STATS.scheduler, **figures))


def load(**figures: Any) -> EngineLoad:
    return dataclasses.replace(LOAD, **figures)


def read(stats: EngineStats, now: EngineLoad) -> ReplicaStats:
    return StatsReporter(NODE, False, 5.0).read(stats, now)


def test_blocks_that_waiting_ones_lack_with_those_on_the_host() -> None:
    got = read(engine(host_blocks_used=9), load(waiting_tokens=50))
    assert got.waiting_blocks == 4 + 9  # 50 tokens in blocks of 16
    assert got.referenced_blocks == 30
    assert (got.num_blocks, got.sequences, got.backlog_tokens) == (100, 7, 50)


def test_each_one_that_waits_lacks_a_block_however_short_it_is() -> None:
    assert read(engine(host_blocks_used=0), load(waiting_tokens=50, waiting=20)).waiting_blocks == 20


def test_demand_of_an_engine_is_what_all_its_sequences_hold_and_lack() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=4, host_blocks=8, recovery="swap")
    model = KVSimulation(4)
    reporter = LoadReporter(scheduler.state, prefill_rate=1.0)
    for number in range(9):
        text = [number + 1] * (5 + 2 * number)
        scheduler.add(make_request(f"r{number}", text, max_tokens=12, ignore_eos=True))
    waited = swapped = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, model.run(plan), StepTiming(0.1))
        reporter.stepped(plan, 0.1)
        stats = dataclasses.replace(STATS, scheduler=scheduler.stats(), num_blocks=16, block_size=4)
        got = read(stats, reporter.read())
        needed = sum(-(-len(sequence.token_ids) // 4) for sequence in scheduler.state.sequences.values())
        # A partial block at each end; nothing else is lost or counted twice.
        assert abs(got.referenced_blocks + got.waiting_blocks - needed) <= max(got.sequences, 1)
        waited = max(waited, len(scheduler.state.waiting))
        swapped = max(swapped, scheduler.state.num_swapped)
    assert waited >= 5
    assert swapped
    assert got.referenced_blocks == got.waiting_blocks == got.growth_blocks == 0


def test_growth_is_what_running_ones_still_get() -> None:
    got = read(engine(remaining_output=40.0, running_limit=1000), load())
    assert got.growth_blocks == 4 * 40 / 16


def test_growth_ends_at_the_limits_of_the_running_ones() -> None:
    assert read(engine(remaining_output=40.0, running_limit=132), load()).growth_blocks == 2
    assert read(engine(remaining_output=40.0, running_limit=90), load()).growth_blocks == 0


def test_nothing_runs_nothing_grows() -> None:
    assert read(engine(remaining_output=40.0), load(running=0, kv_tokens=0)).growth_blocks == 0


def test_totals_and_place() -> None:
    got = StatsReporter("00000000000a" + "f" * 44, True, 5.0).read(engine(arrived_tokens=77.5), load())
    assert (got.arrived_tokens, got.preemptions, got.prefill_rate) == (77.5, 8, 2000.0)
    assert (got.node, got.on_head, got.started_at) == (10.0, 1.0, 5.0)
    assert read(engine(), load()).node == 2**48 - 1  # exact in a float


def test_one_slow_step_is_no_slow_replica() -> None:
    clock = Clock()
    reporter = StatsReporter(NODE, False, clock=clock)

    def after(seconds: float, step: float, running: int = 1) -> float:
        clock.now += seconds
        return reporter.read(engine(), load(step_seconds=step, running=running)).step_seconds

    assert after(0.0, 0.02) == 0.02
    assert after(0.1, 1.02) < 0.1
    for _ in range(100):
        last = after(0.1, 1.02)
    assert last == pytest.approx(1.02, rel=0.01)
    assert after(0.1, 1.02, running=0) == 0.0
    assert after(0.1, 0.02) == 0.02


counts = st.integers(0, 10**9)
rates = st.floats(0.0, 1e9)


@given(counts, counts, counts, counts, rates, rates, rates, rates)
def test_every_figure_is_finite_and_not_negative(
    waiting_tokens: int,
    running: int,
    kv_tokens: int,
    limit: int,
    remaining: float,
    arrived: float,
    rate: float,
    step: float,
) -> None:
    reporter = StatsReporter(NODE, True)
    stats = engine(running_limit=limit, remaining_output=remaining, arrived_tokens=arrived)
    now = load(
        waiting_tokens=waiting_tokens,
        running=running,
        kv_tokens=kv_tokens,
        prefill_rate=rate,
        step_seconds=step,
    )
    for _ in range(2):
        for name, value in reporter.read(stats, now)._asdict().items():
            assert type(value) is float, name
            assert math.isfinite(value), name
            assert value >= 0, name
