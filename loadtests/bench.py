"""``make bench``: every measuring command that needs no GPU, with its checks, the short ones first.

Each writes its figures, with machine and commit, to a JSON file of its own under ``--reports``;
``docs/benchmarks.md`` is updated from them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from loadtests.benchmarks_page import write

COMMANDS: dict[str, list[str]] = {
    "routing_speed": ["loadtests.routing_speed"],
    "kernels": ["loadtests.kernels"],
    "scheduler": ["loadtests.scheduler"],
    "locust": ["loadtests.locust_run"],
    "http": ["loadtests.throughput", "--http"],
    "faults": ["loadtests.faults"],
    "routing_faults": ["loadtests.routing_faults"],
    "pressure": ["loadtests.recovery", "--http"],
    "recovery": ["loadtests.recovery"],
    "autoscale_live": ["loadtests.autoscale_live"],
    "throughput": ["loadtests.throughput", "--rounds", "1"],
    "memory": ["loadtests.memory"],
    "autoscaling": ["loadtests.autoscaling"],
    "routing": ["loadtests.routing"],
}


def main() -> None:
    """Run the chosen commands; exit non-zero if any check fails."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument(
        "--reports", type=Path, default=Path("loadtests/reports"), help="folder for the JSON files"
    )
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    arguments = parser.parse_args()
    arguments.reports.mkdir(parents=True, exist_ok=True)
    ended = {}
    for name in arguments.only:
        out = arguments.reports / f"{name}.json"
        out.unlink(missing_ok=True)  # so that no file is an earlier run's
        command = [sys.executable, "-m", *COMMANDS[name], "--check", "--json", str(out)]
        print(f"\n=== {name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        verdict = "ok" if status == 0 else f"FAILED ({status})"
        ended[name] = f"{verdict} in {time.monotonic() - began:.0f} s"
        print(f"=== {name}: {ended[name]}", flush=True)
    print("\n" + "\n".join(f"{name}: {how}" for name, how in ended.items()))
    print(f"wrote {write(arguments.reports, arguments.page)} sections to {arguments.page}")
    failed = [name for name, how in ended.items() if not how.startswith("ok")]
    if failed:
        sys.exit(f"checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
