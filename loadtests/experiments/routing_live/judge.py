"""What follows from live runs: a table, and the figures with their bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtests.client import OK
from loadtests.experiments.routing_live.recording import Arrival, Recording, cached_share, ttfts
from loadtests.experiments.routing_live.stage import LiveArm
from loadtests.report import Figure, most
from loadtests.stats import mean, quantile, ratio

Runs = Mapping[LiveArm, Sequence[Recording]]
"""The recordings of each arm, one for each seed."""

COMPARED = (LiveArm.PREFIX, LiveArm.POWER_OF_TWO, LiveArm.PREFIX_AFFINITY)
"""Ours, Ray's default, and Ray's own router by prefixes."""

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
    arrivals = [arrival for one in recordings for arrival in one.arrivals]
    return [
        arm.value,
        f"{throughput(recordings):.1f}",
        " ".join(f"{one.throughput:.0f}" for one in recordings),
        f"{100 * cached_share(counted(recordings)):.1f}",
        f"{quantile(times, 0.5):.2f}",
        f"{quantile(times, 0.99):.2f}",
        f"{mean([one.balance for one in recordings]):.2f}",
        str(len(arrivals)),
        str(sum(arrival.status != OK for arrival in arrivals)),
        str(sum(arrival.status == OK and not arrival.whole for arrival in arrivals)),
    ]


def throughput(recordings: Sequence[Recording]) -> float:
    """Output tokens per second, mean over the seeds."""
    return mean([one.throughput for one in recordings])


def counted(recordings: Sequence[Recording]) -> list[Arrival]:
    """The requests of all seeds that figures are of."""
    return [arrival for one in recordings for arrival in one.counted]


def figures(runs: Runs, oracle: Sequence[float] = ()) -> list[Figure]:
    """``oracle`` has the cached share of the oracle for each recording of ``prefix``, from 0 to 1.

    Bars stand where what they compare was run: over Ray's default, not over its prefix router.
    """
    made = [
        most(f"{arm}: requests that failed", sum(one.failed for one in recordings))
        for arm, recordings in runs.items()
    ]
    ours = runs.get(LiveArm.PREFIX)
    if ours and oracle:
        # Seeds have about as many prompt tokens each.
        share = cached_share(counted(ours)) / mean(oracle)
        made.append(Figure("prefix: cached share of prompt tokens, of the oracle's", share, "", CACHED_BAR))
    for arm in COMPARED[1:]:
        other = runs.get(arm)
        if ours and other:
            barred = arm is LiveArm.POWER_OF_TWO
            name = arm.value.replace("_", " ")
            rate = throughput(ours) / max(throughput(other), 1e-9)
            wait = ratio(ttfts(ours), ttfts(other))
            made.append(
                Figure(f"prefix: throughput over {name}", rate, "x", THROUGHPUT_BAR if barred else None)
            )
            made.append(
                Figure(f"prefix: median TTFT, of {name}'s", wait, "x", TTFT_BAR if barred else None, True)
            )
    return made
