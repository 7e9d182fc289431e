"""Both ends of the channels in one process: the transport behaves as Serve's does, replicas can be broken.

The engine behind it makes token ``(sum of the prompt + position in the output + 100 * sequence) % 1000``
for each sequence and ``step``, so every test knows what must arrive. Of several sequences each is one token
shorter than the one before it; ranked ones come whole, once the first has all its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterator
from types import SimpleNamespace
from typing import Any

from loopback_connection import LoopbackServer
from ray.serve.exceptions import RequestCancelledError
from virtual_time import loop_time

from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.channel.engine_attempt import run_attempt
from app.routing import fleet
from app.routing.replica_state import Route
from app.routing.requirement import UNKNOWN_BUILD, Build
from app.routing.routing_meta import RoutingMeta
from app.routing.timed_set import TimedSet
from engine.kv.block_map import BlockMap
from engine.models.identity import ModelIdentity
from engine.request import FinishReason, ModelLimits, Request, RequestStats, TokenDelta, validate

LIMITS = ModelLimits(vocab_size=1000, max_model_len=10_000, num_blocks=10_000, block_size=16)
STATS = RequestStats(0.25, 0.5)
"""Of each request that gets a token; it is preempted once before its end."""

CONNECTS = False
"""Whether channels get connections of their own, in memory; the fixture ``connected`` sets it."""

_names = itertools.count()


def expected_tokens(prompt: list[int], count: int, sequence: int = 0, weights: int = 0) -> list[int]:
    """What the engine makes of ``prompt``; ``count`` is the request's ``max_tokens``."""
    first = sum(prompt) + weights
    return [token_at(first, index, sequence) for index in range(count - sequence)]


def token_at(first: int, index: int, sequence: int = 0) -> int:
    """One of a sequence's tokens; ``first`` is the sum of the prompt and the weights."""
    return (first + 100 * sequence + index) % LIMITS.vocab_size


def prompt_of(request: Request) -> list[int]:
    """Without what an attempt before has generated."""
    return request.token_ids[: len(request.token_ids) - request.generated_before]


def model(weights: int = 0) -> ModelIdentity:
    """The identity of a model that adds ``weights`` to each token."""
    return ModelIdentity(f"weights-{weights}", "float32", "tokenizer")


class CountingEngine:
    """See the module; ``step`` delivers as an engine step does. ``weights`` is added to each token."""

    def __init__(self, limits: ModelLimits = LIMITS, weights: int = 0) -> None:
        self.hub: ChannelHub
        self.limits = limits
        self.weights = weights
        self.live: dict[str, Request] = {}
        self.made: dict[str, dict[int, int]] = {}  # tokens that each live sequence has
        self.firsts: dict[str, int] = {}  # of each request, for ``token_at``
        self.aborted: list[str] = []
        self.ended: list[tuple[str, int]] = []  # sequences
        self.submitted: list[str] = []

    def submit(self, request: Request) -> None:
        self.submitted.append(request.request_id)
        validate(request.token_ids, request.params, self.limits, request.generated_before)
        self.live[request.request_id] = request
        if request.outputs:
            for sequence, output in enumerate(request.outputs):
                whole = expected_tokens(
                    request.token_ids, request.params.max_tokens or 0, sequence, self.weights
                )
                assert output is None or list(output) == whole[: len(output)]
            made = {i: len(output) for i, output in enumerate(request.outputs) if output is not None}
        else:
            made = {0: request.generated_before, **dict.fromkeys(range(1, request.params.n), 0)}
        self.made[request.request_id] = made
        self.firsts[request.request_id] = sum(prompt_of(request)) + self.weights

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def end_sequence(self, request_id: str, number: int) -> None:
        made = self.made.get(request_id, {})
        if number in made:
            self.ended.append((request_id, number))
            index = made.pop(number)
            if not made:
                del self.live[request_id], self.made[request_id]
            self.hub.deliver(
                [TokenDelta(request_id, index, (), FinishReason.STOP, 4, sequence=number, final=not made)]
            )

    def step(self) -> None:
        deltas: list[TokenDelta] = []
        for request in list(self.live.values()):
            deltas += self._advance(request)
        self.hub.deliver(deltas)

    def _advance(self, request: Request) -> Iterator[TokenDelta]:
        name, params, made = request.request_id, request.params, self.made[request.request_id]
        first = self.firsts[name]
        assert params.max_tokens is not None
        for sequence in sorted(made, reverse=True):
            index = made[sequence]
            made[sequence] = index + 1
            if params.ranked:
                continue
            reason = None
            assert index < params.max_tokens - sequence
            if index + 1 == params.max_tokens - sequence:
                reason = FinishReason.LENGTH
                del made[sequence]
            token = token_at(first, index, sequence)
            delta = TokenDelta(name, index, (token,), reason, 4, sequence=sequence, final=not made)
            if sequence == 0 and index == request.generated_before:
                delta.stats = STATS
            elif reason is not None:
                delta.stats = STATS._replace(preemptions=1)
            yield delta
        if params.ranked and made[0] == params.max_tokens:
            made.clear()
            for sequence in range(params.n):
                whole = expected_tokens(prompt_of(request), params.max_tokens, sequence, self.weights)
                final = sequence == params.n - 1
                yield TokenDelta(
                    name, 0, tuple(whole), FinishReason.LENGTH, 4, sequence=sequence, final=final, score=0.0
                )
        if not made:
            del self.live[name], self.made[name]


