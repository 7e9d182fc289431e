"""Names under which boards for vLLM, and Ray's own board for LLMs, look for the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from app.metrics.samples import METRICS, Samples, Value
from app.metrics.table import MetricKind
from engine.histogram import HistogramTotals


@dataclass(frozen=True, slots=True)
class Alias:
    """``name`` after ``vllm:`` or ``vllm_``; with ``values`` the sum of these values of the metric's label."""

    name: str
    of: str
    values: tuple[str, ...] = ()

    @property
    def kind(self) -> MetricKind:
        """The kind of the metric."""
        return METRICS[self.of].kind

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the metric, unless values were added up."""
        return () if self.values else METRICS[self.of].labels

    def samples(self, samples: Samples) -> Iterator[tuple[tuple[str, ...], Value]]:
        """What a process has of it."""
        found = samples.get(self.of)
        if found is None:
            return
        if not self.values:
            yield from found.items()
            return
        numbers = [found.get((value,), 0.0) for value in self.values]
        yield (), sum(number for number in numbers if not isinstance(number, HistogramTotals))


ALIASES = (
    Alias("num_requests_running", "requests", ("running",)),
    Alias("num_requests_waiting", "requests", ("waiting", "preempted")),
    Alias("num_requests_swapped", "requests", ("swapped",)),
    Alias("kv_cache_usage_perc", "kv_occupancy"),
    Alias("gpu_cache_usage_perc", "kv_occupancy"),
    Alias("prefix_cache_queries", "prefix_query_tokens"),
    Alias("prefix_cache_hits", "prefix_hit_tokens"),
    Alias("num_preemptions", "preemptions"),
    Alias("prompt_tokens", "prompt_tokens"),
    Alias("generation_tokens", "generated_tokens"),
    Alias("request_success", "finished_requests"),
    Alias("request_queue_time_seconds", "queue_seconds"),
    Alias("request_prefill_time_seconds", "prefill_seconds"),
    Alias("request_decode_time_seconds", "decode_seconds"),
    Alias("time_to_first_token_seconds", "time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds", "inter_token_seconds"),
    Alias("time_per_output_token_seconds", "inter_token_seconds"),
    Alias("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    Alias("e2e_request_latency_seconds", "request_seconds"),
    Alias("request_prompt_tokens", "request_prompt_tokens"),
    Alias("request_generation_tokens", "request_output_tokens"),
)
