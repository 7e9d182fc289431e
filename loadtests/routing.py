"""``python -m loadtests.routing``: how well requests are routed, in simulated time.

The application's own prefix index, ledger and cost, and the engine's block pool and prefix index, around a
model that only takes time; against an oracle, an index that knows only what it routed, and routers without any.
Every assumption is in ``loadtests/routing_experiment/constants.py``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from loadtests.memory_experiment.findings import Findings
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.routing_experiment.runs import Run, Summary, simulate_all
from loadtests.routing_experiment.scenarios import SCENARIOS, Results, Scenario


def main(argv: list[str] | None = None) -> None:
    """Run the chosen scenarios, print their tables, draw their plots, hold the figures to their bars."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.routing", description="How well requests are routed, in simulated time."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SCENARIOS),
        metavar="SCENARIO",
        help=f"scenarios: {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--plot", metavar="DIR", type=Path, help="also draw the plots as PNG files into this folder"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at the same time (default: the cores)",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="only the first N seeds of each, for a quick look"
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    scenarios = {name: SCENARIOS[name]() for name in arguments.only or SCENARIOS}
    if arguments.seeds is not None:
        for scenario in scenarios.values():
            scenario.runs = [run for run in scenario.runs if run.seed <= max(1, arguments.seeds)]
    findings = run_all(scenarios, max(1, arguments.workers))
    figures: list[Figure] = []
    for part in findings.values():
        figures += part.figures
        for table in part.tables:
            print(f"\n{table.title}")
            print_table(table.header, table.rows)
            if table.note:
                print(f"({table.note})")
    if arguments.plot is not None:
        from loadtests.memory_experiment.plots import draw

        for path in draw([plot for part in findings.values() for plot in part.plots], arguments.plot):
            print(f"wrote {path}")
    print(f"\n{time.monotonic() - began:.0f} s")
    finish("loadtests.routing", figures, arguments)


def run_all(scenarios: dict[str, Scenario], workers: int) -> dict[str, Findings]:
    """All runs of all scenarios, in one pool of processes, and what follows from each scenario's."""
    runs = [run for scenario in scenarios.values() for run in scenario.runs]
    with tqdm(total=len(runs), desc="routing", unit="run", disable=None) as bar:
        summaries = simulate_all(runs, min(workers, len(runs)), bar.update)
    findings = {}
    for name, scenario in scenarios.items():
        mine, summaries = summaries[: len(scenario.runs)], summaries[len(scenario.runs) :]
        part = findings[name] = scenario.judge(_by_arm(scenario.runs, mine))
        lost = sum(one.unfinished for run, one in zip(scenario.runs, mine, strict=True) if not run.saturated)
        part.figures.append(Figure(f"{name}: requests without an end", lost, "", 0, True))
    return findings


def _by_arm(runs: Sequence[Run], summaries: Sequence[Summary]) -> Results:
    results: Results = {}
    for run, summary in zip(runs, summaries, strict=True):
        results.setdefault((run.name, run.arm), []).append(summary)
    return results


if __name__ == "__main__":
    main()
