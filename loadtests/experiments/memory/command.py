"""``python -m loadtests.memory``: how well KV memory is used, in simulated time.

The real scheduler, block pool and prefix index, with a model that only takes time, against contiguous
allocation: Orca with three ways to reserve, by the buddy allocator as published and by first fit. Every
assumption is in ``loadtests/experiments/memory/constants.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from loadtests.experiments.memory.contiguous_runs import run_saturation
from loadtests.experiments.memory.recovery_runs import run_recovery
from loadtests.experiments.memory.sharing_runs import run_beam, run_parallel, run_prefix
from loadtests.report import Figure, Findings, finish, parse

PARTS: dict[str, Callable[[], Findings]] = {
    "saturation": run_saturation,
    "parallel": run_parallel,
    "beam": run_beam,
    "prefix": run_prefix,
    "recovery": run_recovery,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen parts, print a table of each as it ends, hold the figures to their bars."""
    arguments = parse("memory", __doc__, {"--only": (PARTS, "parts")}, argv)
    figures: list[Figure] = []
    for name in arguments.only:
        began = time.monotonic()
        findings = PARTS[name]()
        figures += findings.figures
        findings.show()
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    finish("loadtests.memory", figures, arguments)
