"""A deployment without any model that reports to the scaling policy what a file tells it to, or breaks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from app import config, scaling_deployment
from app.autoscaling.policy import KvDemandPolicy
from app.autoscaling.snapshot import ReplicaStats

BLOCKS = 100.0
SLOW_STEP_S = 0.2  # four times the target
FIRST = 3


def asked(path: Path) -> Path:
    """A file that grows by a byte whenever a replica with the orders ``path`` is asked for a report."""
    return path.with_suffix(".asked")


class Toy:
    """Each replica has nothing to do, so that one would be enough, unless the file ``path`` says otherwise."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._name: str = serve.get_replica_context().replica_id.unique_id

    async def name(self) -> str:
        """Serve's, of this replica."""
        return self._name

    async def record_autoscaling_stats(self) -> dict[str, float]:
        with asked(self._path).open("ab") as file:
            file.write(b".")
        orders = json.loads(self._path.read_text())
        if self._name in orders.get("silent", ()):
            raise ValueError("a test broke it")
        stats = dict.fromkeys(ReplicaStats._fields, 0.0)
        stats.update(num_blocks=BLOCKS, prefill_rate=1000.0)
        if self._name in orders.get("slow", ()):
            stats.update(step_seconds=SLOW_STEP_S)
        return dict.fromkeys(stats, math.nan) if orders.get("nan") else stats


class BrokenPolicy(KvDemandPolicy):
    """There is a defect in it."""

    def _decide(self, ctx: Any, now: float, target: int) -> None:
        raise ZeroDivisionError("a test broke it")


def toy(path: str, **options: Any) -> Application:
    """``path`` is the file of orders, ``options`` the application's that scale it."""
    scaled = scaling_deployment.autoscaling_config(
        config.load({"engine_replicas": FIRST, **options}, {}).scaling
    )
    return (
        serve.deployment(Toy)
        .options(name="toy", autoscaling_config=scaled, ray_actor_options={"num_cpus": 0})
        .bind(path)
    )


def broken(path: str, **options: Any) -> Application:
    """The same with a defect in the policy."""
    scaled = scaling_deployment.autoscaling_config(config.load({"engine_replicas": 1, **options}, {}).scaling)
    policy = scaled.policy.model_copy(deep=True)
    policy = type(policy)(policy_function=BrokenPolicy, policy_kwargs=policy.policy_kwargs)
    return (
        serve.deployment(Toy)
        .options(
            name="broken",
            autoscaling_config=scaled.model_copy(update={"policy": policy}),
            ray_actor_options={"num_cpus": 0},
        )
        .bind(path)
    )
