"""``python -m loadtests.autoscaling``: how many replicas, and were they enough, in simulated time.

The function that production runs decides over a modeled fleet (prefill rate, step time, pool, startup time),
beside Ray Serve's own policy and a clairvoyant fleet, which knows what comes within the time that a replica
takes to start. Ours and Ray's are at their defaults and at the best of some of their settings for each load.
Every assumption is in ``loadtests/experiments/autoscaling/constants.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError
from loadtests.experiments.autoscaling import workloads
from loadtests.experiments.autoscaling.constants import TRACE_TIMES
from loadtests.experiments.autoscaling.scenarios import Judgment, Match, most_stopped, scenarios
from loadtests.report import WORKERS, finish, in_processes, parse, print_figures


def main(argv: Sequence[str] | None = None) -> None:
    options = {
        "--only": (scenarios(None, 1), "parts"),
        "--trace": ("", "Azure's CSV, for the synthetic day"),
        "--times": (TRACE_TIMES, "each of its requests so many times"),
        "--seeds": (1, "runs of kv-bound; 3 to publish"),
        "--workers": WORKERS,
    }
    arguments = parse("autoscaling", __doc__, options, argv)
    trace = Path(arguments.trace) if arguments.trace else None
    if trace is not None:
        if "recorded" not in arguments.only:
            sys.exit("--trace is read by the part recorded only")
        try:  # before minutes of other parts
            workloads.trace(trace, arguments.times, 1)
        except ConfigError as error:
            sys.exit(str(error))
    parts = scenarios(trace, arguments.times, arguments.seeds)
    began = time.monotonic()
    every, outcomes = Judgment(), []
    for name in arguments.only:
        ended = in_processes(Match.run, parts[name].matches, arguments.workers)
        judgment = parts[name].judge(ended)
        print_figures(name, judgment.figures)
        every.figures += judgment.figures
        outcomes += ended
    every.figures.append(most_stopped(outcomes))
    print(f"\n{time.monotonic() - began:.0f} s")
    finish("loadtests.autoscaling", every.figures, arguments)
