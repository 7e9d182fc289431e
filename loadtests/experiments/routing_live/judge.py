"""What follows from live runs: a table, and the figures with their bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from loadtests.experiments.routing_live.arms import LiveArm
from loadtests.experiments.routing_live.recording import OK, Arrival, Recording, cached_share, quantile, ttfts
from loadtests.report import Figure

Runs = Mapping[LiveArm, Sequence[Recording]]
"""The recordings of each arm, one for each seed."""

CACHED_BAR, THROUGHPUT_BAR, TTFT_BAR = 0.95, 1.5, 0.6

HEADER = (
    "routing",
    "tokens/s",
    "each seed",
    "cached %",
    "TTFT p50 s",
    "p99 s",
    "busiest/mean",
    "requests",
    "not 200",
    "broken",
)


def rows(runs: Runs) -> list[list[str]]:
    """A line for each arm, its seeds together."""
    return [_row(arm, recordings) for arm, recordings in runs.items() if recordings]


def _row(arm: LiveArm, recordings: Sequence[Recording]) -> list[str]:
    times = ttfts(recordings)
    return [
        arm.value,
        f"{throughput(recordings):.1f}",
        " ".join(f"{one.throughput:.0f}" for one in recordings),
        f"{100 * cached_share(counted(recordings)):.1f}",
        f"{quantile(times, 0.5):.2f}",
        f"{quantile(times, 0.99):.2f}",
        f"{statistics.fmean(one.balance for one in recordings):.2f}",
        str(sum(len(one.arrivals) for one in recordings)),
        str(sum(arrival.status != OK for one in recordings for arrival in one.arrivals)),
        str(sum(arrival.status == OK and not arrival.whole for one in recordings for arrival in one.arrivals)),
    ]


def throughput(recordings: Sequence[Recording]) -> float:
    """Output tokens per second, mean over the seeds."""
    return statistics.fmean(one.throughput for one in recordings)


def counted(recordings: Sequence[Recording]) -> list[Arrival]:
    """The requests of all seeds that figures are of."""
    return [arrival for one in recordings for arrival in one.counted]


def figures(runs: Runs, oracle: Sequence[float] = ()) -> list[Figure]:
    """``oracle`` has the cached share of the oracle for each recording of ``prefix``, from 0 to 1.

    Bars stand where what they compare was run.
    """
    made = [
        Figure(f"{arm}: requests that failed", sum(one.failed for one in recordings), "", 0, at_most=True)
        for arm, recordings in runs.items()
    ]
    ours, two = runs.get(LiveArm.PREFIX), runs.get(LiveArm.POWER_OF_TWO)
    if ours and oracle:
        # Seeds have about as many prompt tokens each.
        share = cached_share(counted(ours)) / statistics.fmean(oracle)
        made.append(Figure("prefix: cached share of prompt tokens, of the oracle's", share, "", CACHED_BAR))
    if ours and two:
        rate = throughput(ours) / max(throughput(two), 1e-9)
        ratio = quantile(ttfts(ours), 0.5) / quantile(ttfts(two), 0.5)
        made += [
            Figure("prefix: throughput over power of two", rate, "x", THROUGHPUT_BAR),
            Figure("prefix: median TTFT, of power of two's", ratio, "x", TTFT_BAR, at_most=True),
        ]
    return made
