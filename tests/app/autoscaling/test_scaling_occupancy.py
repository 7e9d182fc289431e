"""How many replicas occupancy asks for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_support import stats

from app.autoscaling.occupancy import decide_by_occupancy
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ScalingState
from app.autoscaling.snapshot import ReplicaStats, ScalingDecision, Snapshot


def decided(target: int, *referenced: float, **more: Any) -> ScalingDecision:
    """The first decision about replicas that have so many referenced blocks, of 1,000."""
    values = {"running": len(referenced), "minimum": 1, "maximum": 100, **more}
    replicas = {place: stats(blocks) for place, blocks in enumerate(referenced)}
    return decide_by_occupancy(
        Snapshot(0.0, target, replicas=replicas, **values), ScalingConfig(), ScalingState()
    )


def test_as_many_as_have_the_wanted_occupancy() -> None:
    decision = decided(4, 900.0, 900.0, 800.0, 800.0)
    # 4 x 85% over 70% are 4.9.
    assert (decision.target, decision.reason) == (5, "occupancy")
    assert decision.need_kv == pytest.approx(4 * 0.85 / 0.7)
    assert decision.demand == pytest.approx(0.85)


@pytest.mark.parametrize("blocks", [640.0, 700.0, 765.0])
def test_a_tenth_off_the_wanted_occupancy_changes_nothing(blocks: float) -> None:
    assert decided(20, *[blocks] * 20).target == 20


def test_it_is_blind_to_what_waits() -> None:
    some = {0: stats(1_000.0, waiting_blocks=9_000.0)}
    snapshot = Snapshot(0.0, 1, 1, 1, 100, some)
    assert decide_by_occupancy(snapshot, ScalingConfig(), ScalingState()).target == 2


def test_bounds() -> None:
    assert decided(3, 1_000.0, 1_000.0, 1_000.0, maximum=4).target == 4
    full = decided(4, *[1_000.0] * 4, maximum=4)
    assert (full.target, full.held_by) == (4, "maximum")
    assert decided(4, *[1_000.0] * 4, maximum=3).target == 3
    assert decided(2, 10.0, 10.0, minimum=3).target == 3


def moves(loads: list[tuple[int, float]], target: int, **options: Any) -> list[tuple[int, int]]:
    """(second, new target) of each change, where replicas start at once and share ``loads`` evenly.

    ``loads`` are (seconds, referenced blocks of all replicas).
    """
    config, state = ScalingConfig(down_window_s=300.0, **options), ScalingState()
    second, found = 0, []
    for seconds, blocks in loads:
        for _ in range(seconds):
            replicas = dict.fromkeys(range(target), stats(blocks / max(target, 1)))
            minimum = 0 if options else 1
            decision = decide_by_occupancy(
                Snapshot(float(second), target, target, minimum, 100, replicas), config, state
            )
            if decision.target != target:
                found.append((second, decision.target))
            target = decision.target
            second += 1
    return found


def test_up_at_once_and_down_by_the_largest_answer_of_the_window() -> None:
    # 4,200 blocks are six replicas, 1,400 are two.
    found = moves([(10, 4_200.0), (400, 1_400.0)], target=5)
    assert found == [(0, 6), (310, 5), (320, 4), (330, 3), (340, 2)]


def test_a_peak_within_the_window_holds_the_fleet_until_it_is_past() -> None:
    # Two replicas are enough, then four for ten seconds, then two again.
    found = moves([(100, 1_400.0), (10, 2_800.0), (400, 1_400.0)], target=6)
    assert found == [(300, 5), (310, 4), (410, 3), (420, 2)]


def test_one_decision_stops_a_tenth_at_most() -> None:
    found = moves([(10, 35_000.0), (600, 7_000.0)], target=50)
    assert found[:4] == [(310, 45), (320, 41), (330, 37), (340, 34)]
    assert found[-1][1] == 11  # as 10 would be, within a tenth


def test_in_shadow_mode_it_goes_on_asking_for_as_few() -> None:
    config, state = ScalingConfig(shadow=True, down_window_s=300.0), ScalingState()
    replicas = dict.fromkeys(range(30), stats(100.0))
    asked = [
        decide_by_occupancy(Snapshot(float(second), 30, 30, 1, 100, replicas), config, state).target
        for second in range(340)
    ]
    assert asked == [30] * 300 + [27] * 40


def test_to_zero_from_one_after_a_long_rest() -> None:
    found = moves([(100, 1_400.0), (1_000, 0.0)], target=2, zero_after_s=600.0)
    assert found == [(400, 1), (699, 0)]
    # Serve goes to zero from one only.
    found = moves([(1_000, 0.0)], target=4, zero_after_s=100.0, down_share=1.0)
    assert found == [(300, 1), (310, 0)]


def test_from_zero_one_starts_for_whoever_waits() -> None:
    assert decided(0, minimum=0, queued=2.0).target == 1
    assert decided(0, minimum=0).target == 0


def test_a_controller_that_comes_back_holds_what_runs() -> None:
    config, state = ScalingConfig(), ScalingState()
    for second in range(200):
        known = min(second // 10, 20)
        replicas = dict.fromkeys(range(known), stats(10.0))
        decision = decide_by_occupancy(Snapshot(float(second), 20, known, 1, 100, replicas), config, state)
        assert decision.target == 20


@pytest.mark.parametrize(
    ("running", "reporting", "held"),
    [(6, 3, "reports missing"), (6, 5, "reports missing"), (5, 5, "replicas start")],
)
def test_what_holds_a_fleet_that_could_be_smaller(running: int, reporting: int, held: str) -> None:
    config, state = ScalingConfig(), ScalingState()
    for second in range(400):
        state.last_up = max(state.last_up, 0.0)
        replicas = dict.fromkeys(range(reporting), stats(10.0))
        decision = decide_by_occupancy(Snapshot(float(second), 6, running, 1, 100, replicas), config, state)
        assert decision.target == 6
    assert decision.held_by == held


finite = st.floats(0.0, 1e9, allow_nan=False)
some_reports = st.lists(st.builds(ReplicaStats, *[finite] * len(ReplicaStats._fields)), max_size=12)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60), some_reports), min_size=1, max_size=30),
    st.integers(0, 3),
    st.integers(0, 12),
)
def test_whatever_comes_the_answer_is_within_bounds_or_holds(
    steps: list[tuple[int, int, list[ReplicaStats]]], minimum: int, spread: int
) -> None:
    state, config, target, now = ScalingState(), ScalingConfig(), minimum, 0.0
    for running, gap, reports in steps:
        now += gap
        count = max(running, len(reports))
        view = Snapshot(now, target, count, minimum, minimum + spread, dict(enumerate(reports)))
        decision = decide_by_occupancy(view, config, state)
        assert isinstance(decision.target, int)
        assert minimum <= decision.target <= minimum + spread or decision.held_by == "no replica runs"
        target = decision.target
