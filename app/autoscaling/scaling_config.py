"""The options of scaling."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from app.autoscaling.snapshot import figure

_SHARES = (
    "kv_high",
    "kv_full",
    "kv_low",
    "prefill_high",
    "growth_share",
    "down_share",
    "max_missing",
    "occupancy_target",
)
_MAY_BE_ZERO = ("reserve", "growth_share", "max_missing", "down_interval_s", "zero_after_s")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """How to decide; times in seconds."""

    ttft_target_s: float = 2.0
    tpot_target_s: float = 0.05
    reserve: float = 0.5  # replicas beyond what prompts need
    kv_high: float = 0.75  # of the pool: a mean of more is too much
    kv_full: float = 0.90  # of the pool: more is too much at any moment
    kv_low: float = 0.70  # of the pool: a smaller fleet must stay below
    prefill_high: float = 0.60  # of the time: prompts share it with decodes
    growth_share: float = 0.1
    startup_s: float = 60.0  # until starts have been seen
    rate_window_s: float = 30.0  # of arrivals
    burst_window_s: float = 5.0  # of arrivals while prompts wait too long
    down_window_s: float | None = None  # of lower need before a replica stops; None: twice the startup time
    down_share: float = 0.1  # most of the fleet that one decision stops, but at least one replica
    down_interval_s: float = 10.0
    zero_after_s: float = 600.0
    occupancy_target: float = 0.7  # of the pool; the occupancy policy alone uses it
    report_interval_s: float = 0.5
    stale_after: float = 3.0  # report intervals, beyond 2 s
    max_missing: float = 0.2  # share of the running replicas without a report
    shadow: bool = False  # decide and report, but leave the target alone

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and one.default is None:
                continue
            if one.name == "shadow":
                right = isinstance(value, bool)
            else:
                least = 0.0 if one.name in _MAY_BE_ZERO else 1e-6
                most = 1.0 if one.name in _SHARES else 1e6
                right = figure(value) is not None and least <= value <= most
            if not right:
                raise ValueError(f"{one.name} is {value!r}, out of range for a scaling option")

    @property
    def stale_s(self) -> float:
        """A report that is older counts as missing."""
        return max(2.0, self.stale_after * self.report_interval_s) + self.report_interval_s

    def most_stopped(self, target: int) -> int:
        """How many of ``target`` replicas one decision may stop."""
        return max(1, int(self.down_share * target))

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> ScalingConfig:
        """Read a Serve config's ``policy_kwargs``; a ``ValueError`` names what is unknown or wrong."""
        known = {one.name for one in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(
                f"unknown scaling options {', '.join(unknown)}; there are: {', '.join(sorted(known))}"
            )
        return cls(**options)
