"""What a scaling policy tells others."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_support import Context, FakeSink, context, stats

from app.autoscaling.policy import KvDemandPolicy, OccupancyPolicy, ServePolicy
from app.autoscaling.publishing import DESCRIPTIONS, Publisher, RaySink
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ScalingState
from app.autoscaling.snapshot import ReplicaStats, ScalingDecision, Snapshot
from app.metrics.table import TABLE, Source

EPOCH = 1_700_000_000.0


def published(policy: ServePolicy, *broken: str) -> FakeSink:
    sink = FakeSink(broken)
    policy.publisher = Publisher(sink)
    return sink


def fleet(count: int, referenced: float = 10.0) -> dict[str, ReplicaStats]:
    """The newest is the last one."""
    return {f"r{place}": stats(referenced, started_at=EPOCH + place, node=9.0) for place in range(count)}


def run(policy: ServePolicy, seconds: int, count: int, referenced: float = 10.0, start: float = EPOCH) -> None:
    for second in range(seconds):
        target, _ = policy(context(start + second, count, fleet(count, referenced)))
        assert target == count


def test_a_decision_is_published_with_what_it_was_made_from() -> None:
    policy = KvDemandPolicy(reserve=1.0)
    sink = published(policy)
    busy = context(EPOCH, 2, {"a": stats(900.0, waiting_blocks=2_250.0), "b": stats(600.0)})
    policy(busy)
    assert sink.gauges == {
        ("quire_scaling_target", ""): 5.0,
        ("quire_scaling_running", ""): 2.0,
        ("quire_scaling_demand", ""): pytest.approx(1.875),
        ("quire_scaling_missing_reports", ""): 0.0,
        ("quire_scaling_need_replicas", "kv"): pytest.approx(5.0),
        ("quire_scaling_need_replicas", "prefill"): 0.0,
        ("quire_scaling_need_replicas", "decode"): 0.0,
        ("quire_scaling_reason", "kv"): 1.0,
    }
    assert sink.counters == {}
    assert sink.decisions == [
        {
            "at": EPOCH,
            "target": 5,
            "running": 2,
            "reason": "kv",
            "held_by": "",
            "demand": pytest.approx(1.875),
            "needs": {"kv": pytest.approx(5.0), "prefill": 0.0, "decode": 0.0},
            "missing_reports": 0,
            "faults": {"decision": 0, "publishing": 0},
            "victims": {"yes": 0, "no": 0},
        }
    ]


def test_a_decision_that_changes_nothing_is_told_every_two_seconds() -> None:
    policy = KvDemandPolicy(report_interval_s=0.5)
    sink = published(policy)
    for half_second in range(12):
        policy(context(EPOCH + half_second / 2, 1, fleet(1)))
    assert [message["at"] - EPOCH for message in sink.decisions] == [0.0, 2.0, 4.0]


def test_what_holds_the_target_is_one_at_a_time() -> None:
    policy = KvDemandPolicy()
    sink = published(policy)
    late = context(EPOCH, 2, {"a": stats()})
    late.current_num_replicas = 2
    policy(late)
    assert sink.gauges["quire_scaling_held", "reports missing"] == 1.0
    assert sink.gauges["quire_scaling_missing_reports", ""] == 1.0
    policy(context(EPOCH + 1, 3, {name: stats(5_000.0) for name in "abc"}, capacity_adjusted_max_replicas=3))
    assert sink.gauges["quire_scaling_held", "reports missing"] == 0.0
    assert sink.gauges["quire_scaling_held", "maximum"] == 1.0
    policy(context(EPOCH + 2, 3, {name: stats(1_100.0) for name in "abc"}))
    assert sink.gauges["quire_scaling_held", "maximum"] == 0.0


def test_faults_are_counted_by_their_part() -> None:
    policy = KvDemandPolicy()
    sink = published(policy, "gauge")
    policy(context(EPOCH, 1, {"a": stats()}))
    broken = context(EPOCH + 1, 1, {"a": stats()})
    broken.capacity_adjusted_max_replicas = None  # type: ignore[assignment]
    for _ in range(3):
        policy(broken)
        broken.current_time += 1.0
    assert sink.counters == {
        ("quire_scaling_faults", "publishing"): 1.0,
        ("quire_scaling_faults", "decision"): 3.0,
    }


@pytest.mark.parametrize("kind", [KvDemandPolicy, OccupancyPolicy])
def test_victims_are_announced_each_second_while_fewer_replicas_are_intended(kind: type[ServePolicy]) -> None:
    policy = kind(down_window_s=300.0)
    sink = published(policy)
    run(policy, 60, 6)
    assert sink.messages == []
    run(policy, 10, 6, start=EPOCH + 60)
    names = ["r5"]  # of 6, one decision stops one
    assert sink.announced == [names] * 10
    assert {key for key, _ in sink.messages} == {"victims:quire:engine"}
    assert sink.messages[0][1] == {"seq": int(EPOCH * 1000) + 60_000, "replicas": names, "lasts_s": 5.0}
    numbers = [message["seq"] for _, message in sink.messages]
    assert numbers == sorted(set(numbers))


def test_they_are_repeated_between_decisions_but_no_more_than_once_a_second() -> None:
    policy = KvDemandPolicy(down_window_s=40.0, report_interval_s=10.0)
    sink = published(policy)
    for tick in range(0, 400):
        now = EPOCH + tick / 10
        policy(context(now, 6, fleet(6)))
    # Intended from 10 s on.
    assert sink.announced == [["r5"]] * 30


def test_demand_that_comes_back_takes_it_back_once() -> None:
    policy = KvDemandPolicy(down_window_s=300.0, reserve=1.0)
    sink = published(policy)
    run(policy, 65, 6, referenced=200.0)
    assert sink.announced == [["r5"]] * 5
    run(policy, 10, 6, referenced=600.0, start=EPOCH + 65)
    assert sink.announced == [["r5"]] * 5 + [[]]


def test_a_fault_takes_it_back() -> None:
    policy = KvDemandPolicy(down_window_s=300.0)
    sink = published(policy)
    run(policy, 65, 6)
    broken = context(EPOCH + 65, 6, fleet(6))
    broken.raw_metrics = {"num_blocks": 3}  # type: ignore[dict-item]
    policy(broken)
    assert policy.faults.count == 1
    assert sink.announced[-1] == []


def test_nothing_is_announced_in_shadow_mode() -> None:
    policy = KvDemandPolicy(shadow=True)
    sink = published(policy)
    run(policy, 301, 6)
    assert sink.messages == []
    assert sink.gauges["quire_scaling_target", ""] == 5.0


def test_a_new_controller_goes_on_with_higher_numbers() -> None:
    old, new = Publisher(FakeSink()), Publisher(sink := FakeSink())
    for tick in range(5):
        old.victims(EPOCH + tick, ["a"])
    new.victims(EPOCH + 5, ["a"])
    assert sink.messages[0][1]["seq"] > int((EPOCH + 4) * 1000)


def test_numbers_grow_even_where_the_clock_goes_back() -> None:
    publisher = Publisher(sink := FakeSink())
    for now in (EPOCH, EPOCH - 50.0, EPOCH - 49.0):
        publisher.victims(now, ["a"])
    numbers = [message["seq"] for _, message in sink.messages]
    assert len(numbers) == 3
    assert numbers == sorted(set(numbers))


def test_that_there_are_none_any_more_is_tried_until_it_is_written() -> None:
    publisher = Publisher(sink := FakeSink())
    publisher.victims(EPOCH, ["a"])
    sink.broken.add("put")
    publisher.victims(EPOCH + 1, [])
    publisher.victims(EPOCH + 2, [])
    sink.broken.clear()
    publisher.victims(EPOCH + 3, [])
    publisher.victims(EPOCH + 4, [])
    assert sink.announced == [["a"], []]
    assert publisher.failures.count == 2


def test_whether_victims_were_predicted_is_counted() -> None:
    policy = KvDemandPolicy(down_window_s=20.0, startup_s=1.0)
    sink = published(policy)
    running = fleet(6)
    target, second, stopped = 6, 0, []
    while target > 3:
        new, _ = policy(context(EPOCH + second, target, running))
        if new < target:
            # The last of them not as Serve does.
            gone = "r0" if new == 3 else list(running)[-1]
            stopped.append(gone)
            del running[gone]
        target = new
        second += 1
    for more in range(3):
        policy(context(EPOCH + second + more, target, running))
    assert stopped == ["r5", "r4", "r0"]
    assert sink.counters == {("quire_scaling_victims", "yes"): 2.0, ("quire_scaling_victims", "no"): 1.0}


def intends_one(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> ScalingDecision:
    return ScalingDecision(snapshot.target - 1, "less needed", intended=1)


def test_shadow_mode_announces_and_counts_nothing_whatever_the_rule_intends() -> None:
    policy = ServePolicy(intends_one, {"shadow": True})
    sink = published(policy)
    run(policy, 5, 6)
    assert sink.messages == []
    assert policy.outcome.due == 0


def test_who_left_first_is_seen_between_decisions() -> None:
    policy = ServePolicy(intends_one, {"report_interval_s": 10.0})
    published(policy)
    running = fleet(6)
    assert policy(context(EPOCH, 6, running))[0] == 5
    for second, gone in enumerate(("r0", "r5"), 1):  # the first was stopped, the second crashed
        del running[gone]
        policy(context(EPOCH + second, 5, running))
    assert (policy.outcome.hits, policy.outcome.misses) == (0, 1)


methods = st.sets(st.sampled_from(["gauge", "count", "put"]))
junk = st.sampled_from([None, float("nan"), "x", -1, 3, {}, [], object()])


@given(st.lists(st.tuples(methods, st.sampled_from(list(Context.__dataclass_fields__)), junk), max_size=20))
def test_with_broken_sinks_and_contexts_it_never_raises(steps: list[tuple[set[str], str, Any]]) -> None:
    logging.disable(logging.CRITICAL)  # thousands of failures, on purpose
    try:
        for policy in (KvDemandPolicy(down_window_s=8.0), OccupancyPolicy(down_window_s=8.0)):
            sink = published(policy)
            for second, (broken, name, value) in enumerate(steps):
                sink.broken = broken
                policy(context(EPOCH + 2 * second, 4, fleet(4)))
                odd = context(EPOCH + 2 * second + 1, 4, fleet(4))
                if name != "policy_state":
                    setattr(odd, name, value)
                policy(odd)
            sink.broken = set()
            before = policy.faults.count
            assert policy(context(EPOCH + 1_000.0, 4, fleet(4, 550.0)))[0] == 4
            assert policy.faults.count == before
    finally:
        logging.disable(logging.NOTSET)


def test_a_write_that_does_not_end_delays_nothing_and_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    release, written = threading.Event(), []

    def put(key: bytes, value: bytes, *, namespace: bytes) -> None:
        assert release.wait(60)
        written.append((namespace, key, value))
        raise ConnectionError("gone")

    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_put", put)
    sink = RaySink()
    sink.put(b"k", b"1")
    with pytest.raises(TimeoutError, match="not ended"):
        sink.put(b"k", b"2")
    assert written == []
    release.set()
    sink._writing[b"k"].join(60)
    with pytest.raises(ConnectionError, match="gone"):
        sink.put(b"k", b"3")
    sink._writing[b"k"].join(60)
    assert written == [(b"quire", b"k", b"1"), (b"quire", b"k", b"3")]


def test_every_figure_has_a_description_and_the_same_tags_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = RaySink()
    monkeypatch.setattr(sink, "put", lambda key, value: None)  # no Ray runs here
    policy = KvDemandPolicy()
    policy.publisher = Publisher(sink)
    policy(context(EPOCH, 1, {"a": stats(900.0)}))
    policy.outcome.hits = 1
    policy.faults.count = 1
    late = context(EPOCH + 1, 2, {"a": stats()})
    late.current_num_replicas = 2
    policy(late)
    assert policy.publisher.failures.count == 0
    assert set(sink._metrics) == set(DESCRIPTIONS)
    assert {metric.full_name for metric in TABLE if metric.source is Source.SCALING} == set(DESCRIPTIONS)
