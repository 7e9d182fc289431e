"""``python -m loadtests.autoscaling``: how many replicas, and were they enough, in simulated time.

The function that production runs decides, beside Ray Serve's own policy and the usual rules, over a fleet that
is modelled: a rate of prefill, a step time, a pool, a time to start. Every assumption is in
``loadtests/autoscaling_experiment/constants.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from engine.errors import ConfigError
from loadtests.autoscaling_experiment.runs import Outcome
from loadtests.autoscaling_experiment.scenarios import TRACE_TIMES, Run, scenarios
from loadtests.in_processes import in_processes
from loadtests.report import Figure, add_arguments, finish, print_table

PARTS = tuple(scenarios(None, 1))


def main(argv: list[str] | None = None) -> None:
    """Run the chosen parts, print their tables, draw their plots, hold the figures to their bars."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.autoscaling", description="How many replicas, in simulated time."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"parts: {', '.join(PARTS)}")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="recorded arrivals (Azure's CSV or Mooncake's JSON lines) instead of a synthetic day",
    )
    parser.add_argument(
        "--times",
        type=int,
        default=TRACE_TIMES,
        metavar="N",
        help=f"each of its requests N times ({TRACE_TIMES})",
    )
    parser.add_argument("--plot", metavar="DIR", type=Path, help="also draw the plots as PNG files there")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time (default: the cores)",
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.times < 1 or arguments.workers < 1:
        parser.error("--times and --workers must be at least 1")
    chosen = {
        name: part
        for name, part in scenarios(arguments.trace, arguments.times).items()
        if name in (arguments.only or PARTS)
    }
    began = time.monotonic()
    runs = [run for part in chosen.values() for run in part.runs]
    outcomes: list[Outcome | None] = [None] * len(runs)
    ended = in_processes(Run.run, runs, min(arguments.workers, len(runs)))
    try:
        for place, outcome in tqdm(ended, total=len(runs), unit="run", disable=None):
            outcomes[place] = outcome
    except ConfigError as error:
        sys.exit(str(error))
    figures: list[Figure] = []
    plots = []
    for part in chosen.values():
        mine, outcomes = outcomes[: len(part.runs)], outcomes[len(part.runs) :]
        findings = part.judge([one for one in mine if one is not None])
        figures += findings.figures
        plots += findings.plots
        for table in findings.tables:
            print(f"\n{table.title}")
            print_table(table.header, table.rows)
            if table.note:
                print(f"({table.note})")
    if arguments.plot is not None:
        from loadtests.memory_experiment.plots import draw

        for path in draw(plots, arguments.plot):
            print(f"wrote {path}")
    print(f"\n{time.monotonic() - began:.0f} s")
    finish("loadtests.autoscaling", figures, arguments)


if __name__ == "__main__":
    main()
