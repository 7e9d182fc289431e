"""How many streams one ingress carries: real Ray Serve, HAProxy and sockets, engines that only tell the time.

Two engines give each stream 5 tokens/s. Beyond what the ingress can carry it must slow down, not collapse:
every stream completes, nothing is sent again, new requests are refused with a 429. The same where it gets a
fifth of a core, and nothing is lost where it is stopped (SIGSTOP) for 7 s.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import httpx
import psutil
import uvloop
from tqdm import tqdm

from loadtests.client import MODEL
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import OPTIONS, START_LIMIT_S, started
from loadtests.experiments.timed_application import TOKEN_EVERY_S, WORD, gate
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import quantile

STOP_S, WINDOW_S = 7.0, 5.0
HOLD = "while kill -STOP $0 && sleep 0.04 && kill -CONT $0; do sleep 0.01; done"  # a fifth of the time is left
NEW, BATCH = 10, 50  # requests amid the streams; streams whose beginning the next ones wait for
REQUEST = {"model": MODEL, "prompt": [504, 1343]}
LIMIT_S = 600.0
RUNS = {"carried": 1, "twice": 2, "twice, a fifth of a core": 2, "stopped for 7 s": 1}
"""How many streams, in those that one ingress must carry."""


@dataclass(eq=False)
class Stream(asyncio.Protocol):
    """One client: reads as fast as it can, counts, remembers when data came."""

    body: bytes
    ended: asyncio.Future[bool]
    tokens: int = 0
    events: int = 0
    times: list[float] = field(default_factory=list)
    _tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request as real clients do, in two parts."""
        writer = cast(asyncio.Transport, transport)  # uvloop's is none in name
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(self.body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode())
        asyncio.get_running_loop().call_soon(writer.write, self.body)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.events += data.count(b'"text":')
        window = self._tail + data
        self.tokens += window.count(WORD) - self._tail.count(WORD)
        if b"[DONE]" in window and not self.ended.done():
            self.ended.set_result(True)
        self._tail = window[-6:]

    def connection_lost(self, error: Exception | None) -> None:
        """A stream that is cut has not completed."""
        if not self.ended.done():
            self.ended.set_result(False)


class Run:
    def __init__(self, cluster: LocalCluster, name: str, count: int, tokens: int) -> None:
        self._cluster, self._name, self._tokens = cluster, name, tokens
        self._count = RUNS[name] * count
        (self._pid,) = cluster.ingress_pids()
        self._process = psutil.Process(self._pid)
        self._streams: list[Stream] = []
        self._looks: list[tuple[float, int, int, float]] = []
        self._refused, self._status = 0, ""

    def figures(self) -> list[Figure]:
        wait_for(self._cluster.idle, START_LIMIT_S, "requests are left")
        wait_for(lambda: self._cluster.health().get("status") == "ok", START_LIMIT_S, "the ingress is behind")
        before = self._cluster.health()["resubmitted"]
        uvloop.run(self._stream())
        streams, what = self._streams, f"{self._count} streams, {self._name}"
        made = sum(one.tokens for one in streams)
        gap = quantile([b - a for one in streams for a, b in pairwise(one.times)], 0.99)
        longest = max(b - a for one in streams for a, b in pairwise(one.times) if b <= self._looks[-1][0])
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(self._looks)]
        seconds, tokens, events, used = (b - a for a, b in zip(self._looks[0], self._looks[-1], strict=True))
        limits = (1.0, 60.0) if self._name == "carried" else (None, None)
        figures = [
            most(f"{what}: not completed", sum(not one.ended.result() for one in streams)),
            most(f"{what}: tokens missing", self._count * self._tokens - made),
            most(f"{what}: sent again", self._cluster.health()["resubmitted"] - before),
            Figure(f"{what}: tokens/s while all stream", tokens / seconds),
            Figure(f"{what}: events for each token", sum(one.events for one in streams) / max(made, 1)),
            Figure(f"{what}: gap between events, p99", gap, " s", limits[0], at_most=True),
            Figure(f"{what}: longest gap while all stream", longest, " s"),
            Figure(f"{what}: ingress, each event", 1e6 * used / max(events, 1), " µs", limits[1], at_most=True),
            Figure(f"{what}: of {NEW} new requests refused", self._refused),
        ]
        if RUNS[self._name] > 1:
            refuses = self._status == "overloaded" and self._refused == NEW
            figures += [
                Figure(f"{what}: least rate, of the best", min(rates) / max(rates), "", 0.85),
                most(f"{what}: it neither keeps up nor refuses", float(longest > 1.0 and not refuses)),
            ]
        return figures

    async def _stream(self) -> None:
        loop = asyncio.get_running_loop()
        options = {"max_tokens": self._tokens, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({**REQUEST, **options}).encode()
        closed = gate(self._cluster.instance)
        closed.touch()
        try:
            async with asyncio.timeout(LIMIT_S):
                while len(self._streams) < self._count:
                    _, stream = await loop.create_connection(
                        lambda: Stream(body, loop.create_future()), "127.0.0.1", self._cluster.port
                    )
                    self._streams.append(stream)
                    if len(self._streams) % BATCH == 0 or len(self._streams) == self._count:
                        while not all(one.times or one.ended.done() for one in self._streams[-BATCH:]):  # noqa: ASYNC110
                            await asyncio.sleep(0.02)
        finally:
            closed.unlink()
        for one in self._streams:
            one.times.clear()
        holder = None
        if "a fifth" in self._name:
            holder = await asyncio.create_subprocess_exec("sh", "-c", HOLD, str(self._pid))
        try:
            asked = asyncio.create_task(self._disturb())
            for look in range(1 + max(int((self._tokens * TOKEN_EVERY_S - 1.2) / WINDOW_S), 1)):  # then all end
                await asyncio.sleep(WINDOW_S if look else 1.0)
                tokens, events = (sum(getattr(one, of) for one in self._streams) for of in ("tokens", "events"))
                used = sum(self._process.cpu_times()[:2])
                self._looks.append((time.perf_counter(), tokens, events, used))
            await asked
            await asyncio.wait_for(asyncio.gather(*(one.ended for one in self._streams)), LIMIT_S)
        finally:
            if holder is not None:
                holder.kill()
                await holder.wait()
                self._cluster.kill(self._pid, signal.SIGCONT)

    async def _disturb(self) -> None:
        await asyncio.sleep(self._tokens * TOKEN_EVERY_S / 2)
        if "stopped" in self._name:
            self._cluster.kill(self._pid, signal.SIGSTOP)
            await asyncio.sleep(STOP_S)
            self._cluster.kill(self._pid, signal.SIGCONT)
        async with httpx.AsyncClient(timeout=60.0, trust_env=False, base_url=self._cluster.url) as client:
            self._status = (await client.get("/health")).json()["status"]
            for _ in range(NEW):
                answer = await client.post("/v1/completions", json={**REQUEST, "max_tokens": 1})
                self._refused += answer.status_code == 429


def main() -> None:
    options = {
        "--only": (RUNS, "runs"),
        "--streams": (2000, "that one ingress must carry"),
        "--tokens": (100, "of each stream"),
    }
    arguments = parse("streams", __doc__, options)
    with started("loadtests.experiments.timed_application:build") as cluster:
        cluster.deploy(**OPTIONS, max_live_choices=100_000)
        figures = [
            figure
            for name in tqdm(arguments.only, unit="run")
            for figure in Run(cluster, name, arguments.streams, arguments.tokens).figures()
        ]
    finish("loadtests.streams", figures, arguments, "streams", options=OPTIONS)
