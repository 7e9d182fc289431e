"""In which order the runs of the routing experiment are made, and what is said before all are done."""

from __future__ import annotations

import pytest

from loadtests.experiments.routing import progress
from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import Served, Shape
from loadtests.experiments.routing.progress import Part, simulate_parts
from loadtests.experiments.routing.runs import Run, Summary, simulate
from loadtests.experiments.routing.scenarios import SCENARIOS, Results, Scenario
from loadtests.findings import Findings
from loadtests.report import Figure

SHAPE = Shape(groups=2, system=64, questions=0, question=16, output=4)
LOAD = Served(replicas=2, blocks=64, rate=5.0, warm_up=0.5, seconds=1.0)


def part(name: str, seeds: int) -> Part:
    def judge(results: Results) -> Findings:
        runs = sum(len(summaries) for summaries in results.values())
        return Findings(figures=[Figure(f"{name}: runs", runs)])

    arms = (Arm.PREFIX, Arm.ROUND_ROBIN)
    runs = [Run(name, "shared", SHAPE, LOAD, arm, seed) for arm in arms for seed in range(1, seeds + 1)]
    return Part(name, Scenario(runs, judge))


def test_the_first_seed_of_all_comes_first_and_is_judged_by_itself() -> None:
    parts = {name: part(name, 2) for name in ("a", "b")}
    order = []
    judged = []
    for one, run, _, more in simulate_parts(parts, 1):
        order.append((one.name, run.seed))
        if more:
            assert one.findings is not None
            judged.append((one.name, one.seeds, one.complete, one.findings.figures[0].value))
    assert order == [("a", 1)] * 2 + [("b", 1)] * 2 + [("b", 2)] * 2 + [("a", 2)] * 2
    assert judged == [("a", 1, False, 2), ("b", 1, False, 2), ("b", 2, True, 4), ("a", 2, True, 4)]


def test_a_request_that_has_not_ended_is_counted() -> None:
    one = part("a", 1)
    summaries = {run: simulate(run) for run in one.scenario.runs}
    for run, summary in summaries.items():
        summary.unfinished = 3 if run.arm is Arm.PREFIX else 0
        one.add(run, summary)
    assert one.findings is not None
    lost = one.findings.figures[-1]
    assert (lost.value, lost.holds) == (3, False)


def test_every_run_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []

    def nothing(runs: list[Run], workers: int) -> list[tuple[int, Summary]]:
        made.extend(runs)
        return []

    monkeypatch.setattr(progress, "simulate_all", nothing)
    parts = {name: Part(name, make()) for name, make in SCENARIOS.items()}
    assert list(simulate_parts(parts, 4)) == []
    assert len(made) == len(set(made)) == sum(len(one.scenario.runs) for one in parts.values())
