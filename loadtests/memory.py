"""``python -m loadtests.memory``: how well KV memory is used, in simulated time.

The real scheduler, block pool and prefix index, with a model that only takes time, against contiguous
allocation as published: Orca with three ways to reserve, and padded static batches. Every assumption is in
``loadtests/experiments/memory/constants.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from loadtests.experiments.memory.block_sizes import run_block_sizes
from loadtests.experiments.memory.findings import Findings
from loadtests.experiments.memory.latency import run_latency
from loadtests.experiments.memory.recovery_runs import run_recovery
from loadtests.experiments.memory.saturation import run_saturation
from loadtests.experiments.memory.sharing_runs import run_beam, run_parallel, run_prefix
from loadtests.experiments.memory.trace_runs import run_trace
from loadtests.experiments.memory.traces import TraceError
from loadtests.report import Figure, add_arguments, finish, print_table

PARTS: dict[str, Callable[[], Findings]] = {
    "saturation": run_saturation,
    "latency": run_latency,
    "parallel": run_parallel,
    "beam": run_beam,
    "prefix": run_prefix,
    "blocks": run_block_sizes,
    "recovery": run_recovery,
}


def main(argv: list[str] | None = None) -> None:
    """Run the chosen parts, print their tables, draw their plots, hold the figures to their bars."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.memory", description="How well KV memory is used, in simulated time."
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"parts: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--plot", metavar="DIR", type=Path, help="also draw the plots as PNG files into this folder"
    )
    parser.add_argument(
        "--trace",
        metavar="PATH",
        type=Path,
        help="run recorded traffic (Azure's CSV or Mooncake's JSON lines), and only the parts of --only",
    )
    parser.add_argument(
        "--record-beams",
        action="store_true",
        help="search with the bundled model and store which beams went on",
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.record_beams:
        from loadtests.experiments.memory.recorder import record_beams  # loads a model

        record_beams()
        return
    began = time.monotonic()
    chosen = arguments.only or ([] if arguments.trace else list(PARTS))
    findings = []
    if arguments.trace:
        try:
            findings.append(run_trace(arguments.trace))
        except TraceError as error:
            sys.exit(f"error: {error}")
    findings += [PARTS[name]() for name in chosen]
    figures: list[Figure] = []
    for part in findings:
        figures += part.figures
        for table in part.tables:
            print(f"\n{table.title}")
            print_table(table.header, table.rows)
            if table.note:
                print(f"({table.note})")
    if arguments.plot is not None:
        from loadtests.experiments.memory.plots import draw

        for path in draw([plot for part in findings for plot in part.plots], arguments.plot):
            print(f"wrote {path}")
    print(f"\n{time.monotonic() - began:.0f} s")
    finish("loadtests.memory", figures, arguments)


if __name__ == "__main__":
    main()
