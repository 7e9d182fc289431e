"""What the live page shows of a fleet: plain data, made from two moments' figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from app.metrics.samples import METRICS, Process, Samples
from engine.histogram import HistogramTotals

_QUANTILES = (0.5, 0.95)


class Moment(NamedTuple):
    """The figures of one model's fleet, engines by name; ``at`` is in monotonic seconds."""

    at: float
    ingresses: list[Samples]
    engines: dict[str, Samples]
    scaling: Samples

    @classmethod
    def of(cls, at: float, processes: Iterable[Process]) -> Moment:
        """Sorted by who counted."""
        ingresses: list[Samples] = []
        engines: dict[str, Samples] = {}
        scaling: Samples = {}
        for name, samples, _ in processes:
            if "kv_blocks" in samples:
                engines[name] = samples
            elif "scaling_target" in samples:
                scaling = samples
            else:
                ingresses.append(samples)
        return cls(at, ingresses, engines, scaling)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which ``share`` of a histogram lies, by interpolation in its bucket; ``None`` if empty.

    Beyond the last bound, that bound.
    """
    rank, below, lower = share * sum(counts), 0, 0.0
    if not rank:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below += count
        lower = bound
    return lower


def view(before: Moment, now: Moment, states: Mapping[str, str]) -> dict[str, Any]:
    """The fleet now; rates and percentiles are of what came since ``before``.

    ``states`` has the state of the channel to each replica. A replica without figures yet has none here.
    """
    seconds = max(now.at - before.at, 1e-3)
    names = sorted({*states, *now.engines})
    replicas = [
        {"name": name, "state": states.get(name, "open")}
        | (_replica(now.engines[name], before.engines.get(name), seconds) if name in now.engines else {})
        for name in names
    ]
    known = [replica for replica in replicas if "blocks" in replica]
    return {
        "replicas": replicas,
        "fleet": {
            "ingresses": len(now.ingresses),
            "pool": sum(replica["pool"] for replica in known),
            "demand": round(sum(replica["demand"] for replica in known), 1),
            "tokens_s": round(sum(replica["tokens_s"] for replica in known), 1),
            "prompt_tokens_s": round(sum(replica["prompt_tokens_s"] for replica in known), 1),
            "live": _sum(now.ingresses, "live_requests"),
            "waiting": sum(replica["waiting"] + replica["preempted"] for replica in known),
            "lag_s": max((_one(samples, "loop_lag_seconds") for samples in now.ingresses), default=0.0),
            "wait_s": max((_one(samples, "expected_wait_seconds") for samples in now.ingresses), default=0.0),
        },
        "latency": {
            "first_token": _percentiles(before.ingresses, now.ingresses, "time_to_first_token_seconds"),
            "inter_token": _percentiles(before.ingresses, now.ingresses, "inter_token_seconds"),
            "queue": _percentiles(before.engines.values(), now.engines.values(), "queue_seconds"),
            "prefill": _percentiles(before.engines.values(), now.engines.values(), "prefill_seconds"),
        },
        "routing": _more(before.ingresses, now.ingresses, "routing_decisions"),
        "ended": _more(before.ingresses, now.ingresses, "ended_requests"),
        "refused": _more(before.ingresses, now.ingresses, "refused_requests"),
        "totals": {
            name: _sum(now.ingresses, name)
            for name in ("moved_requests", "resubmissions", "lost_channels", "dead_engines", "faults")
        }
        | {name: _sum(now.engines.values(), name) for name in ("preemptions", "lost_leases")},
        "scaling": _scaling(now.scaling),
        "seconds": round(seconds, 1),
    }


def _replica(now: Samples, before: Samples | None, seconds: float) -> dict[str, Any]:
    def more(name: str) -> float:
        """What has come since; all of it if the replica is new."""
        return max(_one(now, name) - (0.0 if before is None else _one(before, name)), 0.0)

    blocks = {key[0]: int(_number(value)) for key, value in now["kv_blocks"].items()}
    shared = int(_one(now, "kv_shared_blocks"))
    host = {key[0]: int(_number(value)) for key, value in now["host_blocks"].items()}
    requests = {key[0]: int(_number(value)) for key, value in now["requests"].items()}
    queries = more("prefix_query_tokens")
    return {
        "blocks": [shared, blocks["referenced"] - shared, blocks["cached"], blocks["free"]],
        "pool": sum(blocks.values()),
        "host": [host["used"], host["used"] + host["free"]],
        "demand": round(_one(now, "kv_demand_blocks"), 1),
        **requests,
        "tokens_s": round(more("generated_tokens") / seconds, 1),
        "prompt_tokens_s": round(more("prompt_tokens") / seconds, 1),
        "hit_share": round(more("prefix_hit_tokens") / queries, 3) if queries else None,
        "step_s": round(_one(now, "step_seconds"), 4),
        "prefill_rate": round(_one(now, "prefill_rate")),
        "preemptions": int(_one(now, "preemptions")),
        "recoveries": {key[0]: int(_number(value)) for key, value in now["recoveries"].items()},
        "copied_blocks": int(_one(now, "copied_blocks")),
        "generated_tokens": int(_one(now, "generated_tokens")),
        "prompt_tokens": int(_one(now, "prompt_tokens")),
        "finished": {key[0]: int(_number(value)) for key, value in now["finished_requests"].items()},
        "lost_leases": int(_one(now, "lost_leases")),
    }


def _scaling(samples: Samples) -> dict[str, Any] | None:
    if not samples:
        return None
    return {
        "target": int(_one(samples, "scaling_target")),
        "running": int(_one(samples, "scaling_running")),
        "demand": round(_one(samples, "scaling_demand"), 3),
        "reason": next((key[0] for key in samples["scaling_reason"]), ""),
        "held_by": next((key[0] for key in samples["scaling_held"]), ""),
        "needs": {key[0]: round(_number(value), 2) for key, value in samples["scaling_need_replicas"].items()},
        "missing_reports": int(_one(samples, "scaling_missing_reports")),
    }


def _percentiles(before: Iterable[Samples], now: Iterable[Samples], name: str) -> dict[str, Any]:
    bounds = METRICS[name].bounds
    counts = [0] * (len(bounds) + 1)
    for sign, samples in ((1, now), (-1, before)):
        for one in samples:
            value = one.get(name, {}).get(())
            if isinstance(value, HistogramTotals):
                counts = [total + sign * count for total, count in zip(counts, value.counts, strict=True)]
    counts = [max(count, 0) for count in counts]  # of a process that has left
    values = [quantile(bounds, counts, share) for share in _QUANTILES]
    return {"count": sum(counts)} | {
        f"p{round(100 * share)}": None if value is None else round(value, 4)
        for share, value in zip(_QUANTILES, values, strict=True)
    }


def _more(before: Iterable[Samples], now: Iterable[Samples], name: str) -> dict[str, int]:
    """By the values of a counter's labels, what has come since."""
    counts: Counter[str] = Counter()
    for sign, samples in ((1, now), (-1, before)):
        for one in samples:
            for key, value in one.get(name, {}).items():
                counts[" ".join(key)] += sign * int(_number(value))
    return {label: count for label, count in counts.items() if count > 0}


def _sum(processes: Iterable[Samples], name: str) -> int:
    return int(sum(_number(value) for samples in processes for value in samples.get(name, {}).values()))


def _one(samples: Samples, name: str) -> float:
    return _number(samples.get(name, {}).get((), 0.0))


def _number(value: float | HistogramTotals) -> float:
    return sum(value.counts) if isinstance(value, HistogramTotals) else value
