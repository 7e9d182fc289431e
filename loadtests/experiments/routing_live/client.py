"""Chats over plain sockets: at given times whatever becomes of the earlier ones, or one after the other."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loadtests.experiments.routing_live.traffic import Ask, Traffic
from loadtests.streams import MODEL


@dataclass(slots=True)
class Reply:
    """What came of one request. Times are of ``time.perf_counter``, 0 for what never came.

    ``due`` is when it should have been sent; ``status`` is 0 without an answer.
    """

    ask: Ask
    due: float
    status: int = 0
    name: str = ""  # of the response
    first: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: int = 0
    fault: str = ""


class Client:
    """Sends the requests of one run to ``url``, each on a connection of its own."""

    def __init__(self, url: str, traffic: Traffic, limit_s: float, on_end: Callable[[], object]) -> None:
        """``limit_s`` bounds each request; ``on_end`` is called as each has ended."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._traffic = traffic
        self._limit_s = limit_s
        self._on_end = on_end

    async def open_loop(self, asks: Sequence[Ask], began: float) -> list[Reply]:
        """Send each ``began + ask.t``; return when all have ended."""
        sent = []
        for ask in asks:
            await asyncio.sleep(max(0.0, began + ask.t - time.perf_counter()))
            sent.append(asyncio.ensure_future(self.ask(ask, began + ask.t)))
        return await asyncio.gather(*sent)

    async def in_turn(self, asks: Sequence[Ask], at_once: int) -> list[Reply]:
        """Send all, ``at_once`` at a time."""
        slots = asyncio.Semaphore(at_once)

        async def one(ask: Ask) -> Reply:
            async with slots:
                return await self.ask(ask, time.perf_counter())

        return await asyncio.gather(*map(one, asks))

    async def closed_loop(self, users: int, requests: int, groups: int) -> list[Reply]:
        """``users`` that each ask again as soon as they are answered, until ``requests`` have been answered.

        All ask about the first ``groups`` system prompts. What then still runs is answered, too. Replies come
        in the order of their ends.
        """
        replies: list[Reply] = []

        async def one(user: int) -> None:
            rng = random.Random(f"closed loop {user}")
            while len(replies) < requests:
                replies.append(await self.ask(self._traffic.any(rng, groups), time.perf_counter()))

        await asyncio.gather(*map(one, range(users)))
        return replies

    async def ask(self, ask: Ask, due: float) -> Reply:
        """Send one and read its stream to the end; never raises for what the server does."""
        reply = Reply(ask, due)
        try:
            await asyncio.wait_for(self._ask(reply), self._limit_s)
        except (OSError, ValueError, IndexError, KeyError, asyncio.IncompleteReadError, TimeoutError) as error:
            reply.fault = f"{type(error).__name__}: {error}"
        self._on_end()
        return reply

    async def _ask(self, reply: Reply) -> None:
        content = json.dumps(
            {
                "model": MODEL,
                "messages": self._traffic.messages(reply.ask),
                "max_tokens": reply.ask.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: quire\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(content) + content
            )
            await writer.drain()
            reply.status = int((await reader.readline()).split()[1])
            done = False
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    self._take(reply, json.loads(line[6:]))
                elif line.startswith(b'{"error"'):
                    self._take(reply, json.loads(line))
        finally:
            writer.close()
        if not reply.fault and not done:
            reply.fault = f"status {reply.status}, and no whole stream"
        if not reply.fault and reply.output_tokens != reply.ask.output:
            reply.fault = f"{reply.output_tokens} tokens instead of {reply.ask.output}"
        if not reply.fault:
            reply.ended = time.perf_counter()

    @staticmethod
    def _take(reply: Reply, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            reply.fault = f"status {reply.status}: {chunk['error']['message']}"
            return
        reply.name = chunk["id"]
        if chunk["choices"] and not reply.first:
            reply.first = time.perf_counter()  # the role comes with the first token
        usage = chunk.get("usage")
        if usage:
            reply.prompt_tokens = usage["prompt_tokens"]
            reply.output_tokens = usage["completion_tokens"]
            reply.cached = usage["prompt_tokens_details"]["cached_tokens"]
