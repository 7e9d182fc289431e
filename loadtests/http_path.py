"""One engine behind the whole HTTP path against the same engine offline.

The application runs as users run it (``python -m app``, one engine replica, two threads); 32 streams of token
ids go through HAProxy, ingress and channel. Then the same prompts go through ``engine.LLM`` in this process.
Processor time is read from the operating system for the engine's process and for everything else that the
application started; the load generator is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from app.launch.model_store import resolve
from app.launch.preflight import free_port
from engine import LLM
from loadtests.report import Figure, finish, print_table
from loadtests.throughput import Workload, run_ours, timed

STREAMS = Workload("http", 32, 128, 0, 128, 0.8)
START_LIMIT_S = 300.0
STREAM_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of processor time since their processes began."""

    engine: float
    rest: float


class Application:
    """The application as a child process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def processor_time(self) -> ProcessorTime:
        """Of the engine replica, and of all other processes that the application started."""
        engine = rest = 0.0
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
                title = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            spent = times.user + times.system
            if "ServeReplica" in title and "engine" in title.lower():
                engine += spent
            else:
                rest += spent
        return ProcessorTime(engine, rest)


@contextmanager
def application(options: list[str]) -> Iterator[Application]:
    """``python -m app`` on a free port, ready to answer; stopped at the end."""
    port = free_port(0)
    with tempfile.NamedTemporaryFile(prefix="quire-app-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", f"port={port}", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, port, Path(log.name))
        yield Application(process, port)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        Path(log.name).unlink(missing_ok=True)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once ``/health`` answers 200; raise with the end of the log if the process ends first."""
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the application ended while starting:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.5)
    raise RuntimeError(
        f"the application was not healthy within {START_LIMIT_S:.0f} s:\n{log.read_text()[-3000:]}"
    )


async def stream_one(port: int, model: str, prompt: list[int], output: int) -> int:
    """Stream one completion over a socket of its own; return the number of tokens that usage reports."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(
                f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}"
            )
        usage = b""
        done = False
        while line := await reader.readline():
            if b'"usage"' in line and b'"completion_tokens"' in line:
                usage = line
            done = done or line.startswith(b"data: [DONE]")
        if not done:
            raise RuntimeError("a stream ended without [DONE]")
        return int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])
    finally:
        writer.close()


def run_http(app: Application, model: str, prompts: list[list[int]], output: int) -> int:
    """All prompts at once, each in a stream of its own."""

    async def everything() -> int:
        streams = [stream_one(app.port, model, prompt, output) for prompt in prompts]
        return sum(await asyncio.wait_for(asyncio.gather(*streams), STREAM_LIMIT_S))

    return asyncio.run(everything())


def compare_http(arguments: argparse.Namespace) -> None:
    """Run both in turns and report."""
    options = [
        f"model={arguments.model}",
        f"dtype={arguments.dtype}",
        "engine_replicas=1",
        f"threads={arguments.threads}",
    ]
    served: list[float] = []
    offline: list[float] = []
    shares: list[float] = []
    client_seconds: list[float] = []
    llm = LLM(str(resolve(arguments.model)), dtype=arguments.dtype, num_threads=arguments.threads)
    with application(options) as app:
        run_ours(llm, [[5, 6, 7, 8]], 4)
        run_http(app, arguments.model, [[5, 6, 7, 8]], 4)
        for number in tqdm(range(arguments.rounds), unit="round"):
            prompts = STREAMS.prompts(arguments.seed + number)
            before, own_before = app.processor_time(), time.process_time()
            served.append(timed(lambda p=prompts: run_http(app, arguments.model, p, STREAMS.output)))  # type: ignore[misc]
            after = app.processor_time()
            client_seconds.append(time.process_time() - own_before)
            shares.append((after.rest - before.rest) / (after.engine - before.engine))
            offline.append(timed(lambda p=prompts: run_ours(llm, p, STREAMS.output)))  # type: ignore[misc]
    ratio = statistics.median(served) / statistics.median(offline)
    share = statistics.median(shares)
    figures = [
        Figure("over HTTP", statistics.median(served), " tokens/s"),
        Figure("offline", statistics.median(offline), " tokens/s"),
        Figure("HTTP / offline", ratio, "x", STREAMS.bar),
        Figure("processor time of everything but the engine / the engine's", share, "", 0.2, at_most=True),
        Figure("processor time of the load generator", statistics.median(client_seconds), " s a round"),
    ]
    print_table(
        [f"{STREAMS.requests} streams, {STREAMS.prompt} in, {STREAMS.output} out", "figure"],
        [[figure.name, f"{figure.value:.3g}{figure.unit}"] for figure in figures],
    )
    rounds = {"http": served, "offline": offline, "shares": shares}
    finish("loadtests.throughput --http", figures, arguments, rounds=rounds, threads=arguments.threads)
