"""``python -m loadtests.memory``: how well KV memory is used, in simulated time.

The real scheduler, block pool and prefix index, with a model that only takes time, against contiguous
allocation: Orca with three ways to reserve, by the buddy allocator as published and by first fit. Every
assumption is in ``loadtests/experiments/memory/constants.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from loadtests.experiments.memory.parts import beam, parallel, prefix, recovery, saturation
from loadtests.report import Figure, finish, parse, print_figures

PARTS: dict[str, Callable[[], list[Figure]]] = {
    part.__name__: part for part in (saturation, parallel, beam, prefix, recovery)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen parts, print the figures of each as it ends, hold the figures to their bars."""
    arguments = parse("memory", __doc__, {"--only": (PARTS, "parts")}, argv)
    figures: list[Figure] = []
    for name in arguments.only:
        began = time.monotonic()
        found = PARTS[name]()
        print_figures(name, found)
        figures += found
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    finish("loadtests.memory", figures, arguments)
