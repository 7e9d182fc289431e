"""``python -m loadtests.routing``: how well requests are routed, in simulated time.

The application's own prefix index, ledger and cost, and the engine's own scheduler, around a model that only
takes time; against an oracle, an index that knows only what it routed, and routers without any. Every
assumption is in ``loadtests/experiments/routing/constants.py``.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from loadtests.experiments.routing.runs import simulate
from loadtests.experiments.routing.scenarios import SCENARIOS
from loadtests.report import WORKERS, Figure, finish, in_processes, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen scenarios, print the figures of each as it is complete, hold the figures to their bars."""
    given = sys.argv[1:] if argv is None else argv
    if "--live" in given:  # it has options of its own
        rest = [word for word in given if word != "--live"]
        importlib.import_module("loadtests.experiments.routing_live").main(rest)
        return
    options = {
        "--only": (SCENARIOS, "scenarios"),
        "--seeds": (1, "runs of each case; 3 to publish"),
        "--workers": WORKERS,
        "--live": (False, "real Ray Serve on this machine instead; see --live --help"),
    }
    arguments = parse("routing", __doc__, options, given)
    began = time.monotonic()
    figures: list[Figure] = []
    for name in arguments.only:
        scenario = SCENARIOS[name](arguments.seeds)
        found = scenario.judge(in_processes(simulate, scenario.runs, arguments.workers))
        named = [replace(figure, name=f"{name}: {figure.name}") for figure in found]
        print(f"\n{scenario.title}", *(figure.line() for figure in named), sep="\n", flush=True)
        figures += named
    print(f"\n{time.monotonic() - began:.0f} s")
    finish("loadtests.routing", figures, arguments, seeds=arguments.seeds)
