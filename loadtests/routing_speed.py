"""``python -m loadtests.routing_speed``: the time of one routing decision, and of taking KV events in.

Runs the benchmarks of ``loadtests/benchmarks``, of which each says what it times, and holds their figures to
their bars.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.report import Figure, add_arguments, finish, print_table

BENCHMARKS = Path(__file__).parent / "benchmarks"
UNITS = {"p50_us": " µs", "p99_us": " µs", "records_per_s": "/s"}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmarks, print a table, hold the figures to their bars."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.routing_speed", description="How long a routing decision takes."
    )
    parser.add_argument("--only", metavar="WORDS", help="benchmarks whose names have these, as pytest's -k")
    parser.add_argument(
        "--thread-time",
        action="store_true",
        help="count the thread's own time alone: for a machine that does other work at the same time",
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    benchmarks = run(arguments.only, arguments.thread_time)
    print_table(
        ("benchmark", "rounds", "min µs", "p50 µs", "p99 µs"),
        [row(benchmark) for benchmark in benchmarks],
    )
    finish(
        "loadtests.routing_speed",
        figures(benchmarks),
        arguments,
        timer="thread" if arguments.thread_time else "wall",
    )


def run(only: str | None, thread_time: bool) -> list[dict[str, Any]]:
    """What pytest-benchmark says of each benchmark, single rounds left out.

    Raises:
        SystemExit: a benchmark failed, by whatever else than its figures.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", str(BENCHMARKS), f"--benchmark-json={report}"]
        command += ["-p", "no:cacheprovider", "--benchmark-disable-gc", "--benchmark-quiet"]
        if thread_time:
            command.append("--benchmark-timer=time.thread_time")
        if only:
            command += ["-k", only]
        ended = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if ended.returncode != 0 or not report.exists():
            sys.exit(f"{ended.stdout}\nthe benchmarks failed ({ended.returncode})")
        benchmarks: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"]
        return benchmarks


def row(benchmark: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    stats, more = benchmark["stats"], benchmark["extra_info"]
    times = (stats["min"] * 1e6, more["p50_us"], more["p99_us"])
    return benchmark["name"], str(stats["rounds"]), *(f"{time:,.1f}" for time in times)


def figures(benchmarks: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """All that was measured, with the bars that the benchmarks give."""
    made = []
    for benchmark in benchmarks:
        more = benchmark["extra_info"]
        bars = more.get("goals", {})
        for name, unit in UNITS.items():
            if name in more:
                title = f"{benchmark['name'].removeprefix('test_')} {name.split('_us')[0]}"
                made.append(Figure(title, more[name], unit, bars.get(name), not name.endswith("_per_s")))
    return made


if __name__ == "__main__":
    main()
