"""Clients on plain sockets: many at once, and able to vanish at any moment."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MODEL = "smollm2-135m-instruct"
WORDS = ("river", "stone", "lamp", "garden", "copper", "violin", "harbour", "winter", "pocket", "ladder")


@dataclass
class Outcome:
    """What one stream brought: ``events`` are its JSON chunks, ``done`` whether it ended with [DONE].

    ``times`` says when each chunk came, in seconds of ``time.perf_counter``.
    """

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        """All deltas of a text completion."""
        return "".join(event["choices"][0]["text"] for event in self.events if event.get("choices"))

    @property
    def finish_reason(self) -> str | None:
        """Of the last chunk with choices."""
        reasons = [event["choices"][0]["finish_reason"] for event in self.events if event.get("choices")]
        return reasons[-1] if reasons else None

    @property
    def tokens(self) -> int:
        """Of the answer, by its usage; 0 if that never came."""
        used = [event["usage"]["completion_tokens"] for event in self.events if event.get("usage")]
        return used[-1] if used else 0

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Error chunks."""
        return [event["error"] for event in self.events if "error" in event]

    @property
    def complete(self) -> bool:
        """Whether it ended as asked: with all its tokens and without an error."""
        return self.done and not self.errors and self.finish_reason == "length"

    @property
    def gaps(self) -> list[float]:
        """Seconds from each chunk to the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def prompts(count: int, seed: int = 0) -> list[str]:
    """Different prompts of a dozen words."""
    rng = random.Random(seed)
    return [f"Story {index}: the " + " ".join(rng.choices(WORDS, k=10)) for index in range(count)]


def body(prompt: str, max_tokens: int, usage: bool = False) -> bytes:
    """A greedy streaming completion of exactly ``max_tokens`` tokens that finds nothing cached.

    So that the prompts of an earlier run do not draw this one's to their replica. With ``usage`` a last chunk
    says how many tokens there were.
    """
    return json.dumps(
        {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(8),
            "stream": True,
            **({"stream_options": {"include_usage": True}} if usage else {}),
        }
    ).encode()


async def complete(
    url: str,
    prompt: str,
    max_tokens: int,
    leave_after: int | None = None,
    *,
    usage: bool = False,
    outcome: Outcome | None = None,
) -> Outcome:
    """Stream one completion; with ``leave_after`` hang up after so many chunks (0: without reading any).

    ``outcome`` is filled in and returned, if given: it has what came until an exception.
    """
    outcome = Outcome() if outcome is None else outcome
    reader, writer = await _send(url, body(prompt, max_tokens, usage))
    try:
        if leave_after == 0:
            return outcome
        outcome.status = int((await reader.readline()).split()[1])
        async for event in _events(reader):
            if event == "[DONE]":
                outcome.done = True
                break
            outcome.events.append(json.loads(event))
            outcome.times.append(time.perf_counter())
            if leave_after is not None and len(outcome.events) >= leave_after:
                break
    finally:
        writer.close()
    return outcome


async def complete_all(url: str, texts: list[str], max_tokens: int) -> list[Outcome]:
    """All at once."""
    return await asyncio.gather(*(complete(url, text, max_tokens) for text in texts))


async def vanish(
    url: str, count: int, seed: int, at_once: int = 32, on_left: Callable[[], object] | None = None
) -> int:
    """``count`` clients that hang up at random moments: before an answer, after a moment, amid the stream.

    ``on_left`` is called as each has left. Returns how many had read some of their stream.
    """
    rng = random.Random(seed)
    slots = asyncio.Semaphore(at_once)

    async def one(prompt: str, chunks: int, delay_s: float) -> None:
        async with slots:
            if chunks:
                await complete(url, prompt, 200, leave_after=chunks)
            else:
                _, writer = await _send(url, body(prompt, 200))
                await asyncio.sleep(delay_s)
                writer.close()
            if on_left is not None:
                on_left()

    plans = [(rng.choice((0, 0, 1, 2, 5)), rng.random() * 0.2) for _ in range(count)]
    await asyncio.gather(*(one(text, *plan) for text, plan in zip(prompts(count, seed), plans, strict=True)))
    return sum(chunks > 0 for chunks, _ in plans)


async def _send(url: str, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: quire\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n" % len(content) + content
    )
    await writer.drain()
    return reader, writer


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Data of the server-sent events; chunked coding puts its lengths on lines of their own."""
    while line := await reader.readline():
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()
        elif line.startswith(b"{"):
            yield line.strip().decode()
