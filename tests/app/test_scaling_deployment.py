"""What the engine deployment tells Serve about its number of replicas."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any, get_args

import pytest
from ray import cloudpickle
from ray.serve._private.config import DeploymentConfig

from app import application, config, option_groups, scaling_deployment
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats
from engine.errors import ConfigError


class Replica:
    """Stands for the engine replica's class."""


def options(**args: Any) -> option_groups.ScalingOptions:
    return config.load(args, {}).scaling


def deployed(**args: Any) -> DeploymentConfig:
    """As the controller gets it."""
    made = application.engine_deployment(
        config.served_models(config.load(args, {}))[0], Replica
    )._deployment_config
    return DeploymentConfig.from_proto_bytes(made.to_proto_bytes())


def test_a_fixed_number_has_no_policy() -> None:
    got = deployed(engine_replicas=3)
    assert got.num_replicas == 3
    assert got.autoscaling_config is None


@pytest.mark.parametrize(
    ("args", "least", "first", "most"),
    [
        ({"max_replicas": 4}, 1, None, 4),
        ({"max_replicas": 4, "engine_replicas": 3}, 1, 3, 4),
        ({"max_replicas": 4, "min_replicas": 2}, 2, None, 4),
        ({"max_replicas": 4, "min_replicas": 0}, 0, 1, 4),
        ({"max_replicas": 4, "min_replicas": 2, "engine_replicas": 4}, 2, 4, 4),
    ],
)
def test_bounds(args: dict[str, Any], least: int, first: int | None, most: int) -> None:
    got = deployed(**args).autoscaling_config
    assert got is not None
    assert (got.min_replicas, got.initial_replicas, got.max_replicas) == (least, first, most)


def numbers() -> dict[str, tuple[float, float]]:
    """The least and the most of each option that the policy gets."""
    names = ["ttft_target_s", "tpot_target_s", "scaling_reserve", "occupancy_target", "scale_down_after_s"]
    found = {}
    for name in [*names, "startup_s"]:
        bounds = {type(one).__name__: one for one in option_groups.ScalingOptions.model_fields[name].metadata}
        found[name] = bounds["Ge"].ge, bounds["Le"].le
    return found


@pytest.mark.parametrize("name", numbers())
def test_what_the_options_allow_the_policy_takes(name: str) -> None:
    """Else it would fail in Serve's controller only."""
    for value in numbers()[name]:
        made = ScalingConfig.from_options(
            scaling_deployment.policy_kwargs(options(max_replicas=4, **{name: value}))
        )
        assert value in [getattr(made, one) for one in ScalingConfig.__slots__]
    for wrong in ("inf", "nan", 1e7):
        with pytest.raises(ConfigError, match=f"{name}=.*must be at most"):
            options(max_replicas=4, **{name: wrong})


def test_the_policy_alone_decides_when() -> None:
    got = deployed(max_replicas=4).autoscaling_config
    assert got is not None
    assert (got.upscale_delay_s, got.downscale_delay_s, got.downscale_to_zero_delay_s) == (0, 0, 0)
    assert (got.upscaling_factor, got.downscaling_factor) == (None, None)


@pytest.mark.parametrize(("most", "interval"), [(1, 0.5), (100, 0.5), (1000, 5.0), (5000, 10.0)])
def test_reports_are_rarer_the_more_replicas_there_are(most: int, interval: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Serve's, if it sees too little in a report
        got = scaling_deployment.autoscaling_config(options(max_replicas=most))
    assert got.metrics_interval_s == interval
    assert got.look_back_period_s > interval
    assert ScalingConfig(**got.policy.policy_kwargs).report_interval_s == interval


def test_every_option_reaches_the_policy() -> None:
    given = {
        "ttft_target_s": 3.0,
        "tpot_target_s": 0.25,
        "scaling_reserve": 0.25,
        "occupancy_target": 0.8,
        "scale_down_after_s": 30.0,
        "startup_s": 20.0,
        "scaling_shadow": True,
    }
    got = deployed(max_replicas=2, **given).autoscaling_config
    assert got is not None
    made = ScalingConfig(**got.policy.policy_kwargs)
    assert [
        made.ttft_target_s,
        made.tpot_target_s,
        made.reserve,
        made.occupancy_target,
        made.down_window_s,
        made.startup_s,
        made.shadow,
    ] == list(given.values())
    assert made.zero_after_s == 60.0


# Run where Quire cannot be imported: makes the policy and asks it for a fleet that is full.
ELSEWHERE = """
import json, pickle, sys
from types import SimpleNamespace

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("app", "engine", "kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
given = json.loads(sys.argv[1])
policy = pickle.load(sys.stdin.buffer)(**given["kwargs"])
point = lambda value: [SimpleNamespace(timestamp=100.0, value=value)]
ctx = SimpleNamespace(
    app_name="quire", deployment_name="engine", deployment_id="engine",
    current_time=100.0, target_num_replicas=2, current_num_replicas=2, running_replicas=["a", "b"],
    capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4, total_queued_requests=0.0,
    total_num_requests=0.0, policy_state={}, aggregated_metrics={},
    raw_metrics={name: {"a": point(value), "b": point(value)} for name, value in given["stats"].items()},
)
print(policy(ctx)[0], policy.faults.count)
"""


@pytest.mark.parametrize("policy", get_args(option_groups.ScalingPolicy))
def test_the_controller_can_run_it_without_quire(policy: str) -> None:
    got = deployed(max_replicas=4, scaling_policy=policy).autoscaling_config
    assert got is not None
    stats = dict.fromkeys(ReplicaStats._fields, 0.0)
    stats.update(num_blocks=100.0, referenced_blocks=95.0, sequences=5.0, prefill_rate=1000.0)
    given = {"kwargs": got.policy.policy_kwargs, "stats": stats}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(given)],
        input=got.policy.get_serialized_policy_def(),
        capture_output=True,
        cwd="/",
        check=False,
    )
    target, faults = (done.stdout.split() or [b"", b""])[:2]
    assert faults == b"0", done.stderr.decode()
    assert int(target) > 2


def test_nothing_else_is_pickled_by_value_afterwards() -> None:
    deployed(max_replicas=4)
    assert "app.autoscaling" not in cloudpickle.list_registry_pickle_by_value()
