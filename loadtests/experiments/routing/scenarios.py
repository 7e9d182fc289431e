"""The scenarios: which runs each needs, and the figures that follow from them, with their bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.experiments.routing import constants as given
from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import Served, Shape
from loadtests.experiments.routing.runs import Run, Summary, merge
from loadtests.findings import Findings, Plot, Table
from loadtests.report import Figure

Results = dict[tuple[str, Arm], list[Summary]]
"""By the name of the runs and their arm, one for each seed."""


@dataclass(slots=True)
class Scenario:
    """A named part of the experiment."""

    runs: list[Run]
    judge: Callable[[Results], Findings]


def _seeds(name: str, workload: str, shape: Shape, load: Served, arms: Sequence[Arm], **more: int) -> list[Run]:
    saturated = bool(more.pop("saturated", False))
    seeds = range(1, more.pop("seeds", len(given.SEEDS)) + 1)
    return [Run(name, workload, shape, load, arm, seed, saturated, **more) for arm in arms for seed in seeds]


def _saturated(shape: Shape, ratio: float) -> Served:
    rate = given.saturating_rate(shape, given.REPLICAS)
    blocks = shape.blocks(ratio, given.REPLICAS)
    return Served(given.REPLICAS, blocks, rate, 0.0, given.RAMP_SECONDS)


def table(title: str, results: Results, note: str = "") -> Table:
    """All runs of a scenario, the seeds of each together."""
    rows = []
    for (name, arm), summaries in results.items():
        one = merge(summaries)
        rows.append(
            (
                f"{name}: {arm.value}",
                f"{one.throughput:,.0f}{'' if one.filled else ' or more'}",
                f"{100 * one.hit_rate:.1f}",
                f"{1e3 * one.itl:.1f}",
                f"{one.quantile(0.5):.3f}",
                f"{one.quantile(0.99):.3f}",
                f"{one.balance:.2f}",
                f"{one.preemptions:.0f}",
            )
        )
    header = ("runs", "tokens/s", "hit %", "ITL ms", "TTFT p50 s", "p99 s", "busiest/mean", "preempted")
    return Table(title, header, tuple(rows), note)


def _bars(name: str, title: str, results: Results) -> Plot:
    arms = [arm.value for _, arm in results]
    heights = tuple(merge(summaries).throughput for summaries in results.values())
    places = tuple(map(float, range(len(arms))))
    return Plot(name, title, "", "generated tokens/s", {"tokens/s": (places, heights)}, tuple(arms))


def _curves(name: str, title: str, results: Results, kind: str | None = None) -> Plot:
    """How long the first token takes, for all shares of the requests; the seeds of each arm together."""
    shares = tuple(i / 200 for i in range(200))
    series = {}
    for (_, arm), summaries in results.items():
        one = merge(summaries)
        times = tuple(one.quantile(share, kind) for share in shares)
        series[arm.value] = (times, tuple(100 * share for share in shares))
    return Plot(name, title, "seconds to the first token", "percent of requests", series, y_max=100)


SHARED_NAME = "at saturation"
SERVED_NAME = "at a rate that round robin serves"


def _shared() -> Scenario:
    load = _saturated(given.SHARED, given.RATIO)
    served = Served(
        given.REPLICAS,
        load.blocks,
        given.SERVED_SHARE * load.rate,
        given.SERVED_WARM_UP,
        given.SERVED_WINDOW,
    )
    runs = _seeds(SHARED_NAME, "shared", given.SHARED, load, tuple(Arm), saturated=1)
    runs += _seeds(SERVED_NAME, "shared", given.SHARED, served, (Arm.PREFIX, Arm.ROUND_ROBIN))

    def judge(results: Results) -> Findings:
        one = {arm: merge(summaries) for (name, arm), summaries in results.items() if name == SHARED_NAME}
        ours, oracle, turns = one[Arm.PREFIX], one[Arm.ORACLE], one[Arm.ROUND_ROBIN]
        slow, fast = (merge(results[SERVED_NAME, arm]) for arm in (Arm.PREFIX, Arm.ROUND_ROBIN))
        title = "System prompts of Zipf's popularity, working set 73 % of the fleet's KV memory"
        return Findings(
            [table(title, results)],
            [
                Figure("shared: throughput, of the oracle's", ours.throughput / oracle.throughput, "", 0.97),
                Figure("shared: hit rate, of the oracle's", ours.hit_rate / oracle.hit_rate, "", 0.97),
                Figure("shared: throughput over round robin", ours.throughput / turns.throughput, "x", 2.2),
                Figure(
                    "shared: oracle's throughput over round robin", oracle.throughput / turns.throughput, "x"
                ),
                Figure("shared: ITL at saturation, of the oracle's", ours.itl / oracle.itl, "", 1.05, True),
                Figure("shared: ITL at saturation, of round robin's", ours.itl / turns.itl),
                Figure("shared: ITL at a served rate, of round robin's", slow.itl / fast.itl, "", 1.05, True),
            ],
            [_bars("routing-shared", title, {k: v for k, v in results.items() if k[0] == SHARED_NAME})],
        )

    return Scenario(runs, judge)


def _equal() -> Scenario:
    load = _saturated(given.EQUAL, given.RATIO)
    arms = (Arm.PREFIX, Arm.ORACLE, Arm.ROUND_ROBIN)
    runs = _seeds(SHARED_NAME, "shared", given.EQUAL, load, arms, saturated=1, seeds=1)
    pressed, full = (
        f"1.3 times the memory, {given.INGRESSES} ingresses",
        _saturated(given.EQUAL, given.PRESSURE_RATIO),
    )
    others = (Arm.PREFIX, Arm.ORACLE, Arm.APPROXIMATE)
    runs += _seeds(
        pressed, "shared", given.EQUAL, full, others, saturated=1, seeds=1, ingresses=given.INGRESSES
    )

    def judge(results: Results) -> Findings:
        ours, oracle, turns = (merge(results[SHARED_NAME, arm]) for arm in arms)
        here, best, tree = (merge(results[pressed, arm]) for arm in others)
        return Findings(
            [
                table(
                    "The same, all system prompts equally popular as in the published measurements",
                    results,
                    "published at 73 %: 8,730 to 14,900 tokens/s with an exact index, 4,300 to 7,000 with none",
                )
            ],
            [
                Figure("equal: throughput over round robin", ours.throughput / turns.throughput, "x"),
                Figure(
                    "equal: oracle's throughput over round robin", oracle.throughput / turns.throughput, "x"
                ),
                Figure("equal: pressure, throughput over the tree", here.throughput / tree.throughput, "x"),
                Figure("equal: pressure, oracle over the tree", best.throughput / tree.throughput, "x"),
            ],
        )

    return Scenario(runs, judge)


def _short() -> Scenario:
    load = _saturated(given.SHORT, given.RATIO)
    runs = _seeds(SHARED_NAME, "shared", given.SHORT, load, (Arm.PREFIX, Arm.ORACLE), saturated=1)

    def judge(results: Results) -> Findings:
        ours, oracle = (merge(results[SHARED_NAME, arm]) for arm in (Arm.PREFIX, Arm.ORACLE))
        return Findings(
            [table("The same with questions of 100 tokens", results)],
            [
                Figure("short: throughput, of the oracle's", ours.throughput / oracle.throughput, "", 0.97),
                Figure("short: hit rate, of the oracle's", ours.hit_rate / oracle.hit_rate, "", 0.97),
            ],
        )

    return Scenario(runs, judge)


def _pressure() -> Scenario:
    load = _saturated(given.SHARED, given.PRESSURE_RATIO)
    one, many = "1 ingress", f"{given.INGRESSES} ingresses"
    runs = _seeds(
        many,
        "shared",
        given.SHARED,
        load,
        (Arm.PREFIX, Arm.APPROXIMATE),
        saturated=1,
        ingresses=given.INGRESSES,
    )
    runs += _seeds(one, "shared", given.SHARED, load, (Arm.PREFIX, Arm.ORACLE), saturated=1)

    def judge(results: Results) -> Findings:
        ours, tree = (merge(results[many, arm]) for arm in (Arm.PREFIX, Arm.APPROXIMATE))
        alone, oracle = (merge(results[one, arm]) for arm in (Arm.PREFIX, Arm.ORACLE))
        lost = 100 * (alone.hit_rate - ours.hit_rate)
        return Findings(
            [table("Working set 1.3 times the fleet's KV memory", results)],
            [
                Figure("pressure: throughput over the tree", ours.throughput / tree.throughput, "x", 1.5),
                Figure("pressure: oracle over the tree", oracle.throughput / tree.throughput, "x"),
                Figure("pressure: hit rate lost with 4 ingresses", lost, " points", 2.0, True),
            ],
        )

    return Scenario(runs, judge)


def _hot() -> Scenario:
    arms = (Arm.PREFIX, Arm.LEAST_TOKENS, Arm.ROUND_ROBIN, Arm.ORACLE)
    runs = _seeds("served", "shared, lengths vary", given.HOT, given.HOT_RUN, arms)

    def judge(results: Results) -> Findings:
        ours, least, turns, oracle = (merge(results["served", arm]).quantile(0.99) for arm in arms)
        return Findings(
            [table("One system prompt for all", results)],
            [
                Figure("hot: TTFT p99, of the better of both", ours / min(least, turns), "", 1.03, True),
                Figure("hot: oracle's TTFT p99, of the better of both", oracle / min(least, turns)),
            ],
            [_curves("routing-hot", "One system prompt for all", results)],
        )

    return Scenario(runs, judge)


def _unique() -> Scenario:
    arms = (Arm.PREFIX, Arm.LEAST_TOKENS)
    load = given.UNIQUE_RUN
    full = Served(load.replicas, load.blocks, 2 * load.rate, 0.0, given.RAMP_SECONDS / 2)
    runs = _seeds("served", "unshared", given.UNIQUE, load, arms)
    runs += _seeds(SHARED_NAME, "unshared", given.UNIQUE, full, arms, saturated=1)

    def judge(results: Results) -> Findings:
        ours, least = (merge(results["served", arm]).quantile(0.99) for arm in arms)
        fast, slow = (merge(results[SHARED_NAME, arm]).throughput for arm in arms)
        return Findings(
            [table("No two prompts begin alike", results)],
            [
                Figure("unique: throughput, of least tokens'", fast / slow, "", 0.99),
                Figure("unique: TTFT p99, of least tokens'", ours / least, "", 1.02, True),
            ],
        )

    return Scenario(runs, judge)


def _cold() -> Scenario:
    arms = (Arm.PREFIX, Arm.COUNT, Arm.LEAST_TOKENS)
    runs = _seeds("served", "mixed", given.COLD_SHORT, given.COLD_RUN, arms)

    def judge(results: Results) -> Findings:
        ours, count, least = (merge(results["served", arm]).quantile(0.99, "short") for arm in arms)
        return Findings(
            [table("One prompt in twenty is cold and has 16,000 to 32,000 tokens", results)],
            [
                Figure("cold: TTFT p99 of short prompts", ours, " s"),
                Figure("cold: short prompts' TTFT p99, of counting requests", ours / count, "", 0.5, True),
                Figure("cold: short prompts' TTFT p99, of least tokens'", ours / least),
            ],
            [_curves("routing-cold", "Short prompts among a few long cold ones", results, "short")],
        )

    return Scenario(runs, judge)


def _burst() -> Scenario:
    load = Served(given.BURST_REPLICAS, 19_264, 0.0, 0.0, given.BURST_SECONDS)
    names = ("burst of distinct prefixes", "burst of one prefix")
    heavy = "burst of one shorter prefix"
    runs = [
        run
        for name in names
        for run in _seeds(name, name, given.BURST_SHAPE, load, (Arm.PREFIX,), seeds=given.BURST_TRIALS)
    ]
    runs += _seeds(heavy, names[1], given.BURST_HEAVY, load, (Arm.PREFIX,), seeds=given.BURST_TRIALS)

    def judge(results: Results) -> Findings:
        distinct, one, small = (results[name, Arm.PREFIX] for name in (*names, heavy))
        return Findings(
            [table("64 requests in 5 ms on four idle replicas", results)],
            [
                Figure(
                    "burst: distinct prefixes, busiest/mean", max(s.balance for s in distinct), "", 1.15, True
                ),
                Figure("burst: one cold prefix, replicas", max(s.replicas_used for s in one), "", 2, True),
                Figure("burst: one shorter cold prefix, replicas", max(s.replicas_used for s in small)),
            ],
        )

    return Scenario(runs, judge)


def _chat() -> Scenario:
    arms = (Arm.PREFIX, Arm.LEAST_TOKENS)
    runs = _seeds("served", "conversations", given.CHAT, given.CHAT_RUN, arms[:1])
    runs += _seeds("served", "conversations", given.CHAT, given.CHAT_RUN, arms[1:], seeds=1)

    def judge(results: Results) -> Findings:
        ours = merge(results["served", Arm.PREFIX])
        return Findings(
            [table("Conversations of eight turns", results)],
            [
                Figure("chat: follow-ups to the same replica", 100 * ours.kept, " %", 98.0),
                Figure("chat: their tokens cached", 100 * ours.kept_tokens, " %", 94.0),
            ],
        )

    return Scenario(runs, judge)


def _scale() -> Scenario:
    load = given.SCALE_RUN
    runs = _seeds("served", "shared, lengths vary", given.SCALE, load, (Arm.PREFIX,), first=given.SCALE_FIRST)

    def judge(results: Results) -> Findings:
        least = min(
            _share(summary, load, place)
            for summary in results["served", Arm.PREFIX]
            for place in range(given.SCALE_FIRST, load.replicas)
        )
        return Findings(
            [table("Two replicas join two others under load", results)],
            [Figure("scale: least new replica's share after 20 s, of a fair one", 100 * least, " %", 80.0)],
        )

    return Scenario(runs, judge)


def _share(summary: Summary, load: Served, place: int) -> float:
    """Of the requests routed in a window that ends ``SCALE_LIMIT`` after the join, times the replicas."""
    end = load.warm_up + given.SCALE_LIMIT
    routed = [at for when, at in summary.choices if end - given.SCALE_WINDOW <= when < end]
    return routed.count(place) * load.replicas / len(routed)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
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
"""Those that take least time first."""
