"""Streams that last as long as the run, and clients whose number changes, on an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from loadtests.client import MODEL, Client, Outcome
from loadtests.workloads import prompts

REST_SHARE = 4
"""A stream that ends before it may gets another turn, with this part of the tokens."""


class Load:
    """Owns its thread. Calls come from another one and return at once, but for ``streams`` and ``stop``."""

    def __init__(self, url: str, client_tokens: int, model: str = MODEL) -> None:
        self._client_tokens = client_tokens
        self._wanted = 0  # clients
        self._there = 0
        self._number = 0
        self._clients: set[asyncio.Task[None]] = set()
        self._stop_streams = False
        self._streams: list[Future[list[Outcome]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._http = Client(url, model)
        self.asked: list[Outcome] = []  # by clients, in the order of their ends
        self.open_streams = 0
        self.open_requests = 0  # of clients

    def start(self) -> None:
        """Begin to take calls."""
        self._thread.start()

    def stop(self) -> None:
        """Hang up on everything that is still open."""
        if self._thread.is_alive():
            self._submit(self._cancel_all()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def start_streams(self, count: int, tokens: int) -> None:
        """Begin ``count`` streams of ``tokens`` each."""
        for text in prompts(count, seed=11):
            self._streams.append(self._submit(self._stream(text, tokens)))

    def streams(self, timeout_s: float) -> list[list[Outcome]]:
        """Let the streams end; the turns of each, mostly one.

        Raises:
            TimeoutError: one has not ended after ``timeout_s``.
        """
        self._stop_streams = True
        deadline = time.monotonic() + timeout_s
        return [one.result(max(deadline - time.monotonic(), 0.0)) for one in self._streams]

    def clients(self, count: int) -> None:
        """Have so many: new ones ask at once, superfluous ones leave when their request has been answered."""
        self._loop.call_soon_threadsafe(self._set_clients, count)

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _set_clients(self, count: int) -> None:
        self._wanted = count
        while self._there < self._wanted:
            self._there += 1
            client = self._loop.create_task(self._client(self._there))
            self._clients.add(client)  # the loop itself holds tasks by weak references only
            client.add_done_callback(self._clients.discard)

    async def _client(self, number: int) -> None:
        while self._there <= self._wanted:
            self._number += 1
            self.open_requests += 1
            try:
                text = f"Client {number}, story {self._number}: the"
                self.asked.append(await self._http.complete(text, self._client_tokens))
            finally:
                self.open_requests -= 1
        self._there -= 1

    async def _stream(self, text: str, tokens: int) -> list[Outcome]:
        turns: list[Outcome] = []
        self.open_streams += 1
        try:
            while not turns or (turns[-1].complete and not self._stop_streams):
                asked = tokens if not turns else max(tokens // REST_SHARE, 1)
                turns.append(await self._http.complete(text, asked))
        finally:
            self.open_streams -= 1
        return turns

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.__aexit__(None, None, None)
