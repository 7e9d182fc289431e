"""Passes a process's figures on to Ray's metrics: on its dashboard, and on each node for Prometheus.

Ray exports them with the prefix ``ray_`` and Serve's own tags (application, deployment, replica). No tag may be
called ``route``, which Serve uses itself. Ray's histograms take single values, which would cost too much for
each token: one is exported as gauges of its cumulative buckets, sum and count, which queries read alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ray.serve import metrics

from app.autoscaling.fault_counter import FaultCounter
from app.config import RAY_COLLECTS
from app.metrics.aliases import ALIASES
from app.metrics.samples import METRICS, Samples, Value
from app.metrics.table import TABLE, MetricKind, Source
from engine.histogram import HistogramTotals

EVERY_S = 2.0
"""How often a process passes them on; Ray's agents collect every 10 s."""

logger = logging.getLogger(__name__)

_RENAMED = {"route": "path"}


class _Series(NamedTuple):
    """One metric of Ray's, with what one process has of it."""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...]
    bounds: Sequence[float]
    values: Mapping[tuple[str, ...], Value]


class RayExport:
    """Belongs to one process, engine or ingress."""

    def __init__(self, source: Source) -> None:
        self.faults = FaultCounter("figures could not be passed on to Ray", logger)
        self._source = source
        self._collected = os.environ.get(RAY_COLLECTS) != "0"
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, ...], float] = {}

    def update(self, model: str, samples: Samples) -> None:
        """Publish a model's snapshot; counters advance by the difference from its last one. Never raises.

        About 3 µs a number.
        """
        if not self._collected:
            return
        try:
            self._update(model, samples)
        except Exception:  # noqa: BLE001  (Ray raises many kinds; requests go on without its metrics)
            self.faults.add()

    def _update(self, model: str, samples: Samples) -> None:
        for series in self._series(samples):
            labels = [_RENAMED.get(label, label) for label in series.labels]
            for key, value in series.values.items():
                if series.kind is MetricKind.COUNTER and value == self._last.get(
                    (series.name, model, *key), 0.0
                ):
                    continue
                tags = {"model_name": model, **dict(zip(labels, key, strict=True))}
                if isinstance(value, HistogramTotals):
                    self._histogram(series, tags, value)
                elif series.kind is MetricKind.COUNTER:
                    self._advance(series, (series.name, model, *key), tags, value)
                else:
                    self._set(series.name, series.meaning, tags, value)

    def _series(self, samples: Samples) -> Iterator[_Series]:
        for metric in TABLE:
            # Anyone who can reach Ray's port can read it without a key, so it does not say who uses the server.
            if metric.source is self._source and not metric.by_key:
                found = samples.get(metric.name, {})
                yield _Series(
                    metric.full_name, metric.kind, metric.meaning, metric.labels, metric.bounds, found
                )
        for alias in ALIASES:
            metric = METRICS[alias.of]
            if metric.source is self._source:
                found = dict(alias.samples(samples))
                meaning = f"{metric.full_name} by another name."
                yield _Series(f"vllm_{alias.name}", alias.kind, meaning, alias.labels, metric.bounds, found)

    def _set(self, name: str, meaning: str, tags: dict[str, str], value: float) -> None:
        gauge = self._metrics.get(name)
        if gauge is None:
            gauge = self._metrics[name] = metrics.Gauge(name, description=meaning, tag_keys=tuple(tags))
        gauge.set(value, tags=tags)

    def _advance(self, series: _Series, key: tuple[str, ...], tags: dict[str, str], total: float) -> None:
        counter = self._metrics.get(series.name)
        if counter is None:
            counter = self._metrics[series.name] = metrics.Counter(
                series.name, description=series.meaning, tag_keys=tuple(tags)
            )
        more = total - self._last.get(key, 0.0)
        if more > 0:  # Ray refuses 0
            self._last[key] = total
            counter.inc(more, tags=tags)

    def _histogram(self, series: _Series, tags: dict[str, str], totals: HistogramTotals) -> None:
        for bound, below in zip((*series.bounds, "+Inf"), accumulate(totals.counts), strict=True):
            self._set(f"{series.name}_bucket", series.meaning, {**tags, "le": str(bound)}, below)
        self._set(f"{series.name}_sum", series.meaning, tags, totals.sum)
        self._set(f"{series.name}_count", series.meaning, tags, sum(totals.counts))
