"""How many engine replicas there are, in Serve's words: a fixed number, or bounds and the policy."""

from __future__ import annotations

import warnings
from typing import Any

from ray import cloudpickle
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

import app.autoscaling
from app.option_groups import ScalingOptions

POLICIES = {
    "kv_demand": "app.autoscaling.policy.KvDemandPolicy",
    "occupancy": "app.autoscaling.policy.OccupancyPolicy",
}

SHORTEST_REPORT_S, LONGEST_REPORT_S = 0.5, 10.0
REPORTS_PER_S = 200
"""Of all replicas: the controller unpacks each on the loop that also decides."""

LOOK_BACK = 1.25
"""Report intervals of samples that a report carries; Serve wants more than one."""


def replicas_options(options: ScalingOptions) -> dict[str, Any]:
    """The options of the engine deployment that set its number of replicas."""
    if not options.scales:
        return {"num_replicas": options.engine_replicas}
    return {"autoscaling_config": autoscaling_config(options)}


def report_interval_s(options: ScalingOptions) -> float:
    """Seconds between two reports of a replica, by how many there may be."""
    return min(max(options.upper_limit / REPORTS_PER_S, SHORTEST_REPORT_S), LONGEST_REPORT_S)


def autoscaling_config(options: ScalingOptions) -> AutoscalingConfig:
    """Bounds, reports and policy. Serve's delays and factors are off: the policy has its own.

    The policy's package is pickled by value, so the controller runs it where Quire is not installed.
    """
    interval = report_interval_s(options)
    first = options.initial_replicas
    cloudpickle.register_pickle_by_value(app.autoscaling)
    try:
        with warnings.catch_warnings():
            # No other way to set it works in this Ray.
            warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
            return AutoscalingConfig(
                min_replicas=options.lower_limit,
                # Serve goes back to it at each redeploy, so it is left out where the minimum does.
                initial_replicas=None if first == options.lower_limit else first,
                max_replicas=options.upper_limit,
                metrics_interval_s=interval,
                look_back_period_s=LOOK_BACK * interval,
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                downscale_to_zero_delay_s=0.0,
                policy=AutoscalingPolicy(
                    policy_function=POLICIES[options.scaling_policy], policy_kwargs=policy_kwargs(options)
                ),
            )
    finally:
        cloudpickle.unregister_pickle_by_value(app.autoscaling)


def policy_kwargs(options: ScalingOptions) -> dict[str, float | bool]:
    """What ``ScalingConfig`` is made of."""
    window_s = options.scale_down_after_s
    windows = {} if window_s is None else {"down_window_s": window_s, "zero_after_s": 2.0 * window_s}
    return windows | {
        "ttft_target_s": options.ttft_target_s,
        "tpot_target_s": options.tpot_target_s,
        "reserve": options.scaling_reserve,
        "occupancy_target": options.occupancy_target,
        "startup_s": options.startup_s,
        "report_interval_s": report_interval_s(options),
        "shadow": options.scaling_shadow,
    }
