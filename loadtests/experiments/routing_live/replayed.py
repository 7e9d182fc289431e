"""``python -m loadtests.routing --replay FILE``: recorded live arrivals, routed in all ways in a simulation."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.fleet import Record
from loadtests.experiments.routing_live.oracle import replay
from loadtests.experiments.routing_live.recording import Recording, cached_share, read
from loadtests.report import Figure, add_arguments, finish, print_table

COMMAND = "loadtests.routing --replay"
HEADER = ("recording", "routed by", "cached %", "TTFT p50 s", "last end s")


def main(argv: Sequence[str]) -> None:
    """Replay each recording on a simulated fleet like its own, and print what was and what would have been."""
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="left by --live --record DIR")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        recordings = [read(path) for path in arguments.files]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    for path, recording in zip(arguments.files, tqdm(recordings, unit="recording", disable=None), strict=True):
        ends = [one.ended for one in recording.arrivals if one.ended is not None]
        live = f"{recording.ttft:.2f}", f"{max(ends, default=0.0):.1f}"
        rows.append((path.name, f"live: {recording.fleet.arm}", f"{100 * recording.cached_share:.1f}", *live))
        for arm in Arm:
            records = replay(recording, arm)
            rows.append((path.name, f"simulated: {arm.value}", *simulated(recording, records)))
            if arm is Arm.ORACLE:
                share = cached_share(recording.fleet.counted(records))
                of = recording.cached_share / share if share else 0.0
                figures.append(Figure(f"{path.name}: cached share of prompt tokens, of the oracle's", of))
    print_table(HEADER, rows)
    for figure in figures:
        print(figure.line())
    finish(COMMAND, figures, arguments, rows=rows)


def simulated(recording: Recording, records: Sequence[Record]) -> tuple[str, str, str]:
    """The last cells of a line of the table."""
    counted = recording.fleet.counted(records)
    times = [one.ttft for one in counted]
    return (
        f"{100 * cached_share(counted):.1f}",
        f"{statistics.median(times):.2f}" if times else "-",
        f"{max((one.last for one in records), default=0.0):.1f}",
    )
