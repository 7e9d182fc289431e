"""``make bench``: every measuring command that needs no GPU, with its checks.

Each writes a JSON file under ``--reports``; those that hold their bars update ``docs/benchmarks.md``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from loadtests.benchmarks_page import write
from loadtests.report import missed, parse


class Command(NamedTuple):
    """A module with its options, and the minutes that it takes on two idle cores."""

    words: str
    minutes: float
    seeds: bool = False  # whether it has the option


COMMANDS = {
    "routing_speed": Command("loadtests.routing_speed", 0.5),
    "kernels": Command("loadtests.kernels", 1.5),
    "scheduler": Command("loadtests.scheduler", 1.5),
    "locust": Command("loadtests.locust_run", 1.5),
    "speculation": Command("loadtests.speculation", 2),
    "http": Command("loadtests.throughput --http", 1.5),
    "faults": Command("loadtests.faults", 2),
    "routing_faults": Command("loadtests.routing_faults", 2.5),
    "streams": Command("loadtests.streams", 6),
    "recovery": Command("loadtests.recovery", 2.5),
    "routing_live": Command("loadtests.routing --live", 3, seeds=True),
    "throughput": Command("loadtests.throughput --rounds 1", 3.5),
    "perplexity": Command("loadtests.perplexity", 1.5),
    "memory": Command("loadtests.memory", 2.5),
    "autoscaling": Command("loadtests.autoscaling", 5, seeds=True),
    "routing": Command("loadtests.routing", 10, seeds=True),
}


def main() -> None:
    """Run the chosen commands; exit non-zero if any check fails."""
    options = {
        "--only": (COMMANDS, "commands"),
        "--seeds": (1, "of the experiments with seeds; 3 to publish"),
        "--reports": (Path("loadtests/reports"), "folder for the JSON files"),
        "--page": (Path("docs/benchmarks.md"), "to be updated"),
    }
    arguments = parse("bench", __doc__, options)
    arguments.reports.mkdir(parents=True, exist_ok=True)
    print(f"about {sum(COMMANDS[name].minutes for name in arguments.only):g} minutes on two idle cores")
    ended, good, failed = [], [], []
    for name in arguments.only:
        out = arguments.reports / f"{name}.json"
        out.unlink(missing_ok=True)  # so that no file is an earlier run's
        words, minutes, seeds = COMMANDS[name]
        command = [sys.executable, "-m", *words.split(), "--check", "--json", str(out)]
        command += ["--seeds", str(arguments.seeds)] if seeds else []
        print(f"\n=== {name}, about {minutes:g} minutes: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        verdict = f"FAILED ({status})" if status else "ok"
        ended.append(f"{name}: {verdict} in {time.monotonic() - began:.0f} s")
        print(f"=== {ended[-1]}", flush=True)
        if status:
            failed += [f"{name}: {line}" for line in missed(out)]
        elif out.exists():
            good.append(out)
    write(good, arguments.page)
    print("\n".join(["", *ended, f"wrote {len(good)} sections to {arguments.page}"]))
    if failed:
        sys.exit("\n".join(["checks failed:", *failed]))


if __name__ == "__main__":
    main()
