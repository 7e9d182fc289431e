"""What a crowd costs one ingress: ``python -m tests.crowds``.

Real Ray Serve, HAProxy and sockets; engines that only tell the time. Many requests begin at once; then as many
clients as asked for send a request and leave at once. Meanwhile another client asks for ``/health``, again and
again, and after the second crowd for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from loadtests.client import MODEL
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import OPTIONS, START_LIMIT_S, started
from loadtests.report import Figure, finish, parse

BETWEEN_S = 0.05
"""Between an answer of ``/health`` and the next question."""


@dataclass(slots=True)
class Crowd:
    """What ``act`` costs the ingress, and for how long others wait beside it."""

    cluster: LocalCluster
    number: int
    cpu_s: float = 0.0
    longest_s: float = 0.0
    next_s: float = 0.0
    begun: int = 0

    def meet(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        wait_for(self.cluster.idle, START_LIMIT_S, "requests are left")
        (pid,) = self.cluster.ingress_pids()
        process, before = psutil.Process(pid), self._routed()
        used = sum(process.cpu_times()[:2])
        asyncio.run(self._beside(act))
        wait_for(self.cluster.idle, START_LIMIT_S, "requests are left")
        self.cpu_s = sum(process.cpu_times()[:2]) - used
        self.begun = self._routed() - before - 1  # the last one is that after the crowd

    def _routed(self) -> int:
        return sum(sum(ingress["routed"].values()) for ingress in self.cluster.ingresses())

    async def _beside(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with httpx.AsyncClient(timeout=START_LIMIT_S, trust_env=False, base_url=self.cluster.url) as http:
            await http.get("/health")
            async with self._watched(http):
                await act()
                began = time.perf_counter()
                answer = await http.post("/v1/completions", content=body(1))
                answer.raise_for_status()
                self.next_s = time.perf_counter() - began

    @contextlib.asynccontextmanager
    async def _watched(self, http: httpx.AsyncClient) -> AsyncIterator[None]:
        ended = asyncio.Event()

        async def again() -> None:
            while not ended.is_set():
                began = time.perf_counter()
                await http.get("/health")
                self.longest_s = max(self.longest_s, time.perf_counter() - began)
                await asyncio.sleep(BETWEEN_S)

        asking = asyncio.create_task(again())
        try:
            yield
        finally:
            ended.set()
            await asking  # the question on its way counts, too

    async def begins(self) -> None:
        """All at once; ends when all are answered."""
        await asyncio.gather(*(self._send(answered=True) for _ in range(self.number)))

    async def leaves(self) -> None:
        """All at once; ends when all have left."""
        await asyncio.gather(*(self._send(answered=False) for _ in range(self.number)))

    async def _send(self, answered: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.cluster.port)
        content = body(2)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
        head += "connection: close\r\ncontent-type: application/json\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        if answered:
            await reader.read()
        writer.close()


def body(tokens: int) -> bytes:
    asked = {"model": MODEL, "prompt": [504, 1343], "max_tokens": tokens, "stream": True}
    return json.dumps(asked).encode()


def main() -> None:
    options = {
        "--begin": (400, "requests that begin at once"),
        "--leave": (200, "clients that leave at once"),
        "--rounds": (3, "of each"),
    }
    arguments = parse("tests.crowds", __doc__, options)
    figures = []
    with started("loadtests.experiments.timed_application:build") as cluster:
        cluster.deploy(**OPTIONS, max_live_choices=100_000)
        for at in range(arguments.rounds):
            crowd = Crowd(cluster, arguments.begin)
            crowd.meet(crowd.begins)
            name = f"round {at + 1}: {arguments.begin} begin"
            figures += [
                Figure(f"{name}: ingress, each", 1e3 * crowd.cpu_s / crowd.number, " ms"),
                Figure(f"{name}: longest wait for /health", crowd.longest_s, " s"),
            ]
            crowd = Crowd(cluster, arguments.leave)
            crowd.meet(crowd.leaves)
            name = f"round {at + 1}: {arguments.leave} leave"
            figures += [
                Figure(f"{name}: requests of theirs that began", crowd.begun),
                Figure(f"{name}: ingress, all", crowd.cpu_s, " s"),
                Figure(f"{name}: longest wait for /health", crowd.longest_s, " s"),
                Figure(f"{name}: the next request", crowd.next_s, " s"),
            ]
    finish("tests.crowds", figures, arguments, "crowds")


if __name__ == "__main__":
    main()
