"""``python -m loadtests.routing --replay FILE``: recorded live arrivals, routed in all ways in a simulation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing_live.oracle import replay
from loadtests.experiments.routing_live.recording import cached_share, read
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.stats import median

COMMAND = "loadtests.routing --replay"


def main(argv: Sequence[str]) -> None:
    """Replay each recording on a simulated fleet like its own, and print what was and what would have been."""
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="left by --live --record DIR")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        recordings = {path.name: read(path) for path in arguments.files}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    for name, one in recordings.items():
        rows.append((name, f"live: {one.fleet.arm}", f"{100 * one.cached_share:.1f}", f"{one.ttft:.2f}"))
        for arm in Arm:
            counted = one.fleet.counted(replay(one, arm))
            share = cached_share(counted)
            times = [record.ttft for record in counted]
            rows.append((name, f"simulated: {arm.value}", f"{100 * share:.1f}", f"{median(times):.2f}"))
            if arm is Arm.ORACLE:
                of = one.cached_share / share if share else 0.0
                figures.append(Figure(f"{name}: cached share of prompt tokens, of the oracle's", of))
    print_table(("recording", "routed by", "cached %", "TTFT p50 s"), rows)
    for figure in figures:
        print(figure.line())
    finish(COMMAND, figures, arguments, rows=rows)
