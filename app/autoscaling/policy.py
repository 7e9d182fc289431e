"""The policies that Serve's controller runs.

The controller unpickles them in its own environment, where Quire need not be installed. This package is pickled
by value, so its modules import only the standard library and each other; only ``publishing`` uses Ray.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from app.autoscaling.fault_counter import FaultCounter
from app.autoscaling.kv_demand import decide
from app.autoscaling.occupancy import decide_by_occupancy
from app.autoscaling.publishing import Publisher
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ScalingState
from app.autoscaling.snapshot import ReplicaStats, ScalingDecision, Snapshot, figure
from app.autoscaling.victims import PredictionOutcome, stop_order

logger = logging.getLogger("ray.serve")


class ServePolicy:
    """A policy of a Serve ``autoscaling_config``: called by the controller at every tick of its loop.

    An exception in a policy would stall every application of the cluster, so every error is logged and holds
    the target. The policy decides once per report interval. In between it returns the current target, because
    Serve applies a decision at once, and may itself start a replica from zero.
    """

    def __init__(
        self, rule: Callable[[Snapshot, ScalingConfig, ScalingState], ScalingDecision], options: dict[str, Any]
    ) -> None:
        self.config = ScalingConfig.from_options(options)
        self.state = ScalingState()
        self.publisher = Publisher()
        self.outcome = PredictionOutcome()
        self.faults = FaultCounter("autoscaling failed; the number of replicas stays", logger)
        self.last: ScalingDecision | None = None
        self._rule = rule
        self._decided_at = -math.inf
        self._victims: list[str] = []

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """The target, and Serve's own state unchanged."""
        try:
            wanted = self._wanted(ctx)
        except Exception:  # noqa: BLE001  # counted and logged
            wanted = ctx.target_num_replicas
            self._victims = []
            self.faults.add()
            self.publisher.faults(self.faults.count)
        # At every tick: reports may come less often than a list of victims is repeated.
        self.publisher.victims(ctx.current_time, self._victims)
        return wanted, dict(ctx.policy_state or {})

    def _wanted(self, ctx: Any) -> int:
        now, target = float(ctx.current_time), int(ctx.target_num_replicas)
        # A clock that was set back must not keep it from deciding until it is where it was.
        if 0.0 <= now - self._decided_at < self.config.report_interval_s:
            if self.outcome.due:
                self.outcome.observe(ctx.running_replicas, target)
            return target
        self._decided_at = now
        decision = self._decide(ctx, now, target)
        return target if self.config.shadow or decision.reason == "hold" else decision.target

    def _decide(self, ctx: Any, now: float, target: int) -> ScalingDecision:
        self.publisher.app, self.publisher.deployment = str(ctx.app_name), str(ctx.deployment_name)
        running = list(ctx.running_replicas or ())
        snapshot = Snapshot(
            now=now,
            target=target,
            running=int(ctx.current_num_replicas),
            minimum=int(ctx.capacity_adjusted_min_replicas),
            maximum=int(ctx.capacity_adjusted_max_replicas),
            replicas=read_reports(ctx.raw_metrics or {}, running, now, self.config.stale_s),
            queued=figure(ctx.total_queued_requests or 0.0) or 0.0,
        )
        self.outcome.observe(running, target)
        decision = self._rule(snapshot, self.config, self.state)
        if self.last is None or (decision.target, decision.held_by) != (self.last.target, self.last.held_by):
            logger.info("autoscaling %s: %s", "(shadow)" if self.config.shadow else "", asdict(decision))
        self.last = decision

        lowered = decision.target < target and not self.config.shadow
        fewer = max(snapshot.running - (target - decision.intended), 0) if decision.intended else 0
        order = stop_order(snapshot.replicas) if lowered or fewer else []
        self._victims = [] if self.config.shadow else [replica.unique_id for replica in order[:fewer]]
        if lowered:
            self.outcome.lowered(order, running, decision.target)
        self.publisher.figures(snapshot, decision, self.outcome)
        self.publisher.faults(self.faults.count)
        return decision


class KvDemandPolicy(ServePolicy):
    """Asks for what KV demand, prompts and decode steps need; ``options`` are ``ScalingConfig``'s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(decide, options)


class OccupancyPolicy(ServePolicy):
    """Asks for what the occupancy of KV memory calls for; ``options`` are ``ScalingConfig``'s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(decide_by_occupancy, options)


def read_reports(
    metrics: Mapping[str, Mapping[Any, Any]], running: list[Any], now: float, stale_s: float
) -> dict[Any, ReplicaStats]:
    """The last report of each running replica, if it is complete, finite and fresh.

    A figure that has a default may be missing, because replicas of an earlier version do not report it.
    """
    defaults = ReplicaStats._field_defaults
    columns = []
    for name in ReplicaStats._fields:
        column = metrics.get(name) or {}
        # Serve's ids are hashed by Python code; where all report, the column has the order of ``running``.
        every = column.values() if list(column) == running else [column.get(replica) for replica in running]
        columns.append(_last_values(every, now, stale_s, defaults.get(name)))
    rows = zip(running, zip(*columns, strict=True), strict=True)
    return {replica: ReplicaStats._make(row) for replica, row in rows if None not in row}


def _last_values(
    every: Iterable[Sequence[Any] | None], now: float, stale_s: float, default: float | None
) -> list[float | None]:
    """The last value of each series; the default where it is none, old or no figure."""
    values = []
    for series in every:
        value = None
        if series:
            last = series[-1]
            if now - last.timestamp <= stale_s:
                value = last.value
                if type(value) is not float or not 0.0 <= value < math.inf:
                    value = figure(value)
        values.append(default if value is None else value)
    return values
