"""The figures of one process at one moment, as plain data that travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from app.metrics.table import TABLE, Metric, MetricKind, Source
from engine.histogram import HistogramTotals

Value: TypeAlias = float | HistogramTotals
Samples: TypeAlias = dict[str, dict[tuple[str, ...], Value]]
"""Of each metric, by its name in the table, a value for each value of its labels."""

METRICS = {metric.name: metric for metric in TABLE}
_OF_ENGINES = tuple(metric for metric in TABLE if metric.source is Source.ENGINE)


class Process(NamedTuple):
    """Who counted: its name is empty for what concerns a whole deployment.

    An ingress has one for each ``model``.
    """

    name: str
    samples: Samples
    model: str


def pack(samples: Samples) -> list[float]:
    """An engine's figures in the order of the table, as they go over the channel.

    Raises:
        KeyError: one is missing.
    """
    numbers: list[float] = []
    for metric in _OF_ENGINES:
        for key in metric.keys:
            value = samples[metric.name].get(key, 0.0)
            if isinstance(value, HistogramTotals):
                numbers += (*value.counts, value.sum)
            else:
                numbers.append(value)
    return numbers


def unpack(numbers: Sequence[float]) -> Samples:
    """What :func:`pack` packed.

    Raises:
        ValueError: there are too few numbers, or too many.
    """
    rest = iter(numbers)
    samples = {metric.name: {key: _value(metric, rest) for key in metric.keys} for metric in _OF_ENGINES}
    if next(rest, None) is not None:
        raise ValueError(f"{len(numbers)} figures are too many")
    return samples


def _value(metric: Metric, numbers: Iterator[float]) -> Value:
    try:
        if metric.kind is not MetricKind.HISTOGRAM:
            return next(numbers)
        counts = tuple(int(next(numbers)) for _ in range(len(metric.bounds) + 1))
        return HistogramTotals(counts, next(numbers))
    except (StopIteration, RuntimeError):
        raise ValueError("there are too few figures") from None
