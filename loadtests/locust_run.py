"""``make loadtest``: headless Locust against the application, which is started if none answers.

With ``--trace`` recorded requests come at their times instead, as completions of random tokens with the lengths
and shared prefixes of the trace: Azure's CSV, or Mooncake's JSONL. ``$QUIRE_API_KEY`` is sent where it is set.

Without ``--host`` the address is ``$QUIRE_URL``, else http://127.0.0.1:8000. If nothing answers there, the
application is started on a free port with the given options and stopped at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.config import CLIENT_KEY
from loadtests.replay import Replayed, Window, replay
from loadtests.report import ROOT, Figure, finish, most, parse, where
from loadtests.stats import quantile
from loadtests.traces import Record, TraceError, read_records

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
TEMPLATE = Path(__file__).with_name("loadtest.html")
MAX_RECORDS = 2_000_000  # of a trace; more would not fit the memory of a small machine
NAMES = (
    ("quire_request_prompt_tokens_count", "requests"),
    ("quire_request_prompt_tokens_sum", "prompt tokens"),
    ("quire_request_output_tokens_sum", "output tokens"),
    ("quire_request_seconds_sum", "seconds of requests"),
    ("quire_time_per_output_token_seconds_sum", "seconds a token"),
)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def target(url: str, options: list[str]) -> Iterator[str]:
    """The address to load: ``url`` if it answers, else an application started for this."""
    wanted = (url or os.environ.get("QUIRE_URL") or "http://127.0.0.1:8000").rstrip("/")
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


def run_locust(url: str, arguments: argparse.Namespace, reports: Path) -> tuple[int, list[dict[str, Any]]]:
    """Run Locust; returns its exit status, non-zero if any request failed, and the server's samples."""
    records = reports / "records.jsonl"
    records.write_text("")
    environment = {
        **os.environ,
        "QUIRE_LOAD_SEED": str(arguments.seed),
        "QUIRE_LOAD_MAX_TOKENS": str(arguments.max_tokens),
        "QUIRE_LOAD_RECORDS": str(records.resolve()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    rate = max(2 * arguments.users / arguments.seconds, 0.1)  # all are there at half of the time
    command = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url),
        *("--users", str(arguments.users), "--spawn-rate", str(rate)),
        *("--run-time", f"{arguments.seconds}s", "--stop-timeout", "120"),
        *("--html", str(reports / "locust.html"), "--csv", str(reports / "locust")),
        *("--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "1"),
    ]
    output, samples = reports / "locust.log", [scrape(url)]
    with output.open("w") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as running:
        while running.poll() is None:
            time.sleep(1)
            samples.append(scrape(url))
    time.sleep(2)  # until every ingress has told the one that answers
    samples.append(scrape(url))
    if running.returncode != 0:
        print(output.read_text()[-4000:])
    return running.returncode, samples


def scrape(url: str) -> dict[str, float]:
    """What the server's /metrics says now: NAMES, all labels added, replicas, and ``at``, since the epoch."""
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get(CLIENT_KEY)) else {}
    response = httpx.get(f"{url}/metrics", headers=headers, timeout=30)
    if response.status_code in (401, 403):
        sys.exit(f"{url} refuses {'this' if key else 'requests without an'} API key; set {CLIENT_KEY}")
    text = response.raise_for_status().text
    rows = [row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#")]
    found = {name: sum(float(v) for n, v in rows if n == name or n.startswith(pre)) for pre, name in NAMES}
    # Each ingress counts its own channels.
    opened = [float(v) for n, v in rows if n.startswith("quire_replicas{") and 'state="open"' in n]
    return {"at": time.time(), "replicas": max(opened, default=0.0), **found}


def trace_of(arguments: argparse.Namespace) -> list[Record]:
    """The trace; exits with what is wrong with it, or that the window has no request."""
    try:
        records = read_records(Path(arguments.trace), MAX_RECORDS)
    except TraceError as error:
        sys.exit(str(error))
    window = Window(arguments.start, arguments.seconds, arguments.rate)
    if arguments.start < 0 or not window.of(records):
        length = records[-1].arrival - records[0].arrival
        sys.exit(f"{arguments.trace} lasts {length:.0f} s: no request from --start {arguments.start:g} on")
    return records


def run_trace(url: str, arguments: argparse.Namespace) -> Replayed:
    """Replay the window of the trace; the first three faults are printed."""
    window = Window(arguments.start, arguments.seconds, arguments.rate, arguments.shrink)
    due = window.of(arguments.records)
    key = os.environ.get(CLIENT_KEY, "")
    run = asyncio.run(replay(url, key, due, window, lambda: scrape(url), arguments.seed))
    for fault in list(dict.fromkeys(one.fault for one in run.outcomes if one.fault))[:3]:
        print(f"failed: {fault[:300]}")
    return run


def figures_of(records: list[dict[str, Any]], samples: list[dict[str, float]], *own: Figure) -> list[Figure]:
    """What the run is judged by: clients' figures, how far the server is off, and the runner's ``own``."""
    said = {name: samples[-1][name] - samples[0][name] for _, name in NAMES}
    total = {name: sum(one[name] for one in records) for name in ("prompt", "output", "cached", "took", "tpot")}
    took = samples[-1]["at"] - samples[0]["at"]
    pairs = zip(said, (len(records), *(total[of] for of in ("prompt", "output", "took", "tpot"))), strict=True)
    return [
        Figure("requests", len(records), bar=1),
        *own,
        Figure("output tokens per second, all users", total["output"] / took, " tokens/s"),
        *(
            Figure(f"TTFT, {q:.0%}", quantile([1e3 * r["ttft"] for r in records], q), " ms")
            for q in (0.5, 0.95)
        ),
        Figure("TPOT, median", quantile([1e3 * one["tpot"] for one in records], 0.5), " ms"),
        Figure("cached share of prompts", 100 * total["cached"] / max(total["prompt"], 1), "%"),
        *(most(f"{n}: server differs by", 100 * abs(said[n] / max(v, 1e-9) - 1), 2, "%") for n, v in pairs),
    ]


def main() -> None:
    """Exit non-zero if a request failed, with ``--check`` also if there was none."""
    options = {
        "--host": ("", "address of a running application"),
        "--users": (16, "most users at once"),
        "--seconds": (60, "duration of the load"),
        "--max-tokens": (64, "longest answer, in tokens"),
        "--seed": (0, "seed of the chats, or of the tokens of a trace"),
        "--trace": ("", "file of recorded requests to replay, Azure's or Mooncake's"),
        "--start": (0.0, "seconds of the trace to skip"),
        "--rate": (1.0, "how many times as fast the trace is replayed"),
        "--shrink": (1, "divide the lengths of prompts and answers of the trace by this"),
        "--reports": (Path("loadtests/reports"), "folder for the report and Locust's files"),
        "options": ([], "options of the application if it is started, as key=value"),
    }
    arguments = parse("locust_run", __doc__, options)
    if arguments.trace:  # before anything is started
        arguments.records = trace_of(arguments)
    arguments.reports.mkdir(parents=True, exist_ok=True)
    status = 0
    with target(arguments.host, arguments.options) as url:
        if arguments.trace:
            run = run_trace(url, arguments)
            records = [one.record("trace") for one in run.outcomes if not one.fault]
            samples, failed = run.samples, len(run.outcomes) - len(records)
            late = Figure("sent after it was due, 99%", quantile([1e3 * one for one in run.late], 0.99), " ms")
            own = [most("requests that failed", failed), late]
        else:
            print(f"{arguments.users} users for {arguments.seconds} s against {url}", flush=True)
            status, samples = run_locust(url, arguments, arguments.reports)
            rows = (arguments.reports / "records.jsonl").read_text().splitlines()
            records, own = [json.loads(row) for row in rows], [most("Locust's exit status", status)]
            print(f"Locust's own report: {arguments.reports / 'locust.html'}")
    figures = figures_of(records, samples, *own)
    shown = [(one.name, f"{one.value:.4g}{one.unit}", one.holds) for one in figures]
    data = {"records": records, "samples": samples, "figures": shown, "where": where()}
    page = arguments.reports / "loadtest.html"
    page.write_text(TEMPLATE.read_text().replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c")))
    print(f"report: {page}")
    if not all(one.holds for one in figures):
        print("Other traffic, or other work on this machine, can be why a line says missed: docs/deployment.md")
    finish("loadtests.locust_run", figures, arguments, "load test")
    sys.exit(status)


if __name__ == "__main__":
    main()
