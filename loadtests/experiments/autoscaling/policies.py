"""The ways to set the number of replicas that are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Protocol

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, Snapshot
from loadtests.experiments.autoscaling.constants import MAX_REPLICAS, STARTUP_S, TPOT_TARGET_S, TTFT_TARGET_S

OURS = "kv demand"


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees at ``now``; reports are as old as the experiment's delay says."""

    now: float
    target: int
    running: int
    most: int
    reports: Mapping[int, ReplicaStats]
    queued: int
    ongoing: int
    """Requests that have come and not ended."""


class ScalingPolicy(Protocol):
    """Asked once a second."""

    name: str

    def __call__(self, view: View) -> int:
        """The target."""


class KvDemand:
    """Ours, as production runs it, with some ``options`` of its own."""

    rule = staticmethod(decide)

    def __init__(self, startup_s: float = STARTUP_S, **options: float) -> None:
        self.name = ", ".join([OURS, *(f"{name} {value:g}" for name, value in options.items())])
        given = {"ttft_target_s": TTFT_TARGET_S, "tpot_target_s": TPOT_TARGET_S, "report_interval_s": 1.0}
        self._config = ScalingConfig.from_options({"startup_s": startup_s} | given | options)
        self._state = ScalingState()

    def __call__(self, view: View) -> int:
        snapshot = Snapshot(view.now, view.target, view.running, 1, view.most, view.reports, float(view.queued))
        return self.rule(snapshot, self._config, self._state).target


def ray_name(target: float, up_s: float, down_s: float) -> str:
    """Ray's policy with a setting: ongoing requests of a replica, seconds before an up and before a down."""
    return f"Ray {target:g}, {up_s:g}/{down_s:g} s"


class RayDefault:
    """Ray Serve's default policy as its controller calls it: with factors, delays and bounds around it.

    It is fed with the ongoing requests, averaged over Serve's look-back period.
    """

    def __init__(self, most: int, target: float, up_s: float, down_s: float) -> None:
        from ray.serve.autoscaling_policy import _apply_autoscaling_config, default_autoscaling_policy
        from ray.serve.config import AutoscalingConfig

        self._policy = _apply_autoscaling_config(default_autoscaling_policy)
        self.name = ray_name(target, up_s, down_s)
        self._config = AutoscalingConfig(
            min_replicas=1,
            max_replicas=most,
            target_ongoing_requests=target,
            upscale_delay_s=up_s,
            downscale_delay_s=down_s,
        )
        self._state: dict[str, Any] = {}
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, view: View) -> int:
        """Call it with a context of this moment."""
        from unittest.mock import patch

        from ray.serve.config import AutoscalingContext

        self._seen.append((view.now, view.ongoing))
        while self._seen[0][0] < view.now - self._config.look_back_period_s:
            self._seen.popleft()
        ongoing = sum(count for _, count in self._seen) / len(self._seen)
        unused: dict[str, Any] = dict.fromkeys(("deployment_id", "last_scale_up_time", "last_scale_down_time"))
        unused |= {"running_replicas": [], "aggregated_metrics": {}, "raw_metrics": {}}
        unused["total_queued_requests"] = 0
        unused |= {"deployment_name": "engine", "app_name": "quire", "capacity_adjusted_min_replicas": 1}
        context = AutoscalingContext(
            current_num_replicas=view.running,
            target_num_replicas=view.target,
            total_num_requests=ongoing,
            capacity_adjusted_max_replicas=view.most,
            policy_state=self._state,
            current_time=view.now,
            config=self._config,
            **unused,
        )
        # Its delays read the clock.
        with patch("ray.serve.autoscaling_policy.time.time", lambda: view.now):
            wanted, self._state = self._policy(context)
        return int(min(max(wanted, 1), view.most))


RAY_DEFAULT = ray_name(2, 30, 600)
"""As Ray Serve has it: ongoing requests of a replica, seconds before an up and before a down."""
_SWEEP = {
    ray_name(target, *delays): partial(RayDefault, MAX_REPLICAS, target, *delays)
    for target, delays in product((2, 8, 16, 32, 64, 128), ((30, 600), (5, 120)))
}
RAY_SWEEP = tuple(_SWEEP)
_OURS = {f"{OURS}, reserve {more}": partial(KvDemand, reserve=more) for more in (0, 1, 2, 4, 8)}
OUR_SWEEP = (OURS, *_OURS)
POLICIES: dict[str, Callable[[], ScalingPolicy]] = {OURS: KvDemand, **_OURS, **_SWEEP}
