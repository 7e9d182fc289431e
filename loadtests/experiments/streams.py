"""How many streams one ingress carries: real Ray Serve, HAProxy and sockets, engines that only tell the time.

Two engines give each stream 5 tokens/s. Beyond what the ingress can carry it must slow down, not collapse:
every stream completes, nothing is sent again, new requests are refused with a 429. With ``--stop`` the ingress
is also stopped (SIGSTOP) for 7 s amid the first number of streams.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass, field

import httpx
import psutil

from loadtests.client import MODEL
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import OPTIONS, START_LIMIT_S
from loadtests.experiments.timed_application import TOKEN_EVERY_S
from loadtests.report import Figure, finish, most, parse, print_figures
from loadtests.stats import quantile

STOP_S = 7.0
LIMIT_S = 600.0


@dataclass(eq=False)
class Stream(asyncio.Protocol):
    """One client: reads as fast as it can, counts events, remembers when data came."""

    body: bytes
    ended: asyncio.Future[bool]
    tokens: int = 0
    events: int = 0
    times: list[float] = field(default_factory=list)
    _tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request as real clients do, in two parts."""
        assert isinstance(transport, asyncio.Transport)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(self.body)}\r\n"
        transport.write(f"{head}content-type: application/json\r\n\r\n".encode())
        asyncio.get_running_loop().call_soon(transport.write, self.body)

    def data_received(self, data: bytes) -> None:
        """Count what came."""
        self.times.append(time.perf_counter())
        self.events += data.count(b'"text":')
        window = self._tail + data
        if (at := window.rfind(b'"completion_tokens":')) >= 0:
            digits = window[at + 20 : at + 30].partition(b",")[0]
            self.tokens = int(digits) if digits.isdigit() else self.tokens
        if b"[DONE]" in window and not self.ended.done():
            self.ended.set_result(True)
        self._tail = window[-200:]

    def connection_lost(self, error: Exception | None) -> None:
        """A stream that is cut has not completed."""
        if not self.ended.done():
            self.ended.set_result(False)


async def stream_all(
    cluster: LocalCluster, ingress: psutil.Process, count: int, tokens: int, stop: bool
) -> tuple[list[Stream], float, int]:
    """All streams to their end.

    Also processor time of the ingress, in µs, for each event while all of them stream, and how many of some
    requests in the middle were refused with a 429.
    """
    loop = asyncio.get_running_loop()
    options = {"model": MODEL, "prompt": [504, 1343], "max_tokens": tokens, "stream": True}
    body = json.dumps({**options, "stream_options": {"include_usage": True}}).encode()
    streams = []
    for _ in range(count):
        _, stream = await loop.create_connection(
            lambda: Stream(body, loop.create_future()), "127.0.0.1", cluster.port
        )
        streams.append(stream)
    while not all(stream.events or stream.ended.done() for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(TOKEN_EVERY_S)
    events, used = sum(stream.events for stream in streams), processor_time(ingress)
    await asyncio.sleep(tokens * TOKEN_EVERY_S / 2)
    events, used = sum(stream.events for stream in streams) - events, processor_time(ingress) - used
    if stop:
        (pid,) = cluster.ingress_pids()
        cluster.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOP_S)
        cluster.kill(pid, signal.SIGCONT)
    refused = 0
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        for _ in range(10):
            answer = await client.post(
                f"{cluster.url}/v1/completions", json={**options, "stream": False, "max_tokens": 1}
            )
            refused += answer.status_code == 429
    await asyncio.wait_for(asyncio.gather(*(stream.ended for stream in streams)), LIMIT_S)
    return streams, 1e6 * used / max(events, 1), refused


def processor_time(process: psutil.Process) -> float:
    """Seconds."""
    return float(sum(process.cpu_times()[:2]))


def measure(cluster: LocalCluster, count: int, tokens: int, stop: bool = False) -> list[Figure]:
    """The figures of one number of streams."""
    wait_for(cluster.idle, START_LIMIT_S, "requests are left")
    (pid,) = cluster.ingress_pids()
    ingress, before = psutil.Process(pid), cluster.health()
    used = processor_time(ingress)
    began = time.perf_counter()
    streams, each_event, refused = asyncio.run(stream_all(cluster, ingress, count, tokens, stop))
    seconds = time.perf_counter() - began
    used = processor_time(ingress) - used
    made = sum(stream.tokens for stream in streams)
    gaps = [b - a for one in streams for a, b in zip(one.times, one.times[1:], strict=False)]
    what = f"{count} streams" + (f", stopped for {STOP_S:g} s" if stop else "")
    return [
        most(f"{what}: not completed", sum(not one.ended.result() for one in streams)),
        most(f"{what}: tokens missing", count * tokens - made),
        most(f"{what}: sent again", cluster.health().get("resubmitted", count) - before["resubmitted"]),
        Figure(f"{what}: tokens/s", made / seconds),
        Figure(f"{what}: events for each token", sum(one.events for one in streams) / max(made, 1)),
        Figure(f"{what}: gap between events, p99", quantile(gaps, 0.99), " s"),
        Figure(f"{what}: ingress processor time for each token", 1e6 * used / max(made, 1), " µs"),
        Figure(f"{what}: ingress processor time for each event while all stream", each_event, " µs"),
        Figure(f"{what}: of 10 new requests refused", refused),
    ]


def main() -> None:
    """Measure and report."""
    options = {
        "--streams": ([500, 2000, 4000], "numbers of streams"),
        "--tokens": (100, "of each stream"),
        "--stop": (False, "also stop the ingress for 7 s"),
    }
    arguments = parse("streams", __doc__, options)
    cluster = LocalCluster("loadtests.experiments.timed_application:build")
    try:
        cluster.start()
        cluster.deploy(**OPTIONS, max_live_choices=100_000)
        figures = [
            figure for count in arguments.streams for figure in measure(cluster, count, arguments.tokens)
        ]
        if arguments.stop:
            figures += measure(cluster, arguments.streams[0], arguments.tokens, stop=True)
    finally:
        cluster.stop()
    print_figures("streams", figures)
    finish("loadtests.streams", figures, arguments, options=OPTIONS)