class LoopbackReplica:
    """One engine replica; ``kill`` breaks every call to it, now and later.

    Channels open after ``opens_after_s``.
    """

    def __init__(
        self,
        name: str,
        limits: ModelLimits = LIMITS,
        weights: int = 0,
        build: Build = UNKNOWN_BUILD,
        gate: asyncio.Event | None = None,
    ) -> None:
        self.name = name
        self.engine = CountingEngine(limits, weights)
        hello = wire.Hello(limits, model=model(weights), build=build)
        self.server = LoopbackServer(self._generate, gate) if CONNECTS and gate is not None else None
        self.hub = ChannelHub(
            hello,
            self.engine.abort,
            clock=loop_time,
            end_sequence=self.engine.end_sequence,
            server=self.server,
        )
        self.engine.hub = self.hub
        self.dead = False
        self.opens_after_s = 0.0
        self.cached_blocks = 0
        self.calls: set[asyncio.Task[Any]] = set()

    async def _generate(self, cid: str, epoch: int, payload: bytes) -> dict[str, Any]:
        return await run_attempt(self.hub, self.engine, cid, epoch, payload)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        return task

    def kill(self) -> None:
        self.dead = True
        self.engine.live.clear()
        if self.server is not None:
            self.server.closed = True
            self.server.cut()
        for call in list(self.calls):
            call.cancel("replica died")


class LoopbackResponse(Awaitable[Any]):
    """A unary response: awaited, or canceled."""

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
        if self._task.done() and not self._task.cancelled():
            self._task.result()  # as with Serve, which raises why a call could not be sent
        self._task.cancel()


