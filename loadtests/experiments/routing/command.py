"""``python -m loadtests.routing``: how well requests are routed, in simulated time.

The application's own prefix index, ledger and cost, and the engine's own scheduler, around a model that only
takes time; against an oracle, an index that knows only what it routed, and routers without any. Every
assumption is in ``loadtests/experiments/routing/constants.py``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import replace

from loadtests.experiments.routing.constants import SEEDS
from loadtests.experiments.routing.runs import simulate
from loadtests.experiments.routing.scenarios import SCENARIOS
from loadtests.in_processes import add_count, add_workers, in_processes
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
    figures: list[Figure] = []
    for name in arguments.only or SCENARIOS:
        scenario = SCENARIOS[name](arguments.seeds)
        findings = scenario.judge(in_processes(simulate, scenario.runs, arguments.workers))
        findings.show()
        named = [replace(figure, name=f"{name}: {figure.name}") for figure in findings.figures]
        print(*(figure.line() for figure in named), sep="\n", flush=True)
        figures += named
    print(f"\n{time.monotonic() - began:.0f} s")
    finish(COMMAND, figures, arguments, seeds=arguments.seeds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.routing", description="How well requests are routed, in simulated time."
    )
    names = f"scenarios: {', '.join(SCENARIOS)}"
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="SCENARIO", help=names)
    add_workers(parser)
    add_count(parser, "--seeds", 1, f"runs of each case; the full grid has {SEEDS}")
    live = "real Ray Serve on this machine instead; see --live --help"
    parser.add_argument("--live", action="store_true", help=live)
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
