"""``python -m loadtests.autoscaling``: how many replicas, and were they enough, in simulated time.

The function that production runs decides over a modeled fleet (prefill rate, step time, pool, startup time),
beside Ray Serve's own policy at its defaults and swept over its settings, and beside the plain occupancy rule.
Every assumption is in ``loadtests/experiments/autoscaling/constants.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.errors import ConfigError
from loadtests.experiments.autoscaling import workloads
from loadtests.experiments.autoscaling.comparison import overview
from loadtests.experiments.autoscaling.constants import TRACE_TIMES
from loadtests.experiments.autoscaling.scenarios import Judgement, Match, most_stopped, scenarios
from loadtests.in_processes import add_count, add_workers, in_processes
from loadtests.report import add_arguments, finish

PARTS = tuple(scenarios(None, 1))


def main(argv: list[str] | None = None) -> None:
    """Run the chosen parts, print their tables, hold the figures to their bars."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    names = arguments.only or PARTS
    if arguments.trace is not None:
        if "recorded" not in names:
            parser.error("--trace is read by the part recorded only")
        try:  # before minutes of other parts
            workloads.trace(arguments.trace, arguments.times, 1)
        except ConfigError as error:
            sys.exit(str(error))
    parts = scenarios(arguments.trace, arguments.times)
    began = time.monotonic()
    every, outcomes = Judgement(), []
    for name in names:
        ended = in_processes(Match.run, parts[name].matches, arguments.workers)
        judgement = parts[name].judge(ended)
        judgement.show()
        every.figures += judgement.figures
        every.comparisons += judgement.comparisons
        outcomes += ended
    if len(every.comparisons) > 1:
        every.tables.append(overview(every.comparisons))
    every.show()
    every.figures.append(most_stopped(outcomes))
    print(f"\n{time.monotonic() - began:.0f} s")
    finish("loadtests.autoscaling", every.figures, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.autoscaling", description="How many replicas, in simulated time."
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, metavar="PART", help=f"parts: {', '.join(PARTS)}")
    add("--trace", type=Path, metavar="PATH", help="Azure's CSV or Mooncake's JSON lines, for a synthetic day")
    add_count(parser, "--times", TRACE_TIMES, "each of its requests N times")
    add_workers(parser)
    add_arguments(parser)
    return parser
