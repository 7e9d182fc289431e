"""The simulated fleet of the autoscaling experiment: one replica by hand, and what must hold of any run."""

from __future__ import annotations

import numpy as np
import pytest

from app.autoscaling.occupancy import decide_by_occupancy
from app.autoscaling.snapshot import ReplicaStats
from loadtests.experiments.autoscaling.constants import BLOCK_SIZE, SERVICE
from loadtests.experiments.autoscaling.fleet import Fleet
from loadtests.experiments.autoscaling.policies import KvDemand, RayDefault, View
from loadtests.experiments.autoscaling.runs import simulate
from loadtests.experiments.autoscaling.workloads import Workload, constant, poisson


def load(*requests: tuple[float, float, float], seconds: float = 60.0) -> Workload:
    arrival, prompt, output = (np.array(column, float) for column in zip(*requests, strict=True))
    return Workload("by hand", arrival, prompt, output, seconds)


def run(fleet: Fleet, seconds: float) -> None:
    while fleet.now < seconds:
        fleet.tick()


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    fleet = Fleet(load((1.0, 10_000.0, 101.0)), most=1, first=1, startup_s=0.0)
    run(fleet, 10.0)
    assert fleet.first[0] == pytest.approx(1.0 + 10_000.0 / SERVICE.prefill_rate)
    step = SERVICE.step_base + SERVICE.step_row + SERVICE.step_token * 10_050.0
    assert (fleet.done[0] - fleet.first[0]) / 100.0 == pytest.approx(step, rel=0.15)  # a tick's end in 2.5 s
    assert fleet.idle


def test_prompts_are_computed_in_the_order_of_their_arrival() -> None:
    fleet = Fleet(load((0.0, 20_000.0, 10.0), (0.01, 20_000.0, 10.0)), most=1, first=1, startup_s=0.0)
    run(fleet, 5.0)
    # The second one's share falls while the first one decodes.
    assert fleet.first[0] == pytest.approx(1.0)
    assert 2.0 <= fleet.first[1] <= 2.5


def test_nobody_starts_where_his_blocks_do_not_fit() -> None:
    much = SERVICE.pool_tokens * 0.6
    fleet = Fleet(load((0.0, much, 400.0), (0.0, much, 10.0)), most=1, first=1, startup_s=0.0)
    run(fleet, 13.0)
    assert np.isfinite(fleet.first[0])
    assert not np.isfinite(fleet.first[1])
    assert fleet.lacking.sum() == much
    run(fleet, 60.0)
    assert fleet.first[1] > fleet.done[0]


def test_a_replica_serves_after_the_time_to_start_and_goes_when_its_last_request_ends() -> None:
    fleet = Fleet(load((0.0, 1_000.0, 2_000.0)), most=3, first=1, startup_s=10.0)
    fleet.set_target(2)
    run(fleet, 9.75)
    assert fleet.running == 1
    fleet.tick()
    fleet.tick()
    assert fleet.running == 2
    fleet.set_target(1)
    fleet.tick()
    assert np.count_nonzero(fleet.exists) == 1  # the newest was idle
    fleet.set_target(0)
    fleet.tick()
    assert (fleet.running, int(np.count_nonzero(fleet.exists))) == (0, 1)
    run(fleet, 40.0)
    assert np.count_nonzero(fleet.exists) == 0
    assert np.isfinite(fleet.done[0])


def test_what_waits_at_a_replica_that_stops_is_served_elsewhere() -> None:
    much = SERVICE.pool_tokens * 0.9
    fleet = Fleet(
        load((0.0, much, 900.0), (0.0, much, 10.0), (0.1, much, 10.0)), most=2, first=2, startup_s=0.0
    )
    run(fleet, 1.0)
    fleet.set_target(1)
    run(fleet, 120.0)
    assert np.isfinite(fleet.done).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_once_after_it_came(seed: int) -> None:
    workload = poisson("mixed", [4.0, 30.0, 4.0], 300.0, (3_000.0, 1.0), (400.0, 0.8), seed)
    fleet = Fleet(workload, most=3, first=3, startup_s=5.0)
    while not fleet.idle:
        fleet.tick()
        live = np.concatenate([fleet._waiting, fleet._prefilling, fleet._decoding])
        assert len(live) == len(set(live.tolist())) == fleet.ongoing - fleet.queued
        assert (fleet.held <= SERVICE.pool_tokens).all()
        if 100.0 <= fleet.now < 100.25:
            fleet.set_target(1)
        if 150.0 <= fleet.now < 150.25:
            fleet.set_target(3)
        assert fleet.now < 4_000.0
    assert (fleet.first >= workload.arrival).all()
    assert (fleet.done >= fleet.first).all()
    assert (fleet.made >= workload.output).all()
    assert not fleet.held.any()


def test_where_decodes_outgrow_the_pool_the_latest_waits_and_computes_all_anew() -> None:
    half = SERVICE.pool_tokens * 0.499
    fleet = Fleet(load((0.0, half, 3_000.0), (0.0, half, 3_000.0)), most=1, first=1, startup_s=0.0)
    while not fleet.idle:
        fleet.tick()
    assert fleet.preemptions >= 1
    assert fleet.done[0] < fleet.done[1]


def test_the_same_run_twice_gives_the_same() -> None:
    one, two = (simulate(constant(20.0, 300.0, 3), KvDemand(), 2) for _ in range(2))
    assert (one.served, one.replica_hours, one.ttft_p99) == (two.served, two.replica_hours, two.ttft_p99)


class Occupancy(KvDemand):
    """The other rule that production has."""

    rule = staticmethod(decide_by_occupancy)


def test_kv_bound_load_gets_replicas_where_occupancy_sees_none_missing() -> None:
    rate = 14.0 * (0.6 + 0.6 * np.sin(np.pi * np.linspace(0.0, 1.0, 60)))
    workload = poisson("long decode", rate, 600.0, (600.0, 0.5), (2_500.0, 0.5), 1)
    ours, theirs = (simulate(workload, policy, 2) for policy in (KvDemand(), Occupancy()))
    assert ours.served > theirs.served
    assert ours.most_stopped <= 0.1


def view(now: float, target: int, ongoing: int, fleet: Fleet) -> View:
    return View(now, target, fleet.running, 40, fleet.reports(), 0, ongoing)


def test_a_report_is_whole() -> None:
    fleet = Fleet(load((0.0, 1_000.0, 900.0), (0.0, 50.0, 900.0)), most=3, first=2, startup_s=0.0)
    run(fleet, 1.0)
    for report in fleet.reports().values():
        assert report == ReplicaStats(**report._asdict())
        assert (report.num_blocks, report.sequences) == (SERVICE.pool_tokens / BLOCK_SIZE, 1.0)
        assert (report.prefill_rate, report.preemptions) == (SERVICE.prefill_rate, 0.0)
        assert report.step_seconds == pytest.approx(0.007, rel=0.01)
        assert report.arrived_tokens in (1_000.0, 50.0)
        assert all(isinstance(value, float | int) for value in report)


def test_ray_s_policy_moves_after_its_delay() -> None:
    policy = RayDefault(40, 32, 30, 600)
    fleet = Fleet(load((0.0, 1.0, 1.0)), most=40, first=2, startup_s=0.0)
    targets = [policy(view(float(second), 2, 320, fleet)) for second in range(40)]
    assert targets[:30] == [2] * 30
    assert targets[30] == 10
