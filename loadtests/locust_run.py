"""``make loadtest``: headless Locust against the application, which is started if none answers.

Without ``--host`` the address is ``$QUIRE_URL``, else http://127.0.0.1:8000. If nothing answers there, the
application is started on a free port with the given options and stopped at the end.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadtests import report

DEFAULT_URL = "http://127.0.0.1:8000"
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
REQUEST = "/v1/chat/completions"
STREAM_ROWS = ("TTFT", "TPOT", "tokens/s", "output tokens")


def answers(url: str) -> bool:
    """Whether a healthy application listens there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@contextmanager
def target(url: str | None, options: list[str]) -> Iterator[str]:
    """The address to load: ``url`` if it answers, else an application started for this."""
    wanted = (url or os.environ.get("QUIRE_URL") or DEFAULT_URL).rstrip("/")
    if answers(wanted):
        print(f"loading {wanted}, which runs already")
        yield wanted
    elif url is not None:
        sys.exit(f"nothing healthy answers at {url}/health; leave out --host to have the application started")
    else:
        from loadtests.http_path import application

        print("starting the application ...", flush=True)
        with ExitStack() as stack:
            try:
                started = stack.enter_context(application(options))
            except RuntimeError as error:
                sys.exit(str(error))
            yield f"http://127.0.0.1:{started.port}"


def run_locust(url: str, arguments: argparse.Namespace, reports: Path) -> int:
    """Run Locust headless; returns its exit status, non-zero if any request failed."""
    environment = {
        **os.environ,
        "QUIRE_LOAD_SEED": str(arguments.seed),
        "QUIRE_LOAD_MAX_TOKENS": str(arguments.max_tokens),
        "PYTHONPATH": os.pathsep.join([str(LOCUSTFILE.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(
            ":"
        ),
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
    """Locust's CSV of statistics by name, numbers only."""
    rows: dict[str, dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rows[row["Name"]] = {
                column: float(value)
                for column, value in row.items()
                if column not in ("Type", "Name") and value and value != "N/A"
            }
    return rows


def figures_of(rows: dict[str, dict[str, float]], seconds: float) -> list[report.Figure]:
    """What the run is judged by."""
    chat = rows.get(REQUEST, {})
    requests = chat.get("Request Count", 0.0)
    tokens = rows.get("output tokens", {})
    made = tokens.get("Request Count", 0.0) * tokens.get("Average Response Time", 0.0)
    return [
        report.Figure("requests", requests, bar=1),
        report.Figure("failures", chat.get("Failure Count", 0.0) if chat else 1.0, bar=0, at_most=True),
        report.Figure("output tokens per second, all users", made / seconds, " tokens/s"),
        report.Figure("TTFT, median", rows.get("TTFT", {}).get("50%", 0.0), " ms"),
        report.Figure("TTFT, 95 %", rows.get("TTFT", {}).get("95%", 0.0), " ms"),
        report.Figure("TPOT, median", rows.get("TPOT", {}).get("50%", 0.0), " ms"),
    ]


def print_summary(rows: dict[str, dict[str, float]]) -> None:
    """One line for the requests and one for each statistic of the streams."""
    columns = (
        "Request Count",
        "Failure Count",
        "Average Response Time",
        "50%",
        "95%",
        "99%",
        "Max Response Time",
    )
    table = [
        [name, *(f"{rows[name].get(column, 0.0):.4g}" for column in columns)]
        for name in (REQUEST, *STREAM_ROWS)
        if name in rows
    ]
    report.print_table(["statistic", "count", "failed", "mean", "50 %", "95 %", "99 %", "max"], table)
    print(f"{REQUEST}, TTFT and TPOT in ms; tokens/s of one stream")


def main() -> None:
    """Exit non-zero if a request failed, with ``--check`` also if there was none."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.locust_run", description=__doc__)
    report.add_arguments(parser)
    parser.add_argument("--host", help="address of a running application")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reports", type=Path, default=Path("loadtests/reports"))
    parser.add_argument("options", nargs="*", metavar="key=value", help="options if the application is started")
    arguments = parser.parse_args()
    arguments.reports.mkdir(parents=True, exist_ok=True)
    with target(arguments.host, arguments.options) as url:
        print(f"{arguments.users} users for {arguments.seconds} s against {url}", flush=True)
        status = run_locust(url, arguments, arguments.reports)
    statistics = arguments.reports / "locust_stats.csv"
    rows = read_statistics(statistics) if statistics.exists() else {}
    print_summary(rows)
    print(f"report: {arguments.reports / 'locust.html'}")
    summary = arguments.reports / "locust_summary.json"
    summary.write_text(json.dumps(rows, indent=2) + "\n")
    report.finish("loadtests.locust_run", figures_of(rows, arguments.seconds), arguments, statistics=rows)
    sys.exit(status)


if __name__ == "__main__":
    main()