class LoopbackStream:
    """A streaming response; as with Serve, the replica's generator runs ahead into an unbounded queue."""

    def __init__(self, handle: LoopbackHandle) -> None:
        self.queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._handle = handle
        self.task: asyncio.Task[Any] | None = None
        self.unsent: Exception | None = None  # why the call could not be sent
        self.cancelled = False

    async def pump(self, stream: AsyncIterator[bytes], after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
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
        try:
            item = await self.queue.get()
            await self._handle.running.wait()
        except asyncio.CancelledError:
            if self.cancelled:
                raise RequestCancelledError("of Serve") from None
            raise
        if isinstance(item, BaseException):
            raise item
        if item is None:
            raise StopAsyncIteration
        return item

    def cancel(self) -> None:
        if self.unsent is not None:
            raise self.unsent
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


class LoopbackHandle:
    """A Serve handle of the engine deployment, and the router behind it."""

    def __init__(self, replicas: int) -> None:
        self.deployment_id = SimpleNamespace(app_name=f"loopback-{next(_names)}", name="engine")
        self.fleet = fleet.get_fleet(self.deployment_id.app_name)
        self.fleet.cordon, self.fleet.likely_victims = TimedSet(loop_time), TimedSet(loop_time)
        self.replicas: dict[str, LoopbackReplica] = {}
        self.channel = SimpleNamespace(remote=self._channel)
        self.generate = SimpleNamespace(remote=self._generate)
        self.beat = SimpleNamespace(remote=self._beat)
        self.reset_prefix_cache = SimpleNamespace(remote=self._reset_prefix_cache)
        self.block_map = SimpleNamespace(remote=self._block_map)
        self.running = asyncio.Event()  # the ingress's process is not stopped: its frames and beats pass
        self.running.set()
        for _ in range(replicas):
            self.add()

    def options(self, **_: Any) -> LoopbackHandle:
        return self

    def add(
        self, limits: ModelLimits = LIMITS, weights: int = 0, build: Build = UNKNOWN_BUILD
    ) -> LoopbackReplica:
        replica = LoopbackReplica(f"replica-{len(self.replicas)}", limits, weights, build, self.running)
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

    def _channel(
        self, cid: str, epoch: int, resumption: bytes, connects: bool, *, target: str
    ) -> LoopbackStream:
        stream, replica = LoopbackStream(self), self.replicas[target]
        if replica.dead:
            stream.unsent = ConnectionError("the replica is unavailable")
            stream.queue.put_nowait(stream.unsent)
        else:
            stream.task = replica.run(
                stream.pump(replica.hub.stream(cid, epoch, resumption, connects), replica.opens_after_s)
            )
        return stream

    def _generate(self, cid: str, payload: bytes, *, meta: Route | RoutingMeta) -> LoopbackResponse:
        async def route_and_run() -> Any:
            await asyncio.sleep(0)  # the router has a loop of its own
            route = meta if isinstance(meta, Route) else self.fleet.book(meta).route
            if route.replica not in self.fleet.known:
                raise fleet.NotAcceptedError(f"{route.replica} has left")
            replica = self.replicas[route.replica]
            if replica.dead:
                raise ConnectionError("the replica is unavailable")
            call = replica.run(run_attempt(replica.hub, replica.engine, cid, route.epoch, payload))
            try:
                return await LoopbackResponse(call)
            finally:
                call.cancel()

        return LoopbackResponse(asyncio.get_running_loop().create_task(route_and_run()))

    def _beat(
        self,
        cid: str,
        epoch: int,
        acknowledged: int,
        stale: list[int],
        unwanted: list[tuple[int, int]],
        resync: bool,
        last: bool,
        *,
        target: str,
    ) -> LoopbackResponse | None:
        replica = self.replicas[target]

        async def beat() -> bool:
            await self.running.wait()
            if replica.dead:
                raise ConnectionError("the replica is unavailable")
            return replica.hub.beat(cid, epoch, acknowledged, stale, unwanted, resync, last)

        def beat_of_nobody() -> None:
            if not replica.dead:
                replica.hub.beat(cid, epoch, acknowledged, stale, unwanted, resync, last)

        loop = asyncio.get_running_loop()
        if last:  # its sender ends, perhaps with the loop, in which a task would be left
            loop.call_soon(beat_of_nobody)
            return None
        return LoopbackResponse(loop.create_task(beat()))

    def _reset_prefix_cache(self, *, target: str) -> LoopbackResponse:
        async def reset() -> int:
            replica = self.replicas[target]
            if replica.dead:
                raise ConnectionError("the replica is unavailable")
            freed, replica.cached_blocks = replica.cached_blocks, 0
            return freed

        return LoopbackResponse(asyncio.get_running_loop().create_task(reset()))

    def _block_map(self, by: str, keys: list[int], *, target: str) -> LoopbackResponse:
        async def answer() -> BlockMap:
            replica = self.replicas[target]
            if replica.dead:
                raise ConnectionError("the replica is unavailable")
            return BlockMap(1, bytes(replica.cached_blocks), b"", names=(by, *map(str, keys)))

        return LoopbackResponse(asyncio.get_running_loop().create_task(answer()))


@contextlib.asynccontextmanager
async def stepping(handle: LoopbackHandle, every_s: float = 0.001) -> AsyncIterator[None]:
    """Engines that step by themselves."""

    async def steps() -> None:
        while True:
            handle.step()
            await asyncio.sleep(every_s)

    task = asyncio.get_running_loop().create_task(steps())
    try:
        yield
    finally:
        task.cancel()
