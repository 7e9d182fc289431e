"""Recorded prompts in bursts with long lulls, with and without what the autoscaler learns of bursts.

``python -m tests.recorded_bursts TRACE`` (Azure's CSV): its prompts of 1,000 tokens and more, simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from app.autoscaling.bursts import Bursts
from loadtests.experiments.autoscaling import workloads
from loadtests.experiments.autoscaling.constants import TRACE_TIMES
from loadtests.experiments.autoscaling.policies import KvDemand
from loadtests.experiments.autoscaling.runs import Outcome, simulate
from loadtests.experiments.autoscaling.workloads import Workload
from loadtests.report import WORKERS, Figure, finish, in_processes, parse

LEAST_TOKENS = 1_000
BURST_S = 90.0
FIRST = 2
"""Replicas at the start."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one process simulates."""

    trace: Path
    times: int
    bursts: int
    lull_s: float
    learns: bool


class NothingLearned(Bursts):
    """Keeps nothing for a burst that may return."""

    def kept(self, now: float) -> float:
        return 0.0


def in_bursts(load: Workload, bursts: int, lull_s: float) -> Workload:
    """The long prompts of ``load``, cut every ``BURST_S``, with a lull after each piece."""
    long = load.prompt >= LEAST_TOKENS
    number = load.arrival[long] // BURST_S
    kept = number < bursts
    arrival = (load.arrival[long] + number * lull_s)[kept]
    seconds = bursts * (BURST_S + lull_s)
    return replace(
        load, arrival=arrival, prompt=load.prompt[long][kept], output=load.output[long][kept], seconds=seconds
    )


def simulated(run: Run) -> Outcome:
    load = in_bursts(workloads.trace(run.trace, run.times, 1), run.bursts, run.lull_s)
    policy = KvDemand()
    if not run.learns:
        policy._state.bursts = NothingLearned()
    return simulate(load, policy, FIRST)


def main() -> None:
    options = {
        "trace": ("", "Azure's CSV"),
        "--times": (TRACE_TIMES, "each of its requests so many times"),
        "--bursts": (12, f"of {BURST_S:g} s"),
        "--lulls": ([180.0, 420.0, 900.0], "seconds between two bursts"),
        "--workers": WORKERS,
    }
    arguments = parse("tests.recorded_bursts", __doc__, options)
    runs = [
        Run(Path(arguments.trace), arguments.times, arguments.bursts, lull_s, learns)
        for lull_s in arguments.lulls
        for learns in (True, False)
    ]
    figures = []
    for run, outcome in zip(runs, in_processes(simulated, runs, arguments.workers), strict=True):
        name = f"lulls of {run.lull_s:g} s{'' if run.learns else ', nothing kept'}"
        figures += [
            Figure(f"{name}: in time", 100 * outcome.served, "%"),
            Figure(f"{name}: replica-hours", outcome.replica_hours),
        ]
    finish("tests.recorded_bursts", figures, arguments, "recorded bursts")


if __name__ == "__main__":
    main()
