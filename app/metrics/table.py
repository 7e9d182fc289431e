"""Every metric, declared once: what each process counts, what it is called elsewhere, and what the page says.

To add one, declare it here and fill it in where its source is assembled (``engine_figures.py``,
``ingress_figures.py``, ``scaling_figures.py``). Then run ``python -m app.metrics.page > docs/metrics.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.autoscaling.publishing import DESCRIPTIONS
from app.autoscaling.scaling_config import ScalingConfig
from app.routing.policies import ROUTING_REASONS
from engine.request import FinishReason
from engine.scheduling.latency_stats import LATENCY_BOUNDS
from engine.scheduling.recovery import Recovery

PREFIX = "quire_"

INTER_TOKEN_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
_GROWTH = f"{ScalingConfig().growth_share:.0%}"
TOKEN_BOUNDS = tuple(float(2**power) for power in range(18))


class MetricKind(StrEnum):
    """Prometheus's types of metrics; a counter's name gets ``_total``."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """The process that counts a metric."""

    ENGINE = "engine"
    INGRESS = "ingress"
    SCALING = "scaling"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: ``name`` is without ``PREFIX`` and suffixes.

    All ``values`` of a label have a sample from the start. An engine's labels have no others.
    """

    name: str
    kind: MetricKind
    source: Source
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def by_key(self) -> bool:
        """Whether it says what each API key has used."""
        return self.labels == ("key",)

    @property
    def full_name(self) -> str:
        """The exported name, without a counter's or histogram's suffixes."""
        return PREFIX + self.name

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """The label values that always have a sample."""
        return [(value,) for value in self.values] if self.labels else [()]


def _gauge(source: Source, name: str, meaning: str, label: str = "", *values: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, source, meaning, (label,) if label else (), values)


def _counter(source: Source, name: str, meaning: str, label: str = "", *values: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, source, meaning, (label,) if label else (), values)


def _histogram(source: Source, name: str, meaning: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, source, meaning, bounds=bounds)


def _scaling(kind: MetricKind, name: str, label: str = "", *values: str) -> Metric:
    return Metric(name, kind, Source.SCALING, DESCRIPTIONS[PREFIX + name], (label,) if label else (), values)


_E, _I = Source.ENGINE, Source.INGRESS
_RECOVERIES = tuple(recovery.value for recovery in Recovery)
_REASONS = tuple(reason.value for reason in FinishReason)

REFUSALS = ("overloaded", "unavailable", "client_limit_exceeded", "rate_limit_exceeded")

