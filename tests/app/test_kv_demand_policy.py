"""The scaling policy that Serve's controller runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from scaling_support import stats

from app.autoscaling.policy import KvDemandPolicy, read_reports
from app.autoscaling.snapshot import ReplicaStats


@dataclass
class Stamped:
    """As Serve has it."""

    timestamp: float
    value: Any


@dataclass
class Context:
    """The fields of Serve's context that the policy reads."""

    current_time: float
    target_num_replicas: int
    current_num_replicas: int
    running_replicas: list[str]
    raw_metrics: Mapping[str, Mapping[str, list[Stamped]]]
    total_queued_requests: float = 0.0
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 10
    policy_state: dict[str, Any] = field(default_factory=lambda: {"__decision_counters": 3})


def metrics(now: float, reports: Mapping[str, ReplicaStats]) -> dict[str, dict[str, list[Stamped]]]:
    return {
        name: {replica: [Stamped(now, getattr(one, name))] for replica, one in reports.items()}
        for name in ReplicaStats._fields
    }


def context(now: float, target: int, reports: Mapping[str, ReplicaStats], **more: Any) -> Context:
    return Context(now, target, len(reports), list(reports), metrics(now, reports), **more)


def test_the_policy_answers_for_serve_and_keeps_its_state() -> None:
    policy = KvDemandPolicy()
    target, state = policy(context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_100.0)}))
    assert (target, state) == (5, {"__decision_counters": 3})


def test_between_new_data_it_answers_from_memory() -> None:
    policy = KvDemandPolicy(report_interval_s=1.0)
    busy = context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_100.0)})
    assert policy(busy)[0] == 5
    quick = context(0.1, 5, {"a": stats(0.0)})
    quick.raw_metrics = None  # type: ignore[assignment]  # would fail if it were read
    quick.running_replicas = None  # type: ignore[assignment]
    assert policy(quick)[0] == 5
    assert policy.faults == 0


def test_in_shadow_it_decides_and_leaves_the_target() -> None:
    policy = KvDemandPolicy(shadow=True)
    assert policy(context(0.0, 1, {"a": stats(900.0, waiting_blocks=2_100.0)}))[0] == 1
    assert policy.last is not None
    assert policy.last.target == 5


def test_whatever_is_wrong_it_never_raises() -> None:
    policy = KvDemandPolicy()
    broken = context(0.0, 4, {"a": stats()})
    broken.capacity_adjusted_max_replicas = None  # type: ignore[assignment]
    assert policy(broken) == (4, {"__decision_counters": 3})
    assert policy.faults == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, "3", None, True])
def test_a_report_with_a_wrong_number_is_no_report(bad: Any) -> None:
    some = metrics(5.0, {"a": stats(), "b": stats()})
    some["step_seconds"]["b"] = [Stamped(5.0, bad)]
    assert list(read_reports(some, ["a", "b"], 5.0, 2.0)) == ["a"]


def test_old_and_partial_reports_are_no_reports() -> None:
    some = metrics(5.0, {"a": stats(), "b": stats(), "c": stats()})
    some["sequences"]["b"] = [Stamped(1.0, 3.0)]
    del some["preemptions"]["c"]
    assert list(read_reports(some, ["a", "b", "c", "d"], 5.0, 2.0)) == ["a"]


@pytest.mark.parametrize("option", [{"kv_high": 0.0}, {"kv_low": 1.5}, {"startup_s": "60"}, {"shadow": 1}])
def test_options_out_of_range_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        KvDemandPolicy(**option)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match="kv_hihg"):
        KvDemandPolicy(kv_hihg=0.5)


def test_the_controller_can_load_it_without_quire() -> None:
    from ray import cloudpickle

    import app.autoscaling

    cloudpickle.register_pickle_by_value(app.autoscaling)
    try:
        blob = cloudpickle.dumps(KvDemandPolicy)
    finally:
        cloudpickle.unregister_pickle_by_value(app.autoscaling)
    script = """
import pickle, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("app", "engine", "kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
print(type(pickle.load(sys.stdin.buffer)()).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], input=blob, capture_output=True, cwd="/", check=False)
    assert done.stdout.decode().strip() == "KvDemandPolicy", done.stderr.decode()
