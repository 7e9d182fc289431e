"""``python -m loadtests.memory``: how well KV memory is used, in simulated time.

The real scheduler, block pool and prefix index, with a model that only takes time, against contiguous
allocation: Orca with three ways to reserve, by the buddy allocator as published and by first fit. Every
assumption is in ``loadtests/experiments/memory/constants.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from loadtests.experiments.memory.contiguous_runs import run_saturation, run_trace
from loadtests.experiments.memory.recovery_runs import run_recovery
from loadtests.experiments.memory.sharing_runs import run_beam, run_parallel, run_prefix
from loadtests.experiments.memory.traces import TraceError
from loadtests.findings import Findings
from loadtests.report import Figure, add_arguments, finish

PARTS: dict[str, Callable[[], Findings]] = {
    "saturation": run_saturation,
    "parallel": run_parallel,
    "beam": run_beam,
    "prefix": run_prefix,
    "recovery": run_recovery,
}


def main(argv: list[str] | None = None) -> None:
    """Run the chosen parts, print a table of each as it ends, hold the figures to their bars."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.memory", description="How well KV memory is used, in simulated time."
    )
    parts = f"parts: {', '.join(PARTS)}"
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=parts)
    parser.add_argument(
        "--trace",
        metavar="PATH",
        type=Path,
        help="run recorded traffic (Azure's CSV or Mooncake's JSON lines), and only the parts of --only",
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    runs = [PARTS[name] for name in arguments.only or ([] if arguments.trace else PARTS)]
    if arguments.trace:
        runs.insert(0, partial(run_trace, arguments.trace))
    figures: list[Figure] = []
    for run in runs:
        began = time.monotonic()
        try:
            findings = run()
        except TraceError as error:
            sys.exit(f"error: {error}")
        figures += findings.figures
        findings.show()
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    finish("loadtests.memory", figures, arguments)


if __name__ == "__main__":
    main()
