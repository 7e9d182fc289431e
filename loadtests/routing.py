"""``python -m loadtests.routing``: how well requests are routed, in simulated time.

The application's own prefix index, ledger and cost, and the engine's block pool and prefix index, around a
model that only takes time; against an oracle, an index that knows only what it routed, and routers without any.
Every assumption is in ``loadtests/experiments/routing/constants.py``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from loadtests.experiments.routing.progress import Part, simulate_parts
from loadtests.experiments.routing.scenarios import SCENARIOS
from loadtests.report import Figure, add_arguments, finish, print_table, save

COMMAND = "loadtests.routing"


def main(argv: list[str] | None = None) -> None:
    """Run the chosen scenarios, print their tables, draw their plots, hold the figures to their bars."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.routing", description="How well requests are routed, in simulated time."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SCENARIOS),
        metavar="SCENARIO",
        help=f"scenarios: {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--plot", metavar="DIR", type=Path, help="also draw the plots as PNG files into this folder"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at the same time (default: the cores)",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="only the first N seeds of each, for a quick look"
    )
    parser.add_argument(
        "--live", action="store_true", help="real Ray Serve on this machine instead; see --live --help"
    )
    parser.add_argument(
        "--replay", action="store_true", help="arrivals recorded by --live instead; see --replay --help"
    )
    add_arguments(parser)
    given = sys.argv[1:] if argv is None else argv
    if "--live" in given or "--replay" in given:  # these have options of their own
        module = "command" if "--live" in given else "replayed"
        rest = [word for word in given if word not in ("--live", "--replay")]
        importlib.import_module(f"loadtests.experiments.routing_live.{module}").main(rest)
        return
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    parts = {name: Part(name, SCENARIOS[name]()) for name in arguments.only or SCENARIOS}
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    if arguments.seeds is not None:
        for part in parts.values():
            part.scenario.runs = [run for run in part.scenario.runs if run.seed <= arguments.seeds]
    total = sum(len(part.scenario.runs) for part in parts.values())
    with tqdm(total=total, desc="routing", unit="run", disable=None) as bar:
        for part, run, summary, more in simulate_parts(parts, max(1, arguments.workers)):
            bar.update()
            now = time.monotonic() - began
            bar.write(
                f"{now:6.1f} s  {part.name}: {run.name}, {run.arm.value}, seed {run.seed}: "
                f"{summary.throughput:,.0f} tokens/s, hits {100 * summary.hit_rate:.1f} %, "
                f"TTFT p99 {summary.quantile(0.99):.3f} s, took {summary.took:.1f} s"
            )
            if more:
                _show(part, arguments)
                _save(parts, arguments)
            sys.stdout.flush()
    print(f"\n{time.monotonic() - began:.0f} s")
    finish(COMMAND, _figures(parts), arguments, seeds=_seeds(parts))


def _show(part: Part, arguments: argparse.Namespace) -> None:
    """What there is to say of one scenario so far; a run that is cut off later has said it."""
    findings = part.findings
    assert findings is not None
    partly = "" if part.complete else f" ({part.seeds} of {max(run.seed for run in part.scenario.runs)} seeds)"
    for table in findings.tables:
        print(f"\n{table.title}{partly}")
        print_table(table.header, table.rows)
        if table.note:
            print(f"({table.note})")
    for figure in findings.figures:
        print(figure.line())
    print()
    if arguments.plot is not None:
        from loadtests.experiments.memory.plots import draw

        for path in draw(findings.plots, arguments.plot):
            print(f"wrote {path}")


def _save(parts: dict[str, Part], arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        save(COMMAND, _figures(parts), arguments.json, seeds=_seeds(parts))


def _seeds(parts: dict[str, Part]) -> dict[str, int]:
    """How many are judged of each scenario."""
    return {part.name: part.seeds for part in parts.values()}


def _figures(parts: dict[str, Part]) -> list[Figure]:
    return [figure for part in parts.values() if part.findings for figure in part.findings.figures]


if __name__ == "__main__":
    main()
