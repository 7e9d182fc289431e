"""A background task that fails makes its replica unhealthy, whichever it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engine_client_setting import collect, request, run, started, until
from loopback import LIMITS, expected_tokens, stepping

from app.background import Background, BackgroundError
from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.fleet.overload import OverloadControl
from app.replica import EngineReplica
from app.watchdog import Watchdog


async def fail() -> None:
    raise ValueError("a defect")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_failure_stays(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        background = Background()
        background.start("first", fail())
        await settled()
        background.start("second", fail())
        await settled()
        for _ in range(2):
            with pytest.raises(BackgroundError, match="'first' ended with an error: ValueError: a defect"):
                background.check()

    asyncio.run(test())
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [
        True
    ] * 2


def test_neither_an_end_nor_a_cancellation_is_a_failure() -> None:
    async def test() -> None:
        background = Background()
        background.start("ends", asyncio.sleep(0))
        background.start("runs", asyncio.sleep(3600)).cancel()
        await settled()
        background.check()

    asyncio.run(test())


def test_a_thread_that_ends_is_a_failure() -> None:
    background, end = Background(), threading.Event()
    thread = threading.Thread(target=end.wait, name="worker")
    thread.start()
    background.watch(thread)
    background.check()
    end.set()
    thread.join(20)
    with pytest.raises(BackgroundError, match="'worker' has ended"):
        background.check()


def engine_replica(background: Background, watchdog: Any) -> EngineReplica:
    """As after ``__init__``, without a cluster."""
    replica = object.__new__(EngineReplica)
    replica._death = None
    replica._engine = SimpleNamespace(is_alive=lambda: True, stop=lambda timeout: None)  # type: ignore[assignment]
    replica._watchdog = watchdog
    replica._background = background
    return replica


@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")
def test_an_engine_replica_whose_watchdog_fails_is_unhealthy() -> None:
    class Broken:
        def is_alive(self) -> bool:
            return True

        def progress(self) -> None:
            raise RuntimeError("no progress is known")

    async def test() -> None:
        background = Background()
        hub = ChannelHub(wire.Hello(LIMITS), lambda name: None)
        watchdog = Watchdog(Broken(), hub, 10.0)  # type: ignore[arg-type]
        replica = engine_replica(background, watchdog)
        await replica.check_health()
        background.start("watchdog", watchdog.run())
        await settled()
        with pytest.raises(BackgroundError, match=r"'watchdog'.*no progress is known"):
            await replica.check_health()

    asyncio.run(test())


def test_overload_control_that_fails_is_noticed() -> None:
    async def test() -> None:
        background = Background()
        control = OverloadControl(clock=broken_after(1))
        control.start(background)
        await settled()
        with pytest.raises(BackgroundError, match="overload control"):
            background.check()

    asyncio.run(test())


def broken_after(calls: int) -> Callable[[], float]:
    left = [calls]

    def clock() -> float:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no clock")
        return 0.0

    return clock


def test_an_engine_that_dies_leaves_the_ingress_healthy() -> None:
    async def test() -> None:
        handle, client = await started(2)
        await until(lambda: client.status()["routable"] == 2)
        first = next(iter(handle.replicas.values()))
        channel = client._parts.channels._channels[first.name]
        epoch = channel._epoch
        first.kill()  # Serve goes on to name it for a while
        await until(lambda: channel._epoch >= epoch + 3 or bool(client._background._failure))
        client._background.check()
        async with stepping(handle):
            assert await collect(client, request([5], 3)) == expected_tokens([5], 3)
        await client.stop()

    run(test)


@pytest.mark.parametrize("part", ["drain", "channel"])
def test_parts_of_the_engine_client_that_fail_are_noticed(part: str) -> None:
    async def test() -> None:
        handle, client = await started(2)
        first = next(iter(handle.replicas))
        await until(lambda: client.status()["routable"] == 2)
        client._background.check()
        if part == "drain":
            client._parts.drainer.leaving = broken_after(0)  # type: ignore[assignment]
            await client.cordon([first], 60.0)
        else:
            channel = client._parts.channels._channels[first]
            channel._next_epoch = broken_after(0)  # type: ignore[assignment]
            channel.fail(channel._epoch, "the test ends it")
        await until(lambda: bool(client._background._failure))
        with pytest.raises(BackgroundError, match=part):
            client._background.check()
        await client.stop()

    run(test)


@pytest.mark.parametrize("part", ["lease", "snapshot"])
def test_a_channel_ends_with_a_part_of_it_and_the_next_one_opens(part: str) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (replica,) = handle.replicas.values()
        (channel,) = replica.hub._channels.values()
        replica.hub._start(channel, part, fail())
        await until(lambda: f"{part} of channel" in channel.closed)
        async with stepping(handle):
            assert await collect(client, request([5], 8)) == expected_tokens([5], 8)
        await client.stop()

    run(test)
