"""What follows from live runs: a table, and the figures with their bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtests.experiments.routing_live.stage import LiveArm, Reply, Run
from loadtests.report import Figure, most
from loadtests.stats import mean, quantile, ratio

Runs = Mapping[LiveArm, Sequence[Run]]
"""Of each arm, one for each seed."""

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
    return [_row(arm, found) for arm, found in runs.items() if found]


def _row(arm: LiveArm, runs: Sequence[Run]) -> list[str]:
    times = ttfts(runs)
    return [
        arm.value,
        f"{throughput(runs):.1f}",
        " ".join(f"{run.throughput:.0f}" for run in runs),
        f"{100 * cached_share(counted(runs)):.1f}",
        f"{quantile(times, 0.5):.2f}",
        f"{quantile(times, 0.99):.2f}",
        f"{mean([run.balance for run in runs]):.2f}",
        str(sum(len(run.replies) for run in runs)),
        str(sum(run.refused for run in runs)),
        str(sum(run.broken for run in runs)),
    ]


def throughput(runs: Sequence[Run]) -> float:
    """Output tokens per second, mean over the seeds."""
    return mean([run.throughput for run in runs])


def counted(runs: Sequence[Run]) -> list[Reply]:
    """The requests of all seeds that figures are of."""
    return [reply for run in runs for reply in run.counted]


def ttfts(runs: Sequence[Run]) -> list[float]:
    """Seconds to the first token of the counted requests of all seeds."""
    return [reply.ttft for reply in counted(runs)]


def cached_share(replies: Sequence[Reply]) -> float:
    """Of these requests' prompt tokens, what engines found cached."""
    prompt = sum(reply.prompt_tokens for reply in replies)
    return sum(reply.cached_tokens for reply in replies) / prompt if prompt else 0.0


def most_cached(replies: Sequence[Reply], system: int) -> float:
    """The share if every request had found its whole system prompt, as with an oracle: the pools hold all."""
    prompt = [reply.prompt_tokens for reply in replies if reply.prompt_tokens]
    return len(prompt) * system / sum(prompt) if prompt else 0.0


def figures(runs: Runs, system: int) -> list[Figure]:
    """``system`` is the length of the system prompts, in tokens.

    Bars stand where what they compare was run: over Ray's default, not over its prefix router.
    """
    made = [
        most(f"{arm}: requests that failed", sum(run.refused + run.broken for run in found))
        for arm, found in runs.items()
    ]
    ours = runs.get(LiveArm.PREFIX)
    if not ours:
        return made
    share = cached_share(counted(ours)) / max(most_cached(counted(ours), system), 1e-9)
    made.append(Figure("prefix: cached share of prompt tokens, of an oracle's", share, "", CACHED_BAR))
    for arm in COMPARED[1:]:
        other = runs.get(arm)
        if other:
            name, barred = arm.value.replace("_", " "), arm is LiveArm.POWER_OF_TWO
            rate = throughput(ours) / max(throughput(other), 1e-9)
            wait = ratio(ttfts(ours), ttfts(other))
            bars = (THROUGHPUT_BAR, TTFT_BAR) if barred else (None, None)
            made.append(Figure(f"prefix: throughput over {name}", rate, "x", bars[0]))
            made.append(Figure(f"prefix: median TTFT, of {name}'s", wait, "x", bars[1], at_most=True))
    return made
