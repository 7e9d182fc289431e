"""How many replicas KV demand needs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_support import stats

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.occupancy import decide_by_occupancy
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, Snapshot


def snapshot(now: float, target: int, *reports: ReplicaStats, **more: Any) -> Snapshot:
    values = {"running": len(reports), "minimum": 1, "maximum": 100, **more}
    return Snapshot(now, target, replicas=dict(enumerate(reports)), **values)


def settled(target: int, *reports: ReplicaStats, config: ScalingConfig | None = None, **more: Any) -> Any:
    """The decision after ten minutes of the same."""
    state, decision = ScalingState(), None
    for second in range(600):
        decision = decide(snapshot(float(second), target, *reports, **more), config or ScalingConfig(), state)
        if decision.target != target:
            break
    return decision


def test_demand_beyond_the_pool_asks_for_as_many_as_it_fills() -> None:
    # 900 referenced and 2,850 lacking are 3.75 pools: 5 at 75%.
    decision = decide(snapshot(0.0, 1, stats(900.0, waiting_blocks=2_850.0)), ScalingConfig(), ScalingState())
    assert (decision.target, decision.reason) == (5, "kv")
    assert decision.need_kv == pytest.approx(5.0)


def test_pools_without_work_are_no_demand() -> None:
    assert settled(2, stats(0.0), stats(0.0), config=ScalingConfig(reserve=0.0)).target == 1


def test_without_work_the_reserve_stays_unless_no_replica_has_to() -> None:
    config = ScalingConfig(reserve=2.0)
    assert settled(2, stats(0.0), stats(0.0), config=config).target == 2
    assert settled(2, stats(0.0), stats(0.0), config=config, minimum=0).target == 1


def test_a_share_of_the_expected_growth_counts() -> None:
    reports = [stats(600.0, growth_blocks=600.0)] * 2
    config = ScalingConfig(reserve=0.0, growth_share=0.5)
    assert decide(snapshot(0.0, 2, *reports), config, ScalingState()).need_kv == pytest.approx(1_800.0 / 750.0)


def test_silent_replicas_count_as_the_mean_of_the_others() -> None:
    config = ScalingConfig(growth_share=0.5)
    one = stats(300.0, waiting_blocks=100.0, growth_blocks=200.0)
    state = ScalingState()
    decide(snapshot(0.0, 10, *[one] * 10), config, state)
    decision = decide(snapshot(1.0, 10, *[one] * 8, running=10), config, state)
    # All ten hold 300, lack 100, and grow by half of 200 blocks.
    assert decision.need_kv == pytest.approx(10 * 500.0 / 750.0)
    assert decision.demand == pytest.approx(0.5)
    queued = decide(snapshot(2.0, 10, *[one] * 8, running=10, queued=12.0), config, state)
    # A queued request counts as the mean of the 6 sequences of each replica: (400 + 200) / 6 blocks.
    assert queued.demand == pytest.approx((10 * 500.0 + 12.0 * 100.0) / 10_000.0)


def test_arrivals_after_a_restart_of_the_counter_count() -> None:
    config, state, decision = ScalingConfig(), ScalingState(), None
    for second in range(31):
        # The engine of the one replica restarts at 16 s; its counter begins at 0 and has 6,000 tokens at once.
        arrived = 6_000.0 * (second + 1 if second < 16 else second - 15)
        decision = decide(snapshot(float(second), 1, stats(10.0, arrived_tokens=arrived)), config, state)
    assert decision is not None
    assert decision.need_prefill == pytest.approx(1.0)  # 6,000 tokens/s over 60% of 10,000


@pytest.mark.parametrize(("startup_s", "window_s"), [(300.0, 600.0), (60.0, 120.0), (5.0, 60.0)])
@pytest.mark.parametrize("rule", [decide, decide_by_occupancy])
def test_the_window_is_twice_the_startup_time_but_not_below_a_minute(
    rule: Any, startup_s: float, window_s: float
) -> None:
    config, state = ScalingConfig(startup_s=startup_s), ScalingState()
    targets = [
        rule(snapshot(float(second), 9, *[stats(10.0)] * 9), config, state).target for second in range(601)
    ]
    assert targets.index(8) == window_s


def test_the_window_follows_startup_times_that_were_measured() -> None:
    config, state = ScalingConfig(startup_s=300.0), ScalingState()
    state.starts.extend([40.0] * 10)
    assert state.window_s(config) == 80.0
    assert state.window_s(ScalingConfig(startup_s=300.0, down_window_s=7.0)) == 7.0


def test_requests_without_a_replica_count_as_the_others_do() -> None:
    one = stats(500.0, sequences=10.0)
    decision = decide(snapshot(0.0, 1, one, queued=30.0), ScalingConfig(), ScalingState())
    assert decision.need_kv == pytest.approx((500.0 + 30.0 * 50.0) / 750.0)


def test_arriving_prompts_are_a_need_where_blocks_are_not() -> None:
    state, decision = ScalingState(), None
    for second in range(31):
        one = stats(10.0, arrived_tokens=18_000.0 * second)
        decision = decide(snapshot(float(second), 4, one, one, one, one), ScalingConfig(), state)
    assert decision is not None
    # 4 x 18,000 tokens/s over 60% of 10,000, and the reserve.
    assert decision.need_prefill == pytest.approx(12.0)
    assert (decision.reason, decision.target) == ("prefill", 8)  # at most twice as many at once


def test_a_backlog_of_prompts_is_seen_at_once() -> None:
    reports = [stats(10.0, backlog_tokens=10_000.0)] * 4  # a second each, of a target of 2
    decision = decide(snapshot(0.0, 4, *reports), ScalingConfig(), ScalingState())
    assert decision.need_prefill == pytest.approx(8.0)


def test_one_long_prompt_is_no_lack_of_replicas_where_the_others_have_no_backlog() -> None:
    long = stats(10.0, backlog_tokens=20_000.0)
    one = decide(snapshot(0.0, 3, long, stats(10.0), stats(10.0)), ScalingConfig(), ScalingState())
    assert (one.target, one.need_prefill) == (3, 0.0)
    # A second one is shared: 10,000 tokens for each of the other two, a second of each.
    two = decide(snapshot(0.0, 3, long, long, stats(10.0)), ScalingConfig(), ScalingState())
    assert two.target == 7
    assert two.need_prefill == pytest.approx(6.0)


def test_long_prompts_on_half_of_the_replicas_are_no_lack_of_them() -> None:
    long = stats(10.0, backlog_tokens=20_000.0)
    half = decide(snapshot(0.0, 6, *[long] * 3, *[stats(10.0)] * 3), ScalingConfig(), ScalingState())
    assert (half.target, half.need_prefill) == (6, 0.0)
    # A fourth one is shared by the three with the least: two thirds of a second each, over a quarter of 2 s.
    more = decide(snapshot(0.0, 6, *[long] * 4, *[stats(10.0)] * 2), ScalingConfig(), ScalingState())
    assert more.need_prefill == pytest.approx(6 * (2.0 / 3.0) / 0.5)


def test_a_backlog_that_is_gone_at_once_needs_no_replica_and_one_that_lasts_does() -> None:
    """From 60 s on a second of prompts waits at each of two replicas, until 80 s."""
    config, state, needs = ScalingConfig(), ScalingState(), []
    for second in range(85):
        one = stats(10.0, backlog_tokens=10_000.0 if 60 <= second < 80 else 0.0)
        needs.append(decide(snapshot(float(second), 2, one, one), config, state).need_prefill)
    # Its mean over 5 s exceeds an eighth of 2 s after two.
    assert [second for second, need in enumerate(needs) if need] == list(range(61, 80))
    assert needs[61] == pytest.approx(2 * (2.0 / 5.0) / 0.5)
    assert needs[79] == pytest.approx(2 * 1.0 / 0.5)


@pytest.mark.parametrize(("busy", "late"), [(1, False), (2, True), (4, True)])
def test_prompts_that_wait_at_more_replicas_than_one_make_a_burst(busy: int, late: bool) -> None:
    """12 s of prompts at each that is busy: the others have 4 s in the mean, beside one; the target is 2 s."""
    full, state = stats(600.0, backlog_tokens=120_000.0), ScalingState()
    for second in range(100):
        reports = [full] * busy + [stats(600.0)] * (4 - busy) if second < 2 else [stats(0.0)] * 4
        decide(snapshot(float(second), 4, *reports), ScalingConfig(), state)
    assert (state.bursts.size > 0.0) is late


def test_short_sequences_run_out_of_seats_before_blocks() -> None:
    full = stats(100.0, sequences=256.0, max_running=256.0)
    decision = decide(snapshot(0.0, 2, full, full, queued=64.0), ScalingConfig(), ScalingState())
    assert decision.need_kv == pytest.approx((512.0 + 64.0) / (0.75 * 256.0))
    assert decision.target == 3
    half = stats(100.0, sequences=140.0, max_running=256.0)
    assert settled(3, half, half, half).target == 3  # 2.2 at the upper mark, and 2.34 at the lower one


def test_replicas_that_do_not_report_their_seats_are_taken_to_have_as_many() -> None:
    full, unknown = (stats(100.0, sequences=256.0, max_running=seats) for seats in (256.0, 0.0))
    decision = decide(snapshot(0.0, 2, full, unknown), ScalingConfig(), ScalingState())
    assert decision.need_kv == pytest.approx(512.0 / (0.75 * 256.0))
    decision = decide(snapshot(0.0, 2, unknown, unknown), ScalingConfig(), ScalingState())
    assert decision.need_kv == pytest.approx(200.0 / 750.0)


def test_slow_steps_are_a_need() -> None:
    reports = [stats(10.0, step_seconds=0.09)] * 4
    decision = decide(snapshot(0.0, 4, *reports), ScalingConfig(), ScalingState())
    assert decision.reason == "decode"
    assert decision.need_decode == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("steps", "target"),
    [
        ((6.0, 0.035), 2),
        ((6.0, 6.0, 0.0, 0.0), 4),
        ((6.0, 0.051, 0.01), 4),  # 3.4: two of three are too slow, by little
        ((6.0, 6.0, 0.0), 7),  # at most four more at once
        ((6.0,) * 19 + (0.01,) * 21, 40),
        ((0.09,) * 21 + (0.01,) * 19, 80),
    ],
)
def test_only_slow_steps_of_most_replicas_enlarge_the_fleet(steps: tuple[float, ...], target: int) -> None:
    """And no further than to where they are the smaller part."""
    config, state = ScalingConfig(), ScalingState()
    reports = [stats(1.0, step_seconds=seconds) for seconds in steps]
    assert decide(snapshot(0.0, len(reports), *reports), config, state).target == target
    reports += [stats(1.0, step_seconds=0.01)] * (target - len(reports))
    for second in range(1, 10):
        assert decide(snapshot(float(second), target, *reports), config, state).target <= target


def test_a_replica_that_has_just_started_has_no_slow_steps_yet() -> None:
    config, state = ScalingConfig(), ScalingState()
    slow = [stats(10.0, step_seconds=0.05)] * 5
    assert decide(snapshot(0.0, 5, *slow), config, state).target == 6
    started = decide(snapshot(1.0, 6, *slow, running=6), config, state)
    assert (started.target, started.need_decode) == (6, pytest.approx(5 * 0.05 / 0.045))


@pytest.mark.parametrize(
    ("sequences", "fleet", "settles"),
    [(70, 1, [2]), (70, 2, []), (70, 3, []), (300, 8, [7]), (1, 8, [7, 6, 5, 4, 3, 2, 1])],
)
def test_a_constant_number_of_sequences_does_not_make_the_fleet_oscillate(
    sequences: int, fleet: int, settles: list[int]
) -> None:
    """A step takes 20 ms, and half a millisecond for each; two hours, and a minute for a start."""
    config, state, target, running, starts, targets = ScalingConfig(), ScalingState(), fleet, fleet, 0.0, []
    for second in range(7_200):
        running = target if second >= starts else running
        each = sequences / running
        one = stats(8 * each, sequences=each, step_seconds=0.02 + 0.0005 * each)
        decision = decide(snapshot(float(second), target, *[one] * running, running=running), config, state)
        if decision.target != target:
            targets.append(decision.target)
            starts = second + 60.0 if decision.target > target else second
            target = decision.target
    assert targets == settles


def test_one_decision_at_most_doubles_a_fleet_but_small_ones_may_grow_by_four() -> None:
    much = stats(900.0, waiting_blocks=90_000.0)
    assert decide(snapshot(0.0, 1, much), ScalingConfig(), ScalingState()).target == 5
    assert decide(snapshot(0.0, 10, *[much] * 10), ScalingConfig(), ScalingState()).target == 20


def test_what_starts_is_not_asked_for_twice() -> None:
    config, state = ScalingConfig(), ScalingState()
    one = stats(900.0, waiting_blocks=2_850.0)
    assert decide(snapshot(0.0, 1, one), config, state).target == 5
    assert decide(snapshot(1.0, 5, one, running=1), config, state).target == 5


def test_the_maximum_holds_and_says_so() -> None:
    decision = decide(snapshot(0.0, 3, *[stats(5_000.0)] * 3, maximum=3), ScalingConfig(), ScalingState())
    assert (decision.target, decision.held_by) == (3, "maximum")


def test_new_bounds_move_the_target() -> None:
    calm = [stats(400.0)] * 5
    assert decide(snapshot(0.0, 5, *calm, maximum=4), ScalingConfig(), ScalingState()).target == 4
    assert decide(snapshot(0.0, 5, *calm, minimum=7), ScalingConfig(), ScalingState()).target == 7


def test_a_rise_of_demand_is_not_extended() -> None:
    config, state, decision = ScalingConfig(startup_s=30.0), ScalingState(), None
    for second in range(31):
        one = stats(100.0 + 10.0 * second, sequences=200.0)
        decision = decide(snapshot(float(second), 10, *[one] * 10), config, state)
    assert decision is not None
    assert decision.need_kv == pytest.approx(4_000.0 / 900.0)


@pytest.mark.parametrize(("peak", "target"), [(800.0, 4), (950.0, 5)])
def test_a_short_peak_needs_no_replica_unless_it_nearly_fills_the_pools(peak: float, target: int) -> None:
    config, state, decision = ScalingConfig(), ScalingState(), None
    for second in range(60):
        one = stats(peak if second >= 55 else 600.0)
        decision = decide(snapshot(float(second), 4, *[one] * 4), config, state)
    assert decision is not None
    assert decision.target == target
    lasting = [stats(800.0)] * 4
    assert decide(snapshot(0.0, 4, *lasting), config, ScalingState()).target == 5


@pytest.mark.parametrize(("clump", "more"), [(50, 0.0), (20, 0.5)])
def test_a_smaller_fleet_must_bear_the_usual_rise_of_prompts(clump: int, more: float) -> None:
    """A mean of 5,000 tokens/s, steady or in clumps of 20 s every 50 s."""
    config, state, arrived = ScalingConfig(reserve=0.0), ScalingState(), 0.0
    for second in range(600):
        arrived += 5_000.0 * 50.0 / clump * (second % 50 < clump)
        decision = decide(snapshot(float(second), 1, stats(10.0, arrived_tokens=arrived)), config, state)
    assert (state.lows[-1][1] > decision.need_prefill + more) is (more > 0.0)


def test_of_idle_replicas_the_first_goes_after_a_quarter_of_the_window_and_the_last_after_all_of_it() -> None:
    config, state, target, stops = ScalingConfig(down_window_s=200.0, reserve=0.0), ScalingState(), 9, []
    for second in range(900):
        load = 8.5 * 700.0 if second < 400 else 700.0  # at the lower mark: 8.5 replicas, then one
        reports = [stats(load / target)] * target
        wanted = decide(snapshot(float(second), target, *reports), config, state).target
        stops += [second - 399] * (target - wanted)
        target = wanted
    assert len(stops) == 8
    assert stops[0] == 51
    assert stops[3] == 116  # 1 + 7.5 x what is kept of it after so long is 5.1
    assert stops[-1] == 199


def test_what_a_backlog_started_is_kept_as_if_it_were_still_needed() -> None:
    config, state, target, running = ScalingConfig(), ScalingState(), 2, 2
    targets = []
    for second in range(400):
        waiting = 50_000.0 if second == 200 else 0.0
        running = target if second >= 261 else 2
        reports = [stats(10.0, backlog_tokens=waiting)] * running
        target = decide(snapshot(float(second), target, *reports), config, state).target
        targets.append(target)
    assert set(targets[:200]) == {1, 2}
    assert targets[200] > 2
    assert targets[260] == targets[200]
    assert targets[261] == targets[200] - 1, "of what it asked for a minute ago, some has faded"
    assert targets[281] == 3
    assert targets[-1] < 3


def test_replicas_are_kept_for_a_burst_that_returns_and_the_decision_says_so() -> None:
    """Every six minutes a minute of 48,000 tokens/s, enough for eight replicas; fewer have a backlog."""
    config, state, target, running, arrived = ScalingConfig(reserve=0.0), ScalingState(), 2, 2, 0.0
    lulls = []
    for second in range(1_440):
        busy = second % 360 < 60
        running = running if busy else target  # what a burst starts comes after it
        arrived += 24_000.0 * busy
        one = stats(10.0, backlog_tokens=21_000.0 if busy and running < 8 else 0.0)
        reports = dict.fromkeys(range(running), one)
        reports |= {place: one._replace(arrived_tokens=arrived) for place in range(2)}
        decision = decide(Snapshot(float(second), target, running, 2, 100, reports), config, state)
        target = decision.target
        if second % 360 == 300:
            lulls.append((target, decision.held_by, decision.intended))
    assert lulls[0] == (2, "", 0)
    assert lulls[1:] == [(8, "a burst may return", 0)] * 3


def test_a_replica_that_has_just_started_has_no_load_yet() -> None:
    config, state = ScalingConfig(), ScalingState()
    busy = [stats(700.0)] * 5
    assert decide(snapshot(0.0, 6, *busy, running=5), config, state).need_kv == pytest.approx(3_500.0 / 750.0)
    started = decide(snapshot(1.0, 6, *busy, running=6), config, state)
    assert started.need_kv == pytest.approx(3_500.0 / 750.0)
    assert started.target == 6
    decide(snapshot(2.0, 6, *busy, stats(0.0)), config, state)
    silent = decide(snapshot(3.0, 6, *busy, running=6), config, state)
    assert silent.demand == pytest.approx(0.7)
    # One has stopped; the next one that starts is as new as the first.
    decide(snapshot(4.0, 5, *busy), config, state)
    assert decide(snapshot(5.0, 6, *busy, running=6), config, state).demand == pytest.approx(3_500.0 / 6_000.0)


def test_the_reserve_is_for_prompts() -> None:
    config = ScalingConfig(reserve=2.0)
    assert decide(snapshot(0.0, 2, *[stats(700.0)] * 2), config, ScalingState()).target == 2
    assert settled(3, *[stats(700.0)] * 3, config=config).target == 3
    state, target = ScalingState(), 2
    for second in range(31):
        one = stats(10.0, arrived_tokens=6_000.0 * second)
        target = decide(snapshot(float(second), target, *[one] * 2), config, state).target
    assert target == 4  # 12,000 tokens/s over 60% of 10,000, and two in reserve


@pytest.mark.parametrize(("backlog", "need"), [(0.0, 16.0 / 30.0 + 2.0 * 14.0 / 30.0), (6_000.0, 2.0)])
def test_arrivals_of_the_last_seconds_count_where_prompts_wait(backlog: float, need: float) -> None:
    """14 s with 12,000 tokens/s after 16 s with 6,000; 60% of 10,000 is the upper mark."""
    config, state, decision, arrived = ScalingConfig(), ScalingState(), None, 0.0
    for second in range(31):
        arrived += 12_000.0 if second > 16 else 6_000.0
        one = stats(10.0, arrived_tokens=arrived, backlog_tokens=backlog if second == 30 else 0.0)
        decision = decide(snapshot(float(second), 1, one), config, state)
    assert decision is not None
    assert decision.need_prefill == pytest.approx(need)


def test_stops_a_tenth_at_most_and_waits_in_between() -> None:
    config, state = ScalingConfig(down_window_s=300.0), ScalingState()
    target, moves = 40, []
    for second in range(900):
        decision = decide(snapshot(float(second), target, *[stats(10.0)] * target), config, state)
        if decision.target != target:
            moves.append((second, target - decision.target, target))
            target = decision.target
    assert moves[0][0] >= 300.0
    assert all(stopped <= max(1, fleet // 10) for _, stopped, fleet in moves)
    assert all(b[0] - a[0] >= config.down_interval_s for a, b in pairwise(moves))
    assert target == 1


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({"running": 4, "started": 0}, "replicas start"),
        ({"drop": 1}, "reports missing"),
        ({"preempt": True}, "preemptions"),
        ({"slow": 2}, "slow steps"),
    ],
)
def test_what_holds_a_fleet_that_could_be_smaller(change: dict[str, Any], held: str) -> None:
    config, state, decision = ScalingConfig(), ScalingState(), None
    for second in range(600):
        reports = {place: stats(10.0) for place in range(6)}
        for place in range(change.get("slow", 0)):
            reports[place] = stats(10.0, step_seconds=0.06)
        if "preempt" in change:
            reports[0] = stats(10.0, preemptions=float(second // 100))
        if "drop" in change:
            del reports[5]
        running = change.get("running", 6)
        if second == change.get("started"):
            state.last_up = float(second)
        reports = {place: one for place, one in reports.items() if place < running}
        decision = decide(Snapshot(float(second), 6, running, 1, 100, reports), config, state)
        assert decision.target == 6
    assert decision is not None
    assert decision.held_by == held


@pytest.mark.parametrize(
    ("fleet", "slow", "held"), [(2, 1, False), (2, 2, True), (40, 4, False), (40, 5, True)]
)
@pytest.mark.parametrize("seconds", [0.06, 6.0])
def test_stragglers_hold_no_fleet_for_ever(fleet: int, slow: int, held: bool, seconds: float) -> None:
    """And they make none larger, however slow they are."""
    config, state, target = ScalingConfig(), ScalingState(), fleet
    for second in range(600):
        reports = [stats(1.0, step_seconds=seconds if place < slow else 0.01) for place in range(target)]
        wanted = decide(snapshot(float(second), target, *reports), config, state).target
        assert held or wanted <= fleet
        target = min(target, wanted)
        if target < fleet:
            break
    assert (target == fleet) is held


def test_a_fleet_that_cannot_reach_its_target_shrinks_all_the_same() -> None:
    config, state = ScalingConfig(startup_s=10.0), ScalingState(last_up=0.0)
    targets = []
    for second in range(400):
        reports = {place: stats(10.0) for place in range(8)}
        targets.append(decide(Snapshot(float(second), 10, 8, 1, 100, reports), config, state).target)
    assert targets[299] == 10
    assert targets[300] == 9


@pytest.mark.parametrize("rule", [decide, decide_by_occupancy])
def test_first_replicas_that_start_for_longer_than_the_window_are_waited_for(rule: Any) -> None:
    config, state = ScalingConfig(startup_s=60.0, down_window_s=100.0), ScalingState()
    targets, reports = [], {0: stats(10.0)}
    for second in range(701):
        targets.append(rule(Snapshot(float(second), 4, 1, 1, 100, reports), config, state).target)
    assert set(targets[:600]) == {4}
    assert targets[600] == 3, "there may be no room for them"


def test_one_in_the_place_of_a_crashed_one_is_waited_for_anew() -> None:
    config, state = ScalingConfig(startup_s=60.0, reserve=4.0), ScalingState()
    for second in range(2_000):
        running = 3 if second in (700, 701) or second > 1_000 else 4
        reports = {place: stats(10.0) for place in range(running)}
        decision = decide(Snapshot(float(second), 4, running, 1, 100, reports), config, state)
        assert state.unsettled(Snapshot(float(second), 4, running, 1, 100, reports), config) == (
            "replicas start" if running == 3 and second < 1_601 else ""
        )
        assert decision.target == 4


def test_a_missed_report_loses_no_arrivals() -> None:
    config, state, decision = ScalingConfig(), ScalingState(), None
    for second in range(31):
        reports = {place: stats(10.0, arrived_tokens=6_000.0 * second) for place in range(10)}
        if second % 2:
            del reports[3]
        decision = decide(Snapshot(float(second), 40, 10, 1, 100, reports), config, state)
    assert decision is not None
    # 10 x 6,000 a second over 6,000; the nine of the odd seconds stand for ten.
    assert decision.need_prefill == pytest.approx(10.0, rel=0.06)


def test_a_target_above_the_maximum_comes_down_under_any_load() -> None:
    busy = [stats(900.0, waiting_blocks=9_000.0)] * 5
    decision = decide(snapshot(0.0, 5, *busy, maximum=4), ScalingConfig(), ScalingState())
    assert (decision.target, decision.reason) == (4, "maximum")


def test_a_start_from_zero_counts_as_work_and_teaches_how_long_it_takes() -> None:
    config, state = ScalingConfig(zero_after_s=600.0), ScalingState()
    assert decide(Snapshot(0.0, 0, 0, 0, 9, {}, 1.0), config, state).target == 1
    for second in range(1, 600):
        running = int(second >= 40)
        reports = {"a": stats(0.0)} if running else {}
        assert decide(Snapshot(float(second), 1, running, 0, 9, reports), config, state).target == 1
    assert list(state.starts) == [40.0]


def test_too_few_reports_hold_everything() -> None:
    reports = {0: stats(900.0, waiting_blocks=9_000.0)}
    decision = decide(Snapshot(0.0, 4, 4, 1, 100, reports), ScalingConfig(), ScalingState())
    assert (decision.target, decision.held_by) == (4, "reports missing")


def test_a_controller_that_comes_back_holds_what_runs() -> None:
    # It knows of no running replica and of no report at first, then of some, then of all.
    config, state = ScalingConfig(), ScalingState()
    for second in range(200):
        known = min(second // 10, 20)
        reports = {place: stats(10.0) for place in range(known)}
        decision = decide(Snapshot(float(second), 20, known, 1, 100, reports), config, state)
        assert decision.target == 20


def test_from_zero_one_starts_for_whoever_waits() -> None:
    assert decide(Snapshot(0.0, 0, 0, 0, 9, {}, 3.0), ScalingConfig(), ScalingState()).target == 1
    assert decide(Snapshot(0.0, 0, 0, 0, 9, {}, 0.0), ScalingConfig(), ScalingState()).target == 0


def test_to_zero_only_after_a_long_rest() -> None:
    config, state = ScalingConfig(zero_after_s=600.0, startup_s=10.0), ScalingState()
    when = None
    for second in range(1_200):
        busy = stats(10.0) if second < 100 else stats(0.0)
        decision = decide(snapshot(float(second), 1, busy, minimum=0), config, state)
        if decision.target == 0:
            when = second
            break
    assert when == 99 + 600


def test_to_zero_only_from_one() -> None:
    config, state = ScalingConfig(zero_after_s=100.0, down_window_s=300.0, down_share=1.0), ScalingState()
    target, moves = 4, []
    for second in range(400):
        decision = decide(snapshot(float(second), target, *[stats(0.0)] * target, minimum=0), config, state)
        if decision.target != target:
            moves.append((second, decision.target))
            target = decision.target
    assert moves == [(300, 1), (310, 0)]


def test_requests_that_no_report_sees_running_are_work() -> None:
    config, state = ScalingConfig(zero_after_s=600.0, startup_s=10.0), ScalingState()
    for second in range(3_000):
        came = 1_000.0 * (second // 400)
        decision = decide(snapshot(float(second), 1, stats(0.0, arrived_tokens=came), minimum=0), config, state)
        assert decision.target == 1


def test_one_that_serve_starts_from_zero_does_not_go_before_it_is_asked_anything() -> None:
    config, state = ScalingConfig(zero_after_s=600.0, startup_s=10.0), ScalingState()
    for second in range(700):
        decide(snapshot(float(second), 1, stats(0.0), minimum=0), config, state)
    for second in range(700, 2_000):
        assert decide(snapshot(float(second), 0, minimum=0), config, state).target == 0
    # While a call waits in its queue Serve does not ask the policy.
    for second in range(2_010, 2_310):
        assert decide(snapshot(float(second), 1, stats(0.0), minimum=0), config, state).target == 1


def test_the_time_to_start_is_learned() -> None:
    config, state = ScalingConfig(startup_s=60.0), ScalingState()
    assert decide(snapshot(0.0, 1, stats(900.0, waiting_blocks=1_300.0)), config, state).target == 3
    for second in range(1, 26):
        decide(snapshot(float(second), 3, stats(900.0), running=1), config, state)
    decide(snapshot(26.0, 3, *[stats(500.0)] * 3), config, state)
    assert list(state.starts) == [26.0]


finite = st.floats(0.0, 1e9, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(0, 12),
            st.lists(st.builds(ReplicaStats, *[finite] * len(ReplicaStats._fields)), max_size=12),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 3),
    st.integers(0, 12),
)
def test_whatever_comes_the_answer_is_a_number_within_bounds_or_holds(
    steps: list[tuple[int, int, list[ReplicaStats]]], minimum: int, spread: int
) -> None:
    state, config = ScalingState(), ScalingConfig()
    target = minimum
    for second, (running, gap, reports) in enumerate(steps):
        view = Snapshot(
            float(second * (gap + 1)),
            target,
            max(running, len(reports)),
            minimum,
            minimum + spread,
            dict(enumerate(reports)),
        )
        decision = decide(view, config, state)
        assert isinstance(decision.target, int)
        assert minimum <= decision.target <= minimum + spread or decision.held_by == "no replica runs"
        if decision.target < target:
            assert target - decision.target <= max(1, target // 10)
        target = decision.target
