"""``python -m loadtests.routing``: how well requests are routed, in simulated time.

The application's own prefix index, ledger and cost, and the engine's own scheduler, around a model that only
takes time; against an oracle, an index that knows only what it routed, and routers without any. Every
assumption is in ``loadtests/experiments/routing/constants.py``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from dataclasses import replace

from tqdm import tqdm

from loadtests.experiments.routing.constants import SEEDS
from loadtests.experiments.routing.runs import Summary, simulate
from loadtests.experiments.routing.scenarios import SCENARIOS
from loadtests.findings import Findings
from loadtests.in_processes import in_processes
from loadtests.report import Figure, add_arguments, finish

COMMAND = "loadtests.routing"


def main(argv: list[str] | None = None) -> None:
    """Run the chosen scenarios, print a table of each as it is complete, hold the figures to their bars."""
    given = sys.argv[1:] if argv is None else argv
    if "--live" in given:  # it has options of its own
        rest = [word for word in given if word != "--live"]
        importlib.import_module("loadtests.experiments.routing_live.command").main(rest)
        return
    arguments = _parser().parse_args(given)
    began = time.monotonic()
    chosen = {name: SCENARIOS[name](arguments.seeds) for name in arguments.only or SCENARIOS}
    names = [name for name, scenario in chosen.items() for _ in scenario.runs]
    runs = [run for scenario in chosen.values() for run in scenario.runs]
    summaries: dict[int, Summary] = {}
    figures: list[Figure] = []
    waiting = list(chosen.items())
    start = 0  # of the first scenario that is not complete
    with tqdm(total=len(runs), desc="routing", unit="run", disable=None) as bar:
        for place, summary in in_processes(simulate, runs, min(arguments.workers, len(runs))):
            summaries[place] = summary
            bar.update()
            run = runs[place]
            bar.write(
                f"{time.monotonic() - began:6.1f} s  {names[place]}: {run.name}, {run.arm.value}, seed "
                f"{run.seed}: {summary.throughput:,.0f} tokens/s, hits {100 * summary.hit_rate:.1f} %, "
                f"TTFT p99 {summary.quantile(0.99):.3f} s, took {summary.took:.1f} s"
            )
            sys.stdout.flush()
            while waiting and all(start + i in summaries for i in range(len(waiting[0][1].runs))):
                name, scenario = waiting.pop(0)
                end = start + len(scenario.runs)
                figures += _show(name, scenario.judge([summaries[i] for i in range(start, end)]))
                start = end
    print(f"\n{time.monotonic() - began:.0f} s")
    finish(COMMAND, figures, arguments, seeds=arguments.seeds)


def _show(name: str, findings: Findings) -> list[Figure]:
    """Print what one scenario has shown, and return its figures under its name."""
    findings.show()
    figures = [replace(figure, name=f"{name}: {figure.name}") for figure in findings.figures]
    for figure in figures:
        print(figure.line())
    print(flush=True)
    return figures


def _parser() -> argparse.ArgumentParser:
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
        "--workers",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at the same time (default: the cores)",
    )
    parser.add_argument(
        "--seeds",
        type=_positive,
        default=1,
        metavar="N",
        help=f"runs of each case (default: 1; the full grid has {SEEDS})",
    )
    parser.add_argument(
        "--live", action="store_true", help="real Ray Serve on this machine instead; see --live --help"
    )
    add_arguments(parser)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    main()
