"""What a scaling policy tells others: gauges for Prometheus, its last decision, and the replicas to be stopped.

It runs on the loop of Serve's controller, so it never raises and never waits for the network.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from app.autoscaling.fault_counter import FaultCounter
from app.autoscaling.snapshot import ScalingDecision, Snapshot
from app.autoscaling.victims import PredictionOutcome

logger = logging.getLogger("ray.serve")

NAMESPACE = b"quire"
"""Of the keys in Ray's internal KV."""


def victims_key(app: str, deployment: str) -> bytes:
    """The key under which a deployment's predicted victims are published for its ingresses."""
    return f"victims:{app}:{deployment}".encode()


def decision_key(app: str, deployment: str) -> bytes:
    """The key under which a deployment's last scaling decision is published for its ingresses."""
    return f"decision:{app}:{deployment}".encode()


_EVERY_S = 1.0
_LASTS_S = 5.0
"""A list of victims expires after this long unless it is repeated."""

_REPEATED_S = 2.0
"""A decision that changes nothing is published this often."""

DESCRIPTIONS = {
    "quire_scaling_target": "Replicas that the policy requests or, in shadow mode, would request.",
    "quire_scaling_running": "Running replicas.",
    "quire_scaling_need_replicas": "Replicas that each kind of demand needs, without the reserve.",
    "quire_scaling_demand": "KV demand as a share of the running replicas' pools; can exceed 1.",
    "quire_scaling_reason": "1 for the reason of the last decision, 0 for earlier ones.",
    "quire_scaling_held": "1 for what holds the target now, 0 for earlier causes.",
    "quire_scaling_missing_reports": "Running replicas without a fresh report.",
    "quire_scaling_faults": "Failed decisions, and failures to publish them.",
    "quire_scaling_victims": "Stopped replicas, by whether they were predicted.",
}
"""Of each gauge and counter. They are here because Serve's controller imports nothing but this package."""


