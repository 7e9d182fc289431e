"""Metrics of engines and overload control, exported by Ray: on its dashboard, and on each node for Prometheus.

Ray exports them with the prefix ``ray_`` and Serve's own tags (application, deployment, replica); a counter's
name gets ``_total``. No tag may be called ``route``, which Serve uses itself.
"""

from __future__ import annotations

from typing import Any

from ray.serve import metrics

from engine.engine import EngineStats

TAGS = ("model_name",)


class EngineMetrics:
    """Owned by one engine replica; ``update`` is called a few times a second at most."""

    def __init__(self, model_name: str) -> None:
        self._tags = {"model_name": model_name}
        self._blocks = _gauge("quire_kv_blocks", "KV blocks by state: referenced, cached, or free.", "state")
        self._requests = _gauge(
            "quire_requests", "Sequences by state: running, waiting, preempted, or swapped.", "state"
        )
        self._host_blocks = _gauge(
            "quire_host_blocks", "Host blocks for swapped-out KV by state: used or free.", "state"
        )
        self._occupancy = _gauge("quire_kv_occupancy", "Referenced KV blocks as a share of all, 0 to 1.")
        self._step_seconds = _gauge("quire_step_seconds", "Duration of the last engine step.")
        self._finished = _Total("quire_finished_requests", "Finished sequences by reason.", "finished_reason")
        self._totals = {
            "prompt_tokens": _Total("quire_prompt_tokens", "Prompt tokens of admitted requests."),
            "generated_tokens": _Total("quire_generated_tokens", "Generated tokens."),
            "prefix_query_tokens": _Total("quire_prefix_query_tokens", "Prompt tokens looked up in the cache."),
            "prefix_hit_tokens": _Total("quire_prefix_hit_tokens", "Prompt tokens that the cache supplied."),
            "copied_blocks": _Total("quire_copied_blocks", "KV blocks copied on write."),
            "preemptions": _Total("quire_preemptions", "Preemptions of sequences."),
        }
        self._fallbacks = _Total(
            "quire_recovery_fallbacks", "Swaps that became recomputes because the host pool was full."
        )
        self._recoveries = {
            "decisions": _Total("quire_recovery_decisions", "Decisions on recovery, by kind.", "recovery"),
            "finished": _Total("quire_recoveries", "Finished recoveries, by kind.", "recovery"),
            "estimates": _Total(
                "quire_recovery_estimated_seconds",
                "Estimated time of finished recoveries, by kind.",
                "recovery",
            ),
            "outcomes": _Total(
                "quire_recovery_seconds", "Actual time of finished recoveries, by kind.", "recovery"
            ),
        }

    def update(self, stats: EngineStats) -> None:
        """Publish a snapshot; counters advance by the difference from the last one."""
        scheduler = stats.scheduler
        for state in ("referenced", "cached", "free"):
            self._set(self._blocks, getattr(scheduler, f"{state}_blocks"), state=state)
        for state in ("running", "waiting", "preempted", "swapped"):
            self._set(self._requests, getattr(scheduler, state), state=state)
        self._set(self._host_blocks, scheduler.host_blocks_used, state="used")
        self._set(self._host_blocks, scheduler.host_blocks - scheduler.host_blocks_used, state="free")
        self._set(self._occupancy, scheduler.referenced_blocks / stats.num_blocks)
        self._set(self._step_seconds, stats.step_seconds)
        for name, total in self._totals.items():
            total.advance(getattr(scheduler, name), self._tags)
        for reason, count in scheduler.finished.items():
            self._finished.advance(count, {**self._tags, "finished_reason": reason.value})
        self._fallbacks.advance(scheduler.recovery.fallbacks, self._tags)
        for name, total in self._recoveries.items():
            for recovery, amount in getattr(scheduler.recovery, name).items():
                total.advance(amount, {**self._tags, "recovery": recovery.value})

    def _set(self, gauge: Any, value: float, **tags: str) -> None:
        gauge.set(value, tags={**self._tags, **tags})


class OverloadMetrics:
    """Owned by one ingress replica; ``update`` is called a few times a second at most."""

    def __init__(self, model_name: str) -> None:
        self._tags = {"model_name": model_name}
        self._wait = _gauge(
            "quire_expected_wait_seconds", "Expected wait of a new request on the best replica."
        )
        self._refused = _Total("quire_admission_refused", "Requests refused with a 429.")

    def update(self, wait_s: float, refused: int) -> None:
        """Publish the current wait (0 if unknown) and the number of refusals since the start."""
        self._wait.set(wait_s, tags=self._tags)
        self._refused.advance(refused, self._tags)


class _Total:
    """A counter that takes totals; Ray's counters take increments, and refuse 0."""

    def __init__(self, name: str, description: str, *tags: str) -> None:
        self._counter = metrics.Counter(name, description=description, tag_keys=(*TAGS, *tags))
        self._last: dict[tuple[str, ...], float] = {}

    def advance(self, total: float, tags: dict[str, str]) -> None:
        key = tuple(tags.values())
        more = total - self._last.get(key, 0)
        if more > 0:
            self._last[key] = total
            self._counter.inc(more, tags=tags)


def _gauge(name: str, description: str, *tags: str) -> Any:
    return metrics.Gauge(name, description=description, tag_keys=(*TAGS, *tags))
