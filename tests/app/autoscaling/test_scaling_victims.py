"""Which replicas Serve will stop, and whether it did."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from scaling_support import stats

from app.autoscaling.snapshot import ReplicaStats
from app.autoscaling.victims import PredictionOutcome, stop_order


def fleet(**places: tuple[float, float]) -> dict[str, ReplicaStats]:
    """Replicas by (node, started_at); node 1 is the head."""
    return {
        name: stats(node=node, started_at=started, on_head=float(node == 1.0))
        for name, (node, started) in places.items()
    }


def test_the_newest_of_a_node_goes_first() -> None:
    assert stop_order(fleet(a=(2.0, 30.0), b=(2.0, 10.0), c=(2.0, 20.0))) == ["a", "c", "b"]


def test_the_smaller_node_goes_first_and_the_head_last() -> None:
    some = fleet(head=(1.0, 50.0), a=(2.0, 10.0), b=(2.0, 20.0), c=(3.0, 5.0))
    assert stop_order(some) == ["c", "b", "a", "head"]


def test_equal_nodes_go_in_the_order_of_their_oldest_replicas() -> None:
    some = fleet(a=(4.0, 10.0), b=(3.0, 5.0), c=(2.0, 20.0), d=(2.0, 1.0), e=(3.0, 6.0), f=(4.0, 9.0))
    assert stop_order(some) == ["c", "d", "e", "b", "a", "f"]


def test_where_nothing_is_known_the_last_named_goes_first() -> None:
    assert stop_order({"a": stats(), "b": stats(), "c": stats()}) == ["c", "b", "a"]


places = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=20)


@given(places, st.integers(1, 21))
def test_it_is_the_order_of_serves_own_scheduler(places: list[tuple[int, int]], count: int) -> None:
    # Serve knows replicas in the order in which they came.
    from ray.serve._private.deployment_scheduler import DeploymentScheduler

    came = sorted(
        ((started, node, f"r{place}") for place, (node, started) in enumerate(places)), key=lambda r: r[0]
    )
    running = {name: str(node) for _, node, name in came}
    scheduler: Any = SimpleNamespace(
        _pending_replicas=defaultdict(dict),
        _launching_replicas=defaultdict(dict),
        _recovering_replicas=defaultdict(set),
        _running_replicas={"engine": running},
        _deployments={"engine": SimpleNamespace(label_selector=None, bundle_label_selector=None)},
        _cluster_node_info_cache=SimpleNamespace(get_node_labels=lambda node: {}),
        _head_node_id="1",
    )
    scheduler._get_node_to_running_replicas = lambda: DeploymentScheduler._get_node_to_running_replicas(
        scheduler
    )
    stopped = DeploymentScheduler._get_replicas_to_stop(scheduler, "engine", count)
    known = {name: stats(node=float(n), started_at=float(s), on_head=float(n == 1)) for s, n, name in came}
    assert set(stop_order(known)[:count]) == stopped


def outcome(order: str, target: int) -> PredictionOutcome:
    one = PredictionOutcome()
    one.lowered(list(order), sorted(order), target)
    return one


def test_those_that_were_predicted_and_leave_are_hits() -> None:
    one = outcome("dcba", 2)
    one.observe("abc", 2)
    assert (one.hits, one.misses, one.due) == (1, 0, 1)
    one.observe("bc", 2)
    assert (one.hits, one.misses, one.due) == (1, 1, 0)


def test_what_leaves_once_the_count_is_reached_has_crashed() -> None:
    one = outcome("dcba", 3)
    one.observe("abc", 3)
    one.observe("bc", 3)
    assert (one.hits, one.misses) == (1, 0)


def test_what_leaves_while_none_is_to_be_stopped_is_not_counted() -> None:
    one = PredictionOutcome()
    one.observe("abc", 3)
    one.observe("ab", 3)
    assert (one.hits, one.misses) == (0, 0)


def test_a_target_that_rises_again_ends_the_count() -> None:
    one = outcome("dcba", 2)
    one.observe("abc", 3)
    one.observe("ab", 3)
    assert (one.hits, one.misses) == (1, 0)


def test_a_second_lowering_predicts_anew_what_has_not_left_yet() -> None:
    one = outcome("dcba", 3)
    one.lowered(list("dcba"), "abcd", 1)
    one.observe("ab", 1)
    one.observe("a", 1)
    assert (one.hits, one.misses, one.due) == (3, 0, 0)


def test_those_that_do_not_run_yet_are_stopped_first() -> None:
    one = PredictionOutcome()
    one.lowered(list("ba"), "ab", 2)  # from a target of 4
    one.observe("b", 2)
    assert (one.hits, one.misses) == (0, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("lower"), st.integers(0, 6)),
            st.tuples(st.just("raise"), st.integers(0, 9)),
            st.tuples(st.just("run"), st.sets(st.integers(0, 9), max_size=8)),
        ),
        max_size=40,
    )
)
def test_no_more_is_counted_than_was_to_be_stopped_and_left(steps: list[tuple[str, Any]]) -> None:
    one, running, target, lowered, left = PredictionOutcome(), set(range(8)), 8, 0, 0
    for what, value in steps:
        if what == "lower" and value < target:
            lowered += max(len(running) - value, 0)
            one.lowered(sorted(running), running, value)
            target = value
        elif what == "raise":
            target = max(target, value)
        elif what == "run":
            left += len(running - value)
            running = value
        one.observe(running, target)
        assert one.due >= 0
        assert one.hits + one.misses <= min(lowered, left)
