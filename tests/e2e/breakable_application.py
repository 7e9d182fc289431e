"""The application with engine replicas that can be broken from inside, or be unlike each other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from paced_model import PACE, keep_pace
from ray.serve import Application

from app import application
from app.channel import wire
from app.channel.address import Address
from app.channel.channel_server import ChannelOwner
from app.channel.engine_channel import EngineChannel
from app.config import ServedModel
from app.replica import EngineReplica

POISON = 4711
"""An engine dies of a prompt that begins with this token."""

DIES_AFTER_S = 0.2
NOTICED_S = 3.0
"""``stuck_after_s`` of a replica whose engine a test has stuck."""

POOLS = "pools.json"
"""In the model's folder: the blocks of each replica, in the order in which they start."""


class BreakableReplica(EngineReplica):
    """Dies, gets stuck or slow, or runs out of memory on request."""

    async def __init__(self, model: ServedModel) -> None:  # type: ignore[misc]
        folder = Path(model.options.service.model)
        if (folder / PACE).exists():
            keep_pace(folder)
        pools = folder / POOLS
        if pools.is_file():
            engine = dataclasses.replace(model.options.engine, num_blocks=_take(pools))
            model = dataclasses.replace(model, options=model.options.model_copy(update={"engine": engine}))
        self._delay_s = 0.0
        self._most_tokens: int | None = None
        self._computed: list[int] = []  # tokens of each computation since the last order
        self._sampled: list[tuple[int, float]] = []  # rows and processor time of each choice, likewise
        self._attempts = self._submitted = 0
        await super().__init__(model)
        self._server.run = self._counted(self._server.run)
        runner = self._engine._engine.runner  # type: ignore[union-attr]
        runner.run = self._delayed(runner.run)  # type: ignore[method-assign]
        runner.decoder.forward = self._limited(runner.decoder.forward)  # type: ignore[method-assign]
        runner.sampler.sample = self._timed(runner.sampler.sample)  # type: ignore[method-assign]

    async def generate(self, cid: str, payload: bytes, *, meta: dict[str, int]) -> dict[str, Any]:
        """Run one attempt, and die if it is of a poisonous request."""
        self._attempts += 1
        if wire.unpack_submission(payload).token_ids[0] == POISON:
            self._loop.call_later(DIES_AFTER_S, self._engine._inbox.put, object())
        return await super().generate(cid, payload, meta=meta)

    async def stick_engine(self, *, target: str) -> None:
        """Make the engine's next step never end."""
        engine = self._engine._engine
        assert engine is not None
        engine.step = threading.Event().wait  # type: ignore[assignment]
        self._watchdog.stuck_after_s = NOTICED_S

    async def cut_channels(self, *, target: str) -> None:
        """End every channel, as a connection that breaks would."""
        for channel in list(self._hub._channels.values()):
            self._hub.close(channel, "a test cut it")

    async def refuse_connections(self, *, target: str) -> None:
        """Have channels offer a port on which nothing listens, and end those that have a connection."""
        expect = self._server.expect

        def expect_elsewhere(channel: EngineChannel, owner: ChannelOwner) -> Address | None:
            address = expect(channel, owner)
            return None if address is None else dataclasses.replace(address, port=1)

        self._server.expect = expect_elsewhere  # type: ignore[method-assign]
        await self.cut_channels(target=target)

    async def attempts(self, *, target: str) -> tuple[int, int]:
        """How many attempts have come on connections, and how many through Serve."""
        return self._submitted, self._attempts - self._submitted

    async def slow_down(self, seconds: float, *, target: str) -> None:
        """Have each step of the engine take so much longer from now on."""
        self._delay_s = seconds

    async def limit_memory(self, most: int | None, *, target: str) -> list[int]:
        """Have the device's memory suffice for ``most`` tokens at a time, or for all.

        Returns how many each computation since the order before was of.
        """
        self._most_tokens = most
        computed, self._computed = self._computed, []
        return computed

    async def sampling_s(self, rows: int, *, target: str) -> float:
        """The least processor time that a choice for ``rows`` rows took since the order before."""
        sampled, self._sampled = self._sampled, []
        return min((seconds for count, seconds in sampled if count == rows), default=math.inf)

    def _counted(
        self, run: Callable[[str, int, bytes], Awaitable[dict[str, Any]]]
    ) -> Callable[[str, int, bytes], Awaitable[dict[str, Any]]]:
        def counted(cid: str, epoch: int, payload: bytes) -> Awaitable[dict[str, Any]]:
            self._submitted += 1
            return run(cid, epoch, payload)

        return counted

    def _delayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*how: Any) -> Any:
            time.sleep(self._delay_s)
            return run(*how)

        return delayed

    def _limited(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        import torch  # not in the process that builds the application

        def limited(token_ids: torch.Tensor, *how: Any) -> Any:
            if self._most_tokens is not None:
                self._computed.append(len(token_ids))
                if len(token_ids) > self._most_tokens:
                    raise torch.OutOfMemoryError("a test has taken the memory")
            return forward(token_ids, *how)

        return limited

    def _timed(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def timed(logits: Any, rows: Any) -> Any:
            began = time.thread_time()
            try:
                return sample(logits, rows)
            finally:
                self._sampled.append((len(rows), time.thread_time() - began))

        return timed


def _take(pools: Path) -> int:
    """The first size that no other replica has taken; the last one for all beyond."""
    sizes: list[int] = json.loads(pools.read_text())
    for place in itertools.count():
        with contextlib.suppress(FileExistsError):
            pools.with_suffix(f".{place}").touch(exist_ok=False)
            return sizes[min(place, len(sizes) - 1)]
    raise AssertionError


def give_pools_back(model: Path) -> None:
    """The next replicas of ``model`` take its first sizes again."""
    for taken in model.glob(f"{Path(POOLS).stem}.[0-9]*"):
        taken.unlink()


def build(args: dict[str, Any]) -> Application:
    """See ``app.application.build``."""
    return application.build_with(args, BreakableReplica)
