"""The client of all load tests: streams completions and chats over HTTP as real clients do.

Headers and body go out apart, connections are kept alive, and answers are read as they come (httpx). A client
can hang up at any moment and read slowly. An answer of another instance than the client's counts as a fault.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from loadtests.arrivals import closed_loop
from loadtests.workloads import prompts

MODEL = "smollm2-135m-instruct"
CONNECT_LIMIT_S = 30.0
SENT = "http11.send_request_body.complete"
OK, UNAVAILABLE = 200, 503
INSTANCE = "x-quire-instance"


@dataclass(slots=True)
class Outcome:
    """What one request brought. Times are seconds of ``time.perf_counter``, 0 for what never came.

    ``events`` are the JSON chunks of a stream, or the one error in its place, ``times`` say when they came.
    """

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False  # [DONE] came
    model: str = ""  # asked for
    foreign: str = ""  # the instance that answered, if it is another than the client's
    asked: int = 0  # tokens
    began: float = 0.0
    ended: float = 0.0
    broken: str = ""  # the connection, or the form of the answer

    def take(self, line: str) -> None:
        """One line of the body.

        Raises:
            ValueError: its data is no JSON.
        """
        if not line.startswith("data: "):
            return
        if line.startswith("data: [DONE]"):
            self.done = True
        else:
            self._add(json.loads(line.removeprefix("data: ")))

    def named(self, headers: httpx.Headers, instance: str) -> None:
        """Look at who answered. Without a healthy ingress HAProxy itself does, with a 503 and no name."""
        name = headers.get(INSTANCE, "")
        if instance and name != instance and (name or self.status != UNAVAILABLE):
            self.foreign = name or "without a name"

    def refuse(self, body: bytes) -> None:
        try:
            self._add(json.loads(body))
        except ValueError:
            self.broken = body.decode(errors="replace")[:300]

    def _add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.times.append(time.perf_counter())

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        """All that was said, of a completion or a chat."""
        return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in self.choices)

    @property
    def finish_reason(self) -> str | None:
        return self.choices[-1]["finish_reason"] if self.choices else None

    @property
    def usage(self) -> dict[str, Any]:
        """The last one reported; empty without."""
        return next((event["usage"] for event in reversed(self.events) if event.get("usage")), {})

    @property
    def tokens(self) -> int:
        """Of the answer, by its usage; 0 if that never came."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def fault(self) -> str:
        """What is wrong with the answer, in words; empty for a whole stream."""
        if self.broken:
            return self.broken
        if self.errors:
            return f"status {self.status}: {self.errors[0]['message']}"
        if self.foreign:
            return f"an answer of another server, {self.foreign}"
        if self.status != OK or not self.done:
            return f"status {self.status}, and no whole stream: no [DONE]"
        return "" if self.finish_reason else "the stream ended without a finish reason"

    @property
    def complete(self) -> bool:
        """Whether it is whole and ended by its length, as asked."""
        return not self.fault and self.finish_reason == "length"

    @property
    def whole(self) -> bool:
        """Whether it brought exactly the tokens that were asked for."""
        return self.complete and self.tokens == self.asked

    @property
    def first(self) -> float:
        """When the first token came."""
        return next(iter(self._token_times), 0.0)

    @property
    def last(self) -> float:
        """When the last token came."""
        return next(reversed(self._token_times), 0.0)

    @property
    def _token_times(self) -> list[float]:
        return [at for at, event in zip(self.times, self.events, strict=True) if event.get("choices")]

    def record(self, user: str) -> dict[str, Any]:
        """Of a whole stream: when it began, since the epoch, and its figures, for the load tests' report."""
        tokens, began = self.tokens, time.time() - (time.perf_counter() - self.began)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tpot = (self.last - self.first) / max(tokens - 1, 1)
        row = {"at": began, "ttft": self.first - self.began, "tpot": tpot, "output": tokens, "user": user}
        return {**row, "prompt": self.usage["prompt_tokens"], "cached": cached, "took": self.ended - self.began}

    @property
    def gaps(self) -> list[float]:
        """Seconds from each chunk to the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def body_of(outcome: Outcome, **fields: Any) -> dict[str, Any]:
    """A request for a stream with its usage at the end, greedy, unless ``fields`` say otherwise."""
    given = {"model": outcome.model or MODEL, "max_tokens": outcome.asked, "temperature": 0, "stream": True}
    body: dict[str, Any] = {**given, **fields}
    return {**body, "stream_options": {"include_usage": True}} if body["stream"] else body


class Client:
    """Keeps its connections to one server; to be used in one event loop, as a context manager.

    What the server does never raises: an outcome says what came and what was wrong.
    """

    def __init__(
        self, url: str, instance: str = "", limit_s: float | None = None, model: str = MODEL, key: str = ""
    ) -> None:
        """``instance``, if any, must answer. ``limit_s`` bounds each request, and ``key`` goes with it."""
        self.model = model
        self._instance = instance
        self._limit_s = limit_s
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=CONNECT_LIMIT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"authorization": f"Bearer {key}"} if key else {},
            trust_env=False,
            verify=url.startswith("https:"),  # loading certificates takes longer than a request
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: str | list[int], max_tokens: int, **how: Any) -> Outcome:
        """A greedy completion of exactly ``max_tokens`` tokens; see ``stream`` for ``how``.

        It finds nothing cached, so that the prompts of an earlier run do not draw this one's to their replica.
        """
        salt = secrets.token_hex(8)
        return await self.stream(
            "/v1/completions", max_tokens, prompt=prompt, ignore_eos=True, cache_salt=salt, **how
        )

    async def chat(self, messages: Sequence[dict[str, str]], max_tokens: int, **how: Any) -> Outcome:
        """A greedy answer of exactly ``max_tokens`` tokens; see ``stream`` for ``how``."""
        return await self.stream("/v1/chat/completions", max_tokens, messages=messages, ignore_eos=True, **how)

    async def stream(
        self,
        path: str,
        max_tokens: int,
        *,
        leave_after: int | None = None,
        leave_s: float | None = None,
        pause_s: float = 0.0,
        outcome: Outcome | None = None,
        **fields: Any,
    ) -> Outcome:
        """Send one request with the ``fields`` of its body and read its stream.

        Hang up after ``leave_after`` chunks, or ``leave_s`` after the request has been sent, whatever came.
        Rest for ``pause_s`` after each chunk. ``outcome`` is filled in, to be looked at while the stream runs.
        """
        outcome = Outcome() if outcome is None else outcome
        outcome.model, outcome.asked, outcome.began = self.model, max_tokens, time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limit_s) as limit:

                async def trace(event: str, _: object) -> None:
                    if event == SENT and leave_s is not None:
                        limit.reschedule(loop.time() + leave_s)

                body = body_of(outcome, **fields)
                extensions = {} if leave_s is None else {"trace": trace}
                async with self._http.stream("POST", path, json=body, extensions=extensions) as response:
                    outcome.status = response.status_code
                    outcome.named(response.headers, self._instance)
                    if response.status_code != OK:
                        outcome.refuse(await response.aread())
                        return outcome
                    async for line in response.aiter_lines():
                        outcome.take(line)
                        if leave_after is not None and len(outcome.events) >= leave_after:
                            break
                        if pause_s and line:
                            await asyncio.sleep(pause_s)
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            outcome.broken = f"{type(error).__name__}: {error}"
        finally:
            outcome.ended = time.perf_counter()
        return outcome


async def complete(url: str, prompt: str, max_tokens: int, *, instance: str = "", **how: Any) -> Outcome:
    """One completion, on a connection of its own; see ``Client.stream`` for ``how``."""
    async with Client(url, instance) as client:
        return await client.complete(prompt, max_tokens, **how)


async def complete_all(
    url: str, prompts: Sequence[Any], max_tokens: int, instance: str = "", **options: Any
) -> list[Outcome]:
    """All at once; ``options`` are those of :class:`Client`."""
    async with Client(url, instance, **options) as client:
        return await asyncio.gather(*(client.complete(prompt, max_tokens) for prompt in prompts))


async def vanish(url: str, count: int, seed: int, instance: str = "", at_once: int = 32) -> int:
    """``count`` clients that hang up at random moments: before an answer, after a moment, amid the stream.

    A third waits for a whole answer. Returns how many had read some of their stream.
    """
    rng = random.Random(seed)
    plans = [
        (text, rng.choice((0, 0, 0, 1, 2, 5)), rng.random() * 0.3, index % 3 > 0)
        for index, text in enumerate(prompts(count, seed))
    ]

    async def one(plan: tuple[str, int, float, bool]) -> bool:
        text, chunks, delay_s, stream = plan
        how: dict[str, Any] = {"leave_after": chunks} if chunks and stream else {"leave_s": delay_s}
        how["stream"] = stream
        return bool((await client.complete(text, 200, **how)).events)

    async with Client(url, instance) as client:
        return sum(await closed_loop(at_once, plans, one))


def stream_blocking(
    http: httpx.Client, path: str, outcome: Outcome, instance: str = "", **fields: Any
) -> Outcome:
    """``Client.stream`` for a thread or greenlet of its own; ``outcome`` says model and tokens."""
    outcome.began = time.perf_counter()
    try:
        with http.stream("POST", path, json=body_of(outcome, **fields)) as response:
            outcome.status = response.status_code
            outcome.named(response.headers, instance)
            if response.status_code != OK:
                outcome.refuse(response.read())
                return outcome
            for line in response.iter_lines():
                outcome.take(line)
    except (httpx.HTTPError, ValueError) as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    finally:
        outcome.ended = time.perf_counter()
    return outcome