class Sink(Protocol):
    """Where figures and messages go; every method may raise."""

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Set a gauge."""

    def count(self, name: str, amount: float, tags: Mapping[str, str]) -> None:
        """Add a positive amount to a counter."""

    def put(self, key: bytes, value: bytes) -> None:
        """Store a message that others read; must not wait."""


class RaySink:
    """Ray's metrics, and Ray's internal KV."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._writing: dict[bytes, threading.Thread] = {}
        self._failure: Exception | None = None

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Set a gauge of this process."""
        self._metric("Gauge", name, tags).set(value, tags=dict(tags))

    def count(self, name: str, amount: float, tags: Mapping[str, str]) -> None:
        """Add to a counter of this process."""
        self._metric("Counter", name, tags).inc(amount, tags=dict(tags))

    def put(self, key: bytes, value: bytes) -> None:
        """Write in a thread: it takes a millisecond, but a minute while Ray's head does not answer.

        Raises the error of an earlier write. Also raises, and drops this write, if the key's last write has not
        ended.
        """
        writing = self._writing.get(key)
        if writing is not None and writing.is_alive():
            raise TimeoutError("the last write into Ray's internal KV has not ended")
        failure, self._failure = self._failure, None
        self._writing[key] = threading.Thread(target=self._write, args=(key, value), daemon=True)
        self._writing[key].start()
        if failure is not None:
            raise failure

    def _write(self, key: bytes, value: bytes) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        try:
            _internal_kv_put(key, value, namespace=NAMESPACE)
        except Exception as error:  # noqa: BLE001  # raised by the next put
            self._failure = error

    def _metric(self, kind: str, name: str, tags: Mapping[str, str]) -> Any:
        if name not in self._metrics:
            from ray.util import metrics

            make = getattr(metrics, kind)
            self._metrics[name] = make(name, description=DESCRIPTIONS[name], tag_keys=tuple(tags))
        return self._metrics[name]


class Publisher:
    """Publishes for one deployment; failures are counted and logged, and never raised."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.app = ""
        self.deployment = ""
        self.failures = FaultCounter("publishing of autoscaling failed", logger)
        self._sink: Sink = sink or RaySink()
        self._counted: dict[tuple[str, ...], int] = {}
        self._states: dict[str, str] = {}  # by gauge, the label's value that is 1
        self._decision_faults = 0
        self._published: tuple[int, str, str] | None = None
        self._published_at = -math.inf
        self._announced = False
        self._announced_at = -math.inf
        self._seq = 0

    def figures(self, snapshot: Snapshot, decision: ScalingDecision, outcome: PredictionOutcome) -> None:
        """Publish a decision, and what it was made from."""
        self._guarded(lambda: self._figures(snapshot, decision, outcome))
        self._guarded(lambda: self._tell(snapshot, decision, outcome))

    def faults(self, faults: int) -> None:
        """Publish how many decisions failed so far; the failures of publishing go with it."""
        self._decision_faults = faults
        if faults or self.failures.count:
            self._guarded(lambda: self._faults(faults))

    def victims(self, now: float, replicas: Sequence[str]) -> None:
        """Announce the replicas (unique ids) that will probably be stopped; to be called often.

        It is written once a second while there are any, and then once that there are none. ``now`` is in
        seconds since the epoch: numbers of messages grow across a restart of the controller.
        """
        if replicas or self._announced:
            self._guarded(lambda: self._announce(now, replicas))

    def _announce(self, now: float, replicas: Sequence[str]) -> None:
        if 0.0 <= now - self._announced_at < _EVERY_S:
            return
        self._announced_at = now
        self._announced = True
        self._seq = max(self._seq + 1, int(now * 1000))
        message = {"seq": self._seq, "replicas": list(replicas), "lasts_s": _LASTS_S}
        self._sink.put(victims_key(self.app, self.deployment), json.dumps(message).encode())
        self._announced = bool(replicas)

    def _figures(self, snapshot: Snapshot, decision: ScalingDecision, outcome: PredictionOutcome) -> None:
        gauge, tags = self._sink.gauge, self._tags()
        gauge("quire_scaling_target", decision.target, tags)
        gauge("quire_scaling_running", snapshot.running, tags)
        gauge("quire_scaling_demand", decision.demand, tags)
        gauge("quire_scaling_missing_reports", max(snapshot.running - len(snapshot.replicas), 0), tags)
        needs = {"kv": decision.need_kv, "prefill": decision.need_prefill, "decode": decision.need_decode}
        for name, need in needs.items():
            gauge("quire_scaling_need_replicas", need, {**tags, "need": name})
        self._state("quire_scaling_reason", "reason", decision.reason)
        self._state("quire_scaling_held", "held_by", decision.held_by)
        self._advance("quire_scaling_victims", outcome.hits, {**tags, "predicted": "yes"})
        self._advance("quire_scaling_victims", outcome.misses, {**tags, "predicted": "no"})

    def _state(self, name: str, label: str, value: str) -> None:
        """Of a gauge that is 1 for one value of its label: set that one, and take the last one back."""
        before = self._states.get(name)
        if before and before != value:
            self._sink.gauge(name, 0.0, {**self._tags(), label: before})
        self._states[name] = value
        if value:
            self._sink.gauge(name, 1.0, {**self._tags(), label: value})

    def _tell(self, snapshot: Snapshot, decision: ScalingDecision, outcome: PredictionOutcome) -> None:
        """Publish a decision for the ingresses: a new one at once, the same one now and then."""
        what = decision.target, decision.reason, decision.held_by
        if what == self._published and 0.0 <= snapshot.now - self._published_at < _REPEATED_S:
            return
        self._published, self._published_at = what, snapshot.now
        message = {
            "at": snapshot.now,
            "target": decision.target,
            "running": snapshot.running,
            "reason": decision.reason,
            "held_by": decision.held_by,
            "demand": decision.demand,
            "needs": {"kv": decision.need_kv, "prefill": decision.need_prefill, "decode": decision.need_decode},
            "missing_reports": max(snapshot.running - len(snapshot.replicas), 0),
            "faults": {"decision": self._decision_faults, "publishing": self.failures.count},
            "victims": {"yes": outcome.hits, "no": outcome.misses},
        }
        self._sink.put(decision_key(self.app, self.deployment), json.dumps(message).encode())

    def _faults(self, faults: int) -> None:
        tags = self._tags()
        self._advance("quire_scaling_faults", faults, {**tags, "part": "decision"})
        self._advance("quire_scaling_faults", self.failures.count, {**tags, "part": "publishing"})

    def _advance(self, name: str, total: int, tags: dict[str, str]) -> None:
        """Feed a counter that takes increments, and refuses 0, with a total."""
        key = (name, *tags.values())
        more = total - self._counted.get(key, 0)
        if more > 0:
            self._sink.count(name, more, tags)
            self._counted[key] = total

    def _tags(self) -> dict[str, str]:
        return {"app": self.app, "deployment": self.deployment}

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001  # counted and logged
            self.failures.add()
