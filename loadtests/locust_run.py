"""``make loadtest``: headless Locust against the application, which is started if none answers.

Without ``--host`` the address is ``$QUIRE_URL``, else http://127.0.0.1:8000. If nothing answers there, the
application is started on a free port with the given options and stopped at the end.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from loadtests.report import ROOT, Figure, finish, most, parse, print_figures

DEFAULT_URL = "http://127.0.0.1:8000"
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
REQUEST = "/v1/chat/completions"


def answers(url: str) -> bool:
    """Whether something healthy listens there."""
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def target(url: str, options: list[str]) -> Iterator[str]:
    """The address to load: ``url`` if it answers, else an application started for this."""
    wanted = (url or os.environ.get("QUIRE_URL") or DEFAULT_URL).rstrip("/")
    if answers(wanted):
        print(f"loading {wanted}, which runs already")
        yield wanted
    elif url:
        sys.exit(f"nothing healthy answers at {url}/health; leave out --host to have the application started")
    else:
        from loadtests.cluster import application  # imports Ray

        print("starting the application ...", flush=True)
        try:
            with application(options) as (_, started, _):
                yield started
        except RuntimeError as error:
            sys.exit(str(error))


def run_locust(url: str, arguments: argparse.Namespace, reports: Path) -> int:
    """Run Locust headless; returns its exit status, non-zero if any request failed."""
    environment = {
        **os.environ,
        "QUIRE_LOAD_SEED": str(arguments.seed),
        "QUIRE_LOAD_MAX_TOKENS": str(arguments.max_tokens),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url),
        *("--users", str(arguments.users), "--spawn-rate", str(arguments.users)),
        *("--run-time", f"{arguments.seconds}s", "--stop-timeout", "120"),
        *("--html", str(reports / "locust.html"), "--csv", str(reports / "locust")),
        *("--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "1"),
    ]
    output = reports / "locust.log"
    with output.open("w") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    if status != 0:
        print(output.read_text()[-4000:])
    return status


def read_statistics(path: Path) -> dict[str, dict[str, float]]:
    """Locust's CSV of statistics by name, numbers only; empty without a file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = {row.pop("Name"): row for row in csv.DictReader(file)}
    numbers = {name: [(c, v) for c, v in row.items() if c != "Type"] for name, row in rows.items()}
    return {name: {c: float(v) for c, v in row if v and v != "N/A"} for name, row in numbers.items()}


def figures_of(rows: dict[str, dict[str, float]], seconds: float) -> list[Figure]:
    """What the run is judged by."""
    chat, tokens, ttft = (rows.get(name, {}) for name in (REQUEST, "output tokens", "TTFT"))
    made = tokens.get("Request Count", 0.0) * tokens.get("Average Response Time", 0.0)
    return [
        Figure("requests", chat.get("Request Count", 0.0), bar=1),
        most("failures", chat.get("Failure Count", 0.0) if chat else 1.0),
        Figure("output tokens per second, all users", made / seconds, " tokens/s"),
        Figure("TTFT, median", ttft.get("50%", 0.0), " ms"),
        Figure("TTFT, 95 %", ttft.get("95%", 0.0), " ms"),
        Figure("TPOT, median", rows.get("TPOT", {}).get("50%", 0.0), " ms"),
    ]


def main() -> None:
    """Exit non-zero if a request failed, with ``--check`` also if there was none."""
    options = {
        "--host": ("", "address of a running application"),
        "--users": (16, "at once"),
        "--seconds": (60, "of load"),
        "--max-tokens": (64, "of an answer"),
        "--seed": (0, "of the chats"),
        "--reports": (Path("loadtests/reports"), "folder for Locust's files"),
        "options": ([], "key=value, of the application if it is started"),
    }
    arguments = parse("locust_run", __doc__, options)
    arguments.reports.mkdir(parents=True, exist_ok=True)
    with target(arguments.host, arguments.options) as url:
        print(f"{arguments.users} users for {arguments.seconds} s against {url}", flush=True)
        status = run_locust(url, arguments, arguments.reports)
    rows = read_statistics(arguments.reports / "locust_stats.csv")
    figures = figures_of(rows, arguments.seconds)
    print_figures(REQUEST, figures)
    print(f"report: {arguments.reports / 'locust.html'}")
    finish("loadtests.locust_run", figures, arguments, statistics=rows)
    sys.exit(status)


if __name__ == "__main__":
    main()
