"""``make bench``: every measuring command that needs no GPU, with its checks, one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

COMMANDS: dict[str, list[str]] = {
    "kernels": ["loadtests.kernels"],
    "memory": ["loadtests.memory"],
    "scheduler": ["loadtests.scheduler"],
    "throughput": ["loadtests.throughput"],
    "http": ["loadtests.throughput", "--http"],
    "locust": ["loadtests.locust_run"],
    "routing_speed": ["loadtests.routing_speed"],
    "faults": ["loadtests.faults"],
    "routing_faults": ["loadtests.routing_faults"],
    "recovery": ["loadtests.recovery"],
    "pressure": ["loadtests.recovery", "--http"],
    "autoscaling": ["loadtests.autoscaling"],
    "autoscale_live": ["loadtests.autoscale_live"],
    "routing": ["loadtests.routing"],
}


def main() -> None:
    """Run the chosen commands; exit non-zero if any check fails."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument(
        "--reports", type=Path, default=Path("loadtests/reports"), help="folder for the JSON files"
    )
    arguments = parser.parse_args()
    arguments.reports.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        command = [
            sys.executable,
            "-m",
            *COMMANDS[name],
            "--check",
            "--json",
            str(arguments.reports / f"{name}.json"),
        ]
        print(f"\n=== {name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        print(
            f"=== {name}: {'ok' if status == 0 else f'FAILED ({status})'} in {time.monotonic() - began:.0f} s"
        )
        if status != 0:
            failed.append(name)
    if failed:
        sys.exit(f"checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
