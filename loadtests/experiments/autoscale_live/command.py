"""``python -m loadtests.autoscale_live``: does the fleet follow its load, on a real local Ray Serve?

Twenty streams run all the time. Clients come until their requests need two replicas' KV memory, then three, and
leave again; meanwhile Serve's controller is killed. Each request holds one block of a small pool, so memory
decides: replicas that share two cores are not faster. Then a fleet without any replica gets a request.
"""

from __future__ import annotations

import argparse
import time

from loadtests.experiments.autoscale_live.judge import figures
from loadtests.experiments.autoscale_live.plan import FULL, OPTIONS, QUICK
from loadtests.experiments.autoscale_live.stage import Stage
from loadtests.experiments.fleet import started
from loadtests.report import Figure, add_arguments, finish, print_figures


def main(argv: list[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.autoscale_live",
        description="Does the fleet follow its load, on real Ray Serve?",
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter, with less time after the controller's end"
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {what}", flush=True)

    say("starting Ray")
    with started() as cluster:
        stage = Stage(cluster, QUICK if arguments.quick else FULL, say)
        run = stage.run()
        found = figures(run)
        found += stage.from_zero()
    found.append(Figure("whole command", time.monotonic() - began, " s"))
    print_figures("what", found)
    events = [[at - run.began, name] for at, name in run.events]
    finish("loadtests.autoscale_live", found, arguments, options=OPTIONS, events=events)
