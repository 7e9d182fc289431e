"""The figures of one ingress replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from app.metrics.request_figures import RequestFigures
from app.metrics.samples import METRICS, Samples


def ingress_samples(
    requests: RequestFigures,
    client: dict[str, Any],
    overload: dict[str, Any],
    ray_faults: Mapping[str, int] = MappingProxyType({}),
) -> Samples:
    """Every metric of the table that an ingress counts, from what its parts say of themselves.

    ``client`` and ``overload`` are what ``inspect`` of ``EngineClient`` and ``OverloadControl`` returns; the
    former says less before it has started. ``ray_faults`` are failed exchanges with Ray, by part.
    """
    faults, cached = client.get("channel_faults", {}), client.get("cached_tokens", {})
    states = Counter(client["channels"].values())
    single: dict[str, float] = {
        "live_requests": client["live_requests"],
        "loop_lag_seconds": overload["lag_s"],
        "expected_wait_seconds": overload["expected_wait_s"] or 0.0,
        "moved_requests": client.get("moved", 0),
        "resubmissions": client.get("resubmitted", 0),
        "resubmissions_waiting": client.get("resubmissions_waiting", 0),
        "lost_channels": faults.get("lost", 0),
        "silent_channels": faults.get("silent", 0),
        "dead_engines": faults.get("dead", 0),
        "predicted_cached_tokens": cached.get("predicted", 0),
        "actual_cached_tokens": cached.get("actual", 0),
        "cached_tokens_error": cached.get("error", 0),
    }
    reasons = client.get("reasons", {})
    return {
        **requests.samples(),
        **{name: {(): value} for name, value in single.items()},
        "replicas": {(state,): states[state] for state in METRICS["replicas"].values},
        "routing_decisions": {
            (reason,): reasons.get(reason, 0) for (reason,) in METRICS["routing_decisions"].keys
        },
        "faults": {
            ("events",): client.get("event_faults", 0),
            ("calls",): client.get("call_faults", 0),
            ("routing",): client.get("faults", 0),
            ("overload",): overload["faults"],
        },
        "ray_faults": {(part,): ray_faults.get(part, 0) for (part,) in METRICS["ray_faults"].keys},
    }
