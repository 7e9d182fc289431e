"""The scenarios: which runs each needs, and the figures that follow from them, with their bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.experiments.routing import constants as given
from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import Load, Shape
from loadtests.experiments.routing.runs import Run, Summary, merge
from loadtests.findings import Findings, Table
from loadtests.report import Figure

Results = dict[tuple[str, Arm], list[Summary]]
"""By the name of the runs and their arm, one for each seed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A part of the experiment: ``figures`` follow from the runs, ``note`` stands below their table."""

    title: str
    runs: list[Run]
    figures: Callable[[Results], list[Figure]]
    note: str = ""

    def judge(self, summaries: Sequence[Summary]) -> Findings:
        """What the runs have shown; ``summaries`` in their order."""
        results: Results = {}
        lost = 0
        for run, summary in zip(self.runs, summaries, strict=True):
            results.setdefault((run.name, run.arm), []).append(summary)
            lost += 0 if run.saturated else summary.unfinished
        figures = [*self.figures(results), Figure("requests without an end", lost, "", 0, True)]
        return Findings([_table(self.title, results, self.note)], figures)


def _seeds(
    count: int,
    name: str,
    workload: str,
    shape: Shape,
    load: Load,
    arms: Sequence[Arm],
    *,
    saturated: bool = False,
    ingresses: int = 1,
    first: int = 0,
) -> list[Run]:
    more = (saturated, ingresses, first)
    return [Run(name, workload, shape, load, arm, seed + 1, *more) for arm in arms for seed in range(count)]


def _saturated(shape: Shape, ratio: float) -> Load:
    rate = given.saturating_rate(shape, given.REPLICAS)
    return Load(given.REPLICAS, shape.blocks(ratio, given.REPLICAS), rate, 0.0, given.RAMP_SECONDS)


def _table(title: str, results: Results, note: str) -> Table:
    """All runs of a scenario, the seeds of each together, with the spread of their throughput."""
    rows = []
    for (name, arm), summaries in results.items():
        one = merge(summaries)
        made = [summary.throughput for summary in summaries]
        rows.append(
            (
                f"{name}: {arm.value}",
                f"{one.throughput:,.0f}{'' if one.filled else ' or more'}",
                f"{(max(made) - min(made)) / 2:,.0f}" if len(made) > 1 else "",
                f"{100 * one.hit_rate:.1f}",
                f"{1e3 * one.itl:.1f}",
                f"{one.quantile(0.5):.3f}",
                f"{one.quantile(0.99):.3f}",
                f"{one.balance:.2f}",
                f"{one.preemptions:.0f}",
            )
        )
    header = ("runs", "tokens/s", "±", "hit %", "ITL ms", "TTFT p50 s", "p99 s", "busiest/mean", "preempted")
    return Table(title, header, tuple(rows), note)


SATURATED = "at saturation"
SERVED = "at a rate that round robin serves"
_RAMP = (
    f"{given.REPLICAS} replicas; the rate rises from {given.RAMP_FROM:g} to {given.RAMP_TO:g} times "
    "{rate:.1f} requests/s, at which reading KV alone takes all the time"
)


def _ramp_note(load: Load) -> str:
    return _RAMP.format(rate=load.rate)


def _rate_note(load: Load) -> str:
    return f"{load.replicas} replicas, {load.rate:g} requests/s"


def _shared(seeds: int) -> Scenario:
    load = _saturated(given.SHARED, given.RATIO)
    calm = given.SERVED_SHARE * load.rate
    served = Load(given.REPLICAS, load.blocks, calm, given.SERVED_WARM_UP, given.SERVED_WINDOW)
    runs = _seeds(seeds, SATURATED, "shared", given.SHARED, load, tuple(Arm), saturated=True)
    runs += _seeds(seeds, SERVED, "shared", given.SHARED, served, (Arm.PREFIX, Arm.ROUND_ROBIN))

    def figures(results: Results) -> list[Figure]:
        one = {arm: merge(summaries) for (name, arm), summaries in results.items() if name == SATURATED}
        ours, oracle, turns = one[Arm.PREFIX], one[Arm.ORACLE], one[Arm.ROUND_ROBIN]
        slow, fast = (merge(results[SERVED, arm]) for arm in (Arm.PREFIX, Arm.ROUND_ROBIN))
        return [
            Figure("throughput, of the oracle's", ours.throughput / oracle.throughput, "", 0.97),
            Figure("hit rate, of the oracle's", ours.hit_rate / oracle.hit_rate, "", 0.97),
            Figure("throughput over round robin", ours.throughput / turns.throughput, "x"),
            Figure("oracle's throughput over round robin", oracle.throughput / turns.throughput, "x"),
            Figure("ITL at saturation, of the oracle's", ours.itl / oracle.itl, "", 1.05, True),
            Figure("ITL at saturation, of round robin's", ours.itl / turns.itl),
            Figure("ITL at a served rate, of round robin's", slow.itl / fast.itl, "", 1.05, True),
        ]

    title = "System prompts of Zipf's popularity, working set 73 % of the fleet's KV memory"
    note = f"{_ramp_note(load)}; round robin serves {calm:.1f} requests/s"
    return Scenario(title, runs, figures, note)


def _equal(seeds: int) -> Scenario:
    load, full = (_saturated(given.EQUAL, ratio) for ratio in (given.RATIO, given.PRESSURE_RATIO))
    arms = (Arm.PREFIX, Arm.ORACLE, Arm.ROUND_ROBIN)
    others = (Arm.PREFIX, Arm.ORACLE, Arm.APPROXIMATE)
    pressed, many = "1.3 times the memory, 4 ingresses", given.INGRESSES
    runs = _seeds(seeds, SATURATED, "shared", given.EQUAL, load, arms, saturated=True)
    runs += _seeds(seeds, pressed, "shared", given.EQUAL, full, others, saturated=True, ingresses=many)

    def figures(results: Results) -> list[Figure]:
        ours, oracle, turns = (merge(results[SATURATED, arm]).throughput for arm in arms)
        here, best, tree = (merge(results[pressed, arm]).throughput for arm in others)
        return [
            Figure("throughput over round robin", ours / turns, "x", 1.8),
            Figure("oracle's throughput over round robin", oracle / turns, "x"),
            Figure("under pressure, throughput over the tree", here / tree, "x"),
            Figure("under pressure, oracle over the tree", best / tree, "x"),
            Figure("under pressure, throughput of the oracle's", here / best, "", 0.97),
        ]

    title = "The same, all system prompts equally popular as in the published measurements"
    note = "published at 73 %: 8,730 to 14,900 tokens/s with an exact index, 4,300 to 7,000 with none"
    return Scenario(title, runs, figures, f"{_ramp_note(load)}; {note}")


def _short(seeds: int) -> Scenario:
    load, arms = _saturated(given.SHORT, given.RATIO), (Arm.PREFIX, Arm.ORACLE)
    runs = _seeds(seeds, SATURATED, "shared", given.SHORT, load, arms, saturated=True)

    def figures(results: Results) -> list[Figure]:
        ours, oracle = (merge(results[SATURATED, arm]) for arm in arms)
        return [
            Figure("throughput, of the oracle's", ours.throughput / oracle.throughput, "", 0.97),
            Figure("hit rate, of the oracle's", ours.hit_rate / oracle.hit_rate, "", 0.97),
        ]

    return Scenario("The same with questions of 100 tokens", runs, figures, _ramp_note(load))


def _pressure(seeds: int) -> Scenario:
    load = _saturated(given.SHARED, given.PRESSURE_RATIO)
    one, many = "1 ingress", f"{given.INGRESSES} ingresses"
    pairs = (Arm.PREFIX, Arm.APPROXIMATE)
    several = given.INGRESSES
    runs = _seeds(seeds, many, "shared", given.SHARED, load, pairs, saturated=True, ingresses=several)
    runs += _seeds(seeds, one, "shared", given.SHARED, load, (Arm.PREFIX, Arm.ORACLE), saturated=True)

    def figures(results: Results) -> list[Figure]:
        ours, tree = (merge(results[many, arm]) for arm in pairs)
        alone, oracle = (merge(results[one, arm]) for arm in (Arm.PREFIX, Arm.ORACLE))
        lost = 100 * (alone.hit_rate - ours.hit_rate)
        return [
            Figure("throughput over the tree", ours.throughput / tree.throughput, "x"),
            Figure("oracle over the tree", oracle.throughput / tree.throughput, "x"),
            Figure(
                "throughput with 4 ingresses, of the oracle's", ours.throughput / oracle.throughput, "", 0.97
            ),
            Figure("hit rate lost with 4 ingresses", lost, " points", 2.0, True),
        ]

    return Scenario("Working set 1.3 times the fleet's KV memory", runs, figures, _ramp_note(load))


def _hot(seeds: int) -> Scenario:
    arms = (Arm.PREFIX, Arm.LEAST_TOKENS, Arm.ROUND_ROBIN, Arm.ORACLE)
    runs = _seeds(seeds, "served", "shared, lengths vary", given.HOT, given.HOT_RUN, arms)

    def figures(results: Results) -> list[Figure]:
        ours, least, turns, oracle = (merge(results["served", arm]).quantile(0.99) for arm in arms)
        return [
            Figure("TTFT p99, of the better of both", ours / min(least, turns), "", 1.03, True),
            Figure("oracle's TTFT p99, of the better of both", oracle / min(least, turns)),
        ]

    return Scenario("One system prompt for all", runs, figures, _rate_note(given.HOT_RUN))


def _unique(seeds: int) -> Scenario:
    arms, load = (Arm.PREFIX, Arm.LEAST_TOKENS), given.UNIQUE_RUN
    full = Load(load.replicas, load.blocks, 2 * load.rate, 0.0, given.RAMP_SECONDS / 2)
    runs = _seeds(seeds, "served", "unshared", given.UNIQUE, load, arms)
    runs += _seeds(seeds, SATURATED, "unshared", given.UNIQUE, full, arms, saturated=True)

    def figures(results: Results) -> list[Figure]:
        ours, least = (merge(results["served", arm]).quantile(0.99) for arm in arms)
        fast, slow = (merge(results[SATURATED, arm]).throughput for arm in arms)
        return [
            Figure("throughput, of least tokens'", fast / slow, "", 0.99),
            Figure("TTFT p99, of least tokens'", ours / least, "", 1.02, True),
        ]

    return Scenario("No two prompts begin alike", runs, figures, _rate_note(load))


def _cold(seeds: int) -> Scenario:
    arms = (Arm.PREFIX, Arm.COUNT, Arm.LEAST_TOKENS)
    runs = _seeds(seeds, "served", "mixed", given.COLD_SHORT, given.COLD_RUN, arms)

    def figures(results: Results) -> list[Figure]:
        ours, count, least = (merge(results["served", arm]).quantile(0.99, "short") for arm in arms)
        return [
            Figure("TTFT p99 of short prompts", ours, " s"),
            Figure("short prompts' TTFT p99, of counting requests", ours / count, "", 0.5, True),
            Figure("short prompts' TTFT p99, of least tokens'", ours / least),
        ]

    title = "One prompt in twenty is cold and has 16,000 to 32,000 tokens"
    return Scenario(title, runs, figures, _rate_note(given.COLD_RUN))


def _burst(seeds: int) -> Scenario:
    load = Load(given.BURST_REPLICAS, 19_264, 0.0, 0.0, given.BURST_SECONDS)
    distinct, one, heavy = "burst of distinct prefixes", "burst of one prefix", "burst of one shorter prefix"
    cases = (
        (distinct, distinct, given.BURST_SHAPE),
        (one, one, given.BURST_SHAPE),
        (heavy, one, given.BURST_HEAVY),
    )
    trials = given.BURST_TRIALS * seeds
    runs = [
        run
        for name, workload, shape in cases
        for run in _seeds(trials, name, workload, shape, load, (Arm.PREFIX,))
    ]

    def figures(results: Results) -> list[Figure]:
        most = max(summary.balance for summary in results[distinct, Arm.PREFIX])
        used, small = (max(one.replicas_used for one in results[name, Arm.PREFIX]) for name in (one, heavy))
        return [
            Figure("distinct prefixes, busiest/mean", most, "", 1.15, True),
            Figure("one cold prefix, replicas", used, "", 2, True),
            Figure("one shorter cold prefix, replicas", small),
        ]

    return Scenario("64 requests in 5 ms on four idle replicas", runs, figures)


def _chat(seeds: int) -> Scenario:
    runs = _seeds(seeds, "served", "conversations", given.CHAT, given.CHAT_RUN, (Arm.PREFIX,))
    runs += _seeds(1, "served", "conversations", given.CHAT, given.CHAT_RUN, (Arm.LEAST_TOKENS,))

    def figures(results: Results) -> list[Figure]:
        ours = merge(results["served", Arm.PREFIX])
        return [
            Figure("follow-ups to the same replica", 100 * ours.kept, " %", 98.0),
            Figure("their tokens cached", 100 * ours.kept_tokens, " %", 94.0),
        ]

    note = f"{given.CHAT_RUN.replicas} replicas, {given.CHAT_RUN.rate:g} conversations/s"
    return Scenario("Conversations of eight turns", runs, figures, note)


def _scale(seeds: int) -> Scenario:
    load, first = given.SCALE_RUN, given.SCALE_FIRST
    runs = _seeds(seeds, "served", "shared, lengths vary", given.SCALE, load, (Arm.PREFIX,), first=first)

    def figures(results: Results) -> list[Figure]:
        shares = [
            _share(summary, load, place)
            for summary in results["served", Arm.PREFIX]
            for place in range(first, load.replicas)
        ]
        return [Figure("least new replica's share after 20 s, of a fair one", 100 * min(shares), " %", 80.0)]

    return Scenario("Two replicas join two others under load", runs, figures, _rate_note(load))


def _share(summary: Summary, load: Load, place: int) -> float:
    """Of the requests routed in a window that ends ``SCALE_LIMIT`` after the join, times the replicas."""
    end = load.warm_up + given.SCALE_LIMIT
    routed = [at for when, at in summary.choices if end - given.SCALE_WINDOW <= when < end]
    return routed.count(place) * load.replicas / len(routed)


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    "burst": _burst,
    "scale": _scale,
    "hot": _hot,
    "unique": _unique,
    "cold": _cold,
    "chat": _chat,
    "equal": _equal,
    "short": _short,
    "shared": _shared,
    "pressure": _pressure,
}
"""By the number of seeds; the shortest first."""