TABLE: tuple[Metric, ...] = (
    # What clients feel, measured in the ingress.
    _histogram(
        _I, "time_to_first_token_seconds", "From a request's arrival to its first token.", LATENCY_BOUNDS
    ),
    _histogram(
        _I,
        "inter_token_seconds",
        "Between two tokens of a choice; tokens that arrive together share the interval. "
        "Not of `best_of` and beams.",
        INTER_TOKEN_BOUNDS,
    ),
    _histogram(
        _I,
        "time_per_output_token_seconds",
        "For each request: time after its first token, divided by further tokens per choice. "
        "Not of `best_of` and beams.",
        INTER_TOKEN_BOUNDS,
    ),
    _histogram(_I, "request_seconds", "From a request's arrival to its end, if it succeeds.", LATENCY_BOUNDS),
    _histogram(_I, "request_prompt_tokens", "Prompt tokens of each successful request.", TOKEN_BOUNDS),
    _histogram(
        _I, "request_output_tokens", "Output tokens of each successful request, all choices.", TOKEN_BOUNDS
    ),
    Metric(
        "ended_requests",
        MetricKind.COUNTER,
        _I,
        "Admitted requests that have ended; the outcome is `ok`, `disconnected`, or an error's code.",
        ("route", "outcome"),
    ),
    _counter(
        _I,
        "refused_requests",
        "Requests answered with a 429 or 503, and streams that ended with such an error, by its code.",
        "reason",
        *REFUSALS,
    ),
    _counter(_I, "key_requests", "Each API key's requests that have ended.", "key"),
    _counter(_I, "key_prompt_tokens", "Prompt tokens of each API key's requests.", "key"),
    _counter(_I, "key_cached_tokens", "Of these prompt tokens, those that the cache supplied.", "key"),
    _counter(
        _I,
        "key_output_tokens",
        "Output tokens of each API key's requests, in all sequences that were generated.",
        "key",
    ),
    # The ingress.
    _gauge(_I, "live_requests", "Choices in progress."),
    _gauge(
        _I,
        "loop_lag_seconds",
        "How late the event loop is, or how long frames or new requests have waited for it, whichever is more.",
    ),
    _gauge(_I, "expected_wait_seconds", "Expected wait of a new request on the best replica."),
    _gauge(
        _I,
        "replicas",
        "Engine replicas by state of their channel.",
        "state",
        "opening",
        "open",
        "suspect",
        "closed",
    ),
    _counter(_I, "moved_requests", "Requests that moved because their replica was stopping or cordoned."),
    _counter(_I, "resubmissions", "Attempts made because the previous one failed or lost its replica."),
    _gauge(_I, "resubmissions_waiting", "Requests that wait for the resubmission budget."),
    _counter(_I, "lost_channels", "Channels to engines that ended because of a fault."),
    _counter(_I, "silent_channels", "Times an engine was silent for 3 s."),
    _counter(_I, "dead_engines", "Engines that died while their channel was open."),
    _counter(
        _I,
        "faults",
        "Caught defects of Quire; any value above 0 is a bug.",
        "part",
        "events",
        "calls",
        "routing",
        "overload",
    ),
    _counter(
        _I,
        "ray_faults",
        "Failed exchanges with Ray that do not affect requests: likely victims, the last scaling decision.",
        "part",
        "victims",
        "decision",
    ),
    _counter(_I, "routing_decisions", "Placed attempts by reason; see below.", "reason", *ROUTING_REASONS),
    _counter(
        _I, "predicted_cached_tokens", "Prompt tokens that the router expected in the chosen replica's cache."
    ),
    _counter(_I, "actual_cached_tokens", "Prompt tokens that the cache supplied to these requests."),
    _counter(_I, "cached_tokens_error", "Sum of the absolute differences between the two."),
    # KV memory.
    _gauge(_E, "kv_blocks", "KV blocks by state.", "state", "referenced", "cached", "free"),
    _gauge(_E, "kv_shared_blocks", "Blocks with more than one reference."),
    _gauge(
        _E,
        "kv_demand_blocks",
        f"Blocks that running and waiting requests need, plus {_GROWTH} of their expected growth.",
    ),
    _gauge(_E, "kv_occupancy", "Referenced KV blocks as a share of all, 0 to 1."),
    _gauge(_E, "host_blocks", "Host blocks for swapped-out KV by state.", "state", "used", "free"),
    _counter(_E, "copied_blocks", "KV blocks copied on write."),
    _counter(_E, "prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    _counter(_E, "prefix_hit_tokens", "Prompt tokens that the prefix cache supplied."),
    # Work of an engine.
    _gauge(_E, "requests", "Sequences by state.", "state", "running", "waiting", "preempted", "swapped"),
    _gauge(_E, "step_seconds", "Duration of the last engine step."),
    _gauge(_E, "prefill_rate", "Calibrated prompt tokens per second; 0 if not measured."),
    _counter(_E, "steps", "Engine steps."),
    _counter(_E, "prompt_tokens", "Prompt tokens of admitted requests."),
    _counter(_E, "generated_tokens", "Generated tokens."),
    _counter(_E, "drafted_tokens", "Tokens that speculation guessed and ran."),
    _counter(_E, "accepted_tokens", "Guessed tokens that were right."),
    _counter(_E, "finished_requests", "Finished sequences by reason.", "finished_reason", *_REASONS),
    _histogram(
        _E,
        "queue_seconds",
        "From a request's arrival (at this engine, if it moved) to its first step.",
        LATENCY_BOUNDS,
    ),
    _histogram(_E, "prefill_seconds", "From a request's first step to its first token.", LATENCY_BOUNDS),
    _histogram(_E, "decode_seconds", "From a request's first token to its last.", LATENCY_BOUNDS),
    _counter(_E, "preemptions", "Preemptions of sequences."),
    _counter(_E, "recovery_decisions", "Preemptions by chosen recovery.", "recovery", *_RECOVERIES),
    _counter(_E, "recoveries", "Finished recoveries by kind.", "recovery", *_RECOVERIES),
    _counter(_E, "recovery_fallbacks", "Swaps that became recomputes because host blocks had run out."),
    _counter(
        _E,
        "recovery_estimated_seconds",
        "Estimated time of finished recoveries by kind.",
        "recovery",
        *_RECOVERIES,
    ),
    _counter(_E, "recovery_seconds", "Actual time of finished recoveries by kind.", "recovery", *_RECOVERIES),
    _counter(_E, "failed_steps", "Steps that failed and were rerun in parts."),
    _counter(_E, "grammar_faults", "Structured outputs not checked because the checking process failed."),
    _counter(_E, "lost_leases", "Times an ingress sent no heartbeat for 5 s, so its tokens were held back."),
    _gauge(_E, "free_disk_bytes", "Free bytes where Ray keeps sockets and logs, on the engine's node."),
    # The scaling policy, in Serve's controller.
    _scaling(MetricKind.GAUGE, "scaling_target"),
    _scaling(MetricKind.GAUGE, "scaling_running"),
    _scaling(MetricKind.GAUGE, "scaling_need_replicas", "need", "kv", "prefill", "decode"),
    _scaling(MetricKind.GAUGE, "scaling_demand"),
    _scaling(MetricKind.GAUGE, "scaling_reason", "reason"),
    _scaling(MetricKind.GAUGE, "scaling_held", "held_by"),
    _scaling(MetricKind.GAUGE, "scaling_missing_reports"),
    _scaling(MetricKind.COUNTER, "scaling_faults", "part", "decision", "publishing"),
    _scaling(MetricKind.COUNTER, "scaling_victims", "predicted", "yes", "no"),
)
