"""The scaling policy that Serve's controller runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from scaling_support import Replica, Stamped, context, metrics, stats

from app.autoscaling.policy import KvDemandPolicy, OccupancyPolicy, ServePolicy, read_reports

A, B = Replica("a"), Replica("b")


def test_the_policy_answers_for_serve_and_keeps_its_state() -> None:
    policy = KvDemandPolicy()
    target, state = policy(context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_850.0)}))
    assert (target, state) == (5, {"__decision_counters": 3})


def test_between_new_data_the_target_stays() -> None:
    policy = KvDemandPolicy(report_interval_s=1.0)
    busy = context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_850.0)})
    assert policy(busy)[0] == 5
    quick = context(0.1, 5, {"a": stats(0.0)})
    quick.raw_metrics = None  # type: ignore[assignment]  # would fail if it were read
    quick.running_replicas = None  # type: ignore[assignment]
    assert policy(quick)[0] == 5
    assert policy.faults.count == 0


def test_what_serve_sets_meanwhile_stands_until_the_next_decision() -> None:
    policy = KvDemandPolicy(report_interval_s=10.0, down_window_s=100.0, zero_after_s=200.0)
    now, target = 0.0, 1
    while target:
        target, _ = policy(context(now, 1, {"a": stats(0.0)}, capacity_adjusted_min_replicas=0))
        now += 10.0
    # A call in its queue has made Serve start one, which runs at once.
    assert policy(context(now - 9.0, 0, {}, capacity_adjusted_min_replicas=0))[0] == 0
    started = context(now - 5.0, 1, {"b": stats(0.0)}, capacity_adjusted_min_replicas=0)
    assert policy(started)[0] == 1


def test_in_shadow_it_decides_and_leaves_the_target() -> None:
    policy = KvDemandPolicy(shadow=True)
    assert policy(context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_850.0)}))[0] == 1
    assert policy.last is not None
    assert policy.last.target == 5


def test_whatever_is_wrong_it_never_raises() -> None:
    policy = KvDemandPolicy()
    broken = context(0.0, 4, {"a": stats()})
    broken.capacity_adjusted_max_replicas = None  # type: ignore[assignment]
    assert policy(broken) == (4, {"__decision_counters": 3})
    assert policy.faults.count == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 10**400, "3", None, True])
def test_a_report_with_a_wrong_number_is_no_report(bad: Any) -> None:
    some = metrics(5.0, {"a": stats(), "b": stats()})
    some["step_seconds"][B] = [Stamped(5.0, bad)]
    assert list(read_reports(some, [A, B], 5.0, 2.0)) == [A]


def test_old_and_partial_reports_are_no_reports() -> None:
    some = metrics(5.0, {"a": stats(), "b": stats(), "c": stats()})
    some["sequences"][B] = [Stamped(1.0, 3.0)]
    del some["preemptions"][Replica("c")]
    assert list(read_reports(some, [A, B, Replica("c"), Replica("d")], 5.0, 2.0)) == [A]


def test_reports_may_come_in_any_order() -> None:
    some = metrics(5.0, {"a": stats(1.0), "b": stats(2.0)})
    expected = {B: stats(2.0), A: stats(1.0)}
    assert read_reports(some, [B, A], 5.0, 2.0) == expected
    some["sequences"] = dict(reversed(some["sequences"].items()))
    assert list(read_reports(some, [B, A], 5.0, 2.0).items()) == list(expected.items())


def test_where_a_replica_runs_need_not_be_reported() -> None:
    some = metrics(5.0, {"a": stats(node=7.0, on_head=1.0)})
    del some["node"]
    some["on_head"][A] = [Stamped(5.0, float("nan"))]
    assert read_reports(some, [A], 5.0, 2.0) == {A: stats()}


@pytest.mark.parametrize(
    "option",
    [
        {"kv_high": 0.0},
        {"kv_low": 1.5},
        {"startup_s": "60"},
        {"shadow": 1},
        {"occupancy_target": 0.0},
        {"occupancy_target": 1.1},
    ],
)
def test_options_out_of_range_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        KvDemandPolicy(**option)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match="kv_hihg"):
        KvDemandPolicy(kv_hihg=0.5)


@pytest.mark.parametrize("policy", [KvDemandPolicy, OccupancyPolicy])
def test_the_controller_can_load_and_call_it_without_quire(policy: type[ServePolicy]) -> None:
    from ray import cloudpickle

    import app.autoscaling

    cloudpickle.register_pickle_by_value(app.autoscaling)
    try:
        blob = cloudpickle.dumps(policy)
    finally:
        cloudpickle.unregister_pickle_by_value(app.autoscaling)
    busy = context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_850.0)})
    values = {name: series[A][0].value for name, series in busy.raw_metrics.items()}
    script = f"""
import pickle, sys
from types import SimpleNamespace

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("app", "engine", "kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
replica = type("Replica", (), dict(unique_id="a"))()
metrics = {{
    name: {{replica: [SimpleNamespace(timestamp=0.0, value=value)]}} for name, value in {values!r}.items()
}}
context = SimpleNamespace(
    current_time=0.0, target_num_replicas=1, current_num_replicas=1, running_replicas=[replica],
    raw_metrics=metrics, total_queued_requests=0.0, capacity_adjusted_min_replicas=1,
    capacity_adjusted_max_replicas=10, app_name="quire", deployment_name="engine", policy_state={{}},
)
policy = pickle.load(sys.stdin.buffer)(reserve=0.0)
print(type(policy).__name__, policy(context)[0], policy.faults.count, policy.publisher.failures.count)
"""
    done = subprocess.run([sys.executable, "-c", script], input=blob, capture_output=True, cwd="/", check=False)
    # 3.75 pools at 75% are five replicas; occupancy of 90% over 70% are two.
    target = 5 if policy is KvDemandPolicy else 2
    assert done.stdout.decode().strip() == f"{policy.__name__} {target} 0 0", done.stderr.decode()
