"""Both ends of the channels in one process: the transport behaves as Serve's does, replicas can be broken.

The engine behind it makes token ``(sum of the original prompt + position in the output) % 1000``, one for each
request and ``step``, so every test knows what must arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator
from types import SimpleNamespace
from typing import Any

from app import wire
from app.channel_engine import ChannelHub, run_attempt
from app.routing import fleet
from engine.request import FinishReason, ModelLimits, Request, TokenDelta, validate

LIMITS = ModelLimits(vocab_size=1000, max_model_len=10_000, num_blocks=10_000, block_size=16)
_names = itertools.count()


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the engine makes of ``prompt``."""
    return [(sum(prompt) + index) % LIMITS.vocab_size for index in range(count)]


class CountingEngine:
    """See the module; ``step`` delivers as an engine step does."""

    def __init__(self) -> None:
        self.hub: ChannelHub
        self.live: dict[str, Request] = {}
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        validate(request.token_ids, request.params, LIMITS, request.generated_before)
        self.live[request.request_id] = request

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def step(self) -> None:
        deltas = []
        for request in list(self.live.values()):
            index = request.num_generated
            prompt = request.token_ids[: request.num_prompt_tokens - request.generated_before]
            token = expected_tokens(prompt, index + 1)[-1]
            request.token_ids.append(token)
            done = request.num_generated == request.params.max_tokens
            if done:
                del self.live[request.request_id]
            deltas.append(
                TokenDelta(
                    request.request_id, index, (token,), FinishReason.LENGTH if done else None, cached_tokens=4
                )
            )
        self.hub.deliver(deltas)


class LoopbackReplica:
    """One engine replica; ``kill`` breaks every call to it, now and later."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = CountingEngine()
        self.hub = ChannelHub(wire.Hello(LIMITS), self.engine.abort)
        self.engine.hub = self.hub
        self.dead = False
        self.calls: set[asyncio.Task[Any]] = set()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        return task

    def kill(self) -> None:
        self.dead = True
        self.engine.live.clear()
        for call in list(self.calls):
            call.cancel("replica died")


class LoopbackResponse(Awaitable[Any]):
    """A unary response: awaited, or cancelled."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise ConnectionError("the replica is unavailable")
        return self._task.result()

    def cancel(self) -> None:
        self._task.cancel()


class LoopbackStream:
    """A streaming response; as with Serve, the replica's generator runs ahead into an unbounded queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self.task: asyncio.Task[Any] | None = None

    async def pump(self, stream: AsyncIterator[bytes]) -> None:
        try:
            async for frame in stream:
                self.queue.put_nowait(frame)
            self.queue.put_nowait(None)
        except asyncio.CancelledError:
            self.queue.put_nowait(ConnectionError("the stream broke"))
            raise
        except Exception as error:  # noqa: BLE001  (carried to the reader)
            self.queue.put_nowait(error)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def __aiter__(self) -> LoopbackStream:
        return self

    async def __anext__(self) -> bytes:
        item = await self.queue.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            raise StopAsyncIteration
        return item

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class LoopbackHandle:
    """A Serve handle of the engine deployment, and the router behind it."""

    def __init__(self, replicas: int) -> None:
        self.deployment_id = SimpleNamespace(app_name=f"loopback-{next(_names)}", name="engine")
        self.fleet = fleet.of(self.deployment_id.app_name)
        self.replicas: dict[str, LoopbackReplica] = {}
        self.channel = SimpleNamespace(remote=self._channel)
        self.generate = SimpleNamespace(remote=self._generate)
        self.beat = SimpleNamespace(remote=self._beat)
        for _ in range(replicas):
            self.add()

    def options(self, **_: Any) -> LoopbackHandle:
        return self

    def add(self) -> LoopbackReplica:
        replica = LoopbackReplica(f"replica-{len(self.replicas)}")
        self.replicas[replica.name] = replica
        self.announce(*self.replicas)
        return replica

    def announce(self, *names: str) -> None:
        """The controller's word on who is a member."""
        self.fleet.set_members(frozenset(names))

    def step(self) -> None:
        for replica in self.replicas.values():
            if not replica.dead:
                replica.engine.step()

    def _channel(self, cid: str, epoch: int, *, target: str) -> LoopbackStream:
        stream, replica = LoopbackStream(), self.replicas[target]
        if replica.dead:
            stream.queue.put_nowait(ConnectionError("the replica is unavailable"))
        else:
            stream.task = replica.run(stream.pump(replica.hub.stream(cid, epoch)))
        return stream

    def _generate(self, cid: str, payload: bytes, *, meta: dict[str, Any]) -> LoopbackResponse:
        async def route_and_run() -> Any:
            await asyncio.sleep(0)  # the router has a loop of its own
            booking = self.fleet.ledger.book(
                meta["request_id"],
                meta["attempt"],
                meta["prefill"],
                meta["decode"],
                self.fleet.members,
                meta["avoid"],
            )
            replica = self.replicas[booking.route.replica]
            if replica.dead:
                raise ConnectionError("the replica is unavailable")
            call = replica.run(run_attempt(replica.hub, replica.engine, cid, booking.route.epoch, payload))
            try:
                return await LoopbackResponse(call)
            finally:
                call.cancel()

        return LoopbackResponse(asyncio.get_running_loop().create_task(route_and_run()))

    def _beat(
        self, cid: str, epoch: int, acknowledged: int, stale: list[int], *, target: str
    ) -> LoopbackResponse:
        async def beat() -> bool:
            replica = self.replicas[target]
            if replica.dead:
                raise ConnectionError("the replica is unavailable")
            return replica.hub.beat(cid, epoch, acknowledged, stale)

        return LoopbackResponse(asyncio.get_running_loop().create_task(beat()))


@contextlib.asynccontextmanager
async def stepping(handle: LoopbackHandle) -> AsyncIterator[None]:
    """Engines that step by themselves."""

    async def steps() -> None:
        while True:
            handle.step()
            await asyncio.sleep(0.001)

    task = asyncio.get_running_loop().create_task(steps())
    try:
        yield
    finally:
        task.cancel()
