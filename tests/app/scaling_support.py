"""A replica's report, Serve's context and what a policy publishes, for tests of scaling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from app.autoscaling.snapshot import ReplicaStats

BLOCKS = 1_000.0
RATE = 10_000.0


def stats(referenced: float = 0.0, **more: float) -> ReplicaStats:
    values = dict.fromkeys(ReplicaStats._fields, 0.0)
    values.update(num_blocks=BLOCKS, prefill_rate=RATE, step_seconds=0.001, referenced_blocks=referenced)
    values["sequences"] = max(referenced / 50.0, 1.0) if referenced else 0.0
    values.update(more)
    return ReplicaStats(**values)


class Replica(NamedTuple):
    """What a policy reads of Serve's replica ids."""

    unique_id: str


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
    running_replicas: list[Replica]
    raw_metrics: Mapping[str, Mapping[Replica, list[Stamped]]]
    total_queued_requests: float = 0.0
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 10
    app_name: str = "quire"
    deployment_name: str = "engine"
    policy_state: dict[str, Any] = field(default_factory=lambda: {"__decision_counters": 3})


def metrics(now: float, reports: Mapping[str, ReplicaStats]) -> dict[str, dict[Replica, list[Stamped]]]:
    return {
        name: {Replica(one): [Stamped(now, getattr(report, name))] for one, report in reports.items()}
        for name in ReplicaStats._fields
    }


def context(now: float, target: int, reports: Mapping[str, ReplicaStats], **more: Any) -> Context:
    return Context(now, target, len(reports), [Replica(one) for one in reports], metrics(now, reports), **more)


class FakeSink:
    """Keeps what is published; fails in the methods that are named in ``broken``."""

    def __init__(self, broken: Iterable[str] = ()) -> None:
        self.broken = set(broken)
        self.gauges: dict[tuple[str, str], float] = {}
        self.counters: dict[tuple[str, str], float] = {}
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.decisions: list[dict[str, Any]] = []

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        self._fail("gauge")
        self.gauges[name, self._label(tags)] = value

    def count(self, name: str, amount: float, tags: Mapping[str, str]) -> None:
        self._fail("count")
        assert amount > 0
        label = self._label(tags)
        self.counters[name, label] = self.counters.get((name, label), 0) + amount

    def put(self, key: bytes, value: bytes) -> None:
        self._fail("put")
        name, message = key.decode(), json.loads(value)
        if name.startswith("decision:"):
            self.decisions.append(message)
        else:
            self.messages.append((name, message))

    @property
    def announced(self) -> list[list[str]]:
        return [message["replicas"] for _, message in self.messages]

    def _label(self, tags: Mapping[str, str]) -> str:
        assert (tags["app"], tags["deployment"]) == ("quire", "engine")
        return ",".join(value for key, value in tags.items() if key not in ("app", "deployment"))

    def _fail(self, method: str) -> None:
        if method in self.broken:
            raise ConnectionError(f"{method} is broken")
