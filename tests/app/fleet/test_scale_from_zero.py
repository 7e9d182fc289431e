"""A fleet that sleeps is woken by one call for all requests that wait, and by none when nobody does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from engine_client_setting import collect, quiet, request, run, until
from loopback import LoopbackHandle, LoopbackResponse, expected_tokens, stepping

from app.fleet import scale_from_zero
from app.fleet.engine_client import EngineClient
from app.fleet.generation import CannotStartError, UnavailableError
from app.fleet.scale_from_zero import ReplicaWaiter


class SleepingHandle(LoopbackHandle):
    """With a router that holds ``wake`` calls while there is no replica. ``error`` fails the next one."""

    def __init__(self, replicas: int = 0) -> None:
        super().__init__(replicas)
        self.wake = SimpleNamespace(remote=self._wake)
        self.queued: set[object] = set()
        self.calls = 0
        self.error: Exception | None = None

    def _wake(self, *, wait: bool) -> LoopbackResponse:
        async def held() -> bool:
            call = object()
            self.queued.add(call)
            try:
                await until(lambda: bool(self.fleet.members))
                return wait
            finally:
                self.queued.discard(call)

        self.calls += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return LoopbackResponse(asyncio.get_running_loop().create_task(held()))


async def sleeping(**options: Any) -> tuple[SleepingHandle, EngineClient]:
    handle = SleepingHandle()
    client = EngineClient(handle, **{"unavailable_after_s": 60.0, "to_zero": True, **options})
    await client.start()
    return handle, client


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_from_zero, "RETRY_S", 0.0)


def test_the_first_request_wakes_and_is_answered() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        assert client.status()["asleep"]
        first = asyncio.ensure_future(collect(client, request([1])))
        await until(lambda: len(handle.queued) == 1)
        handle.add()
        async with stepping(handle):
            assert await first == expected_tokens([1], 30)
        await until(lambda: quiet(handle, client))
        assert not handle.queued
        assert not client.status()["asleep"]
        await client.stop()

    run(test)


def test_one_call_for_all_that_wait_until_the_last_has_gone() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        waiting = [asyncio.ensure_future(collect(client, request([n], name=str(n)))) for n in range(5)]
        await until(lambda: client.status()["live_requests"] == 5 and len(handle.queued) == 1)
        for one in waiting[1:]:
            one.cancel()
        await until(lambda: client.status()["live_requests"] == 1)
        await asyncio.sleep(0)
        assert (len(handle.queued), handle.calls) == (1, 1)
        waiting[0].cancel()
        await until(lambda: not handle.queued)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert client._waiter._task is None
        assert handle.calls == 1
        await client.stop()

    run(test)


def test_it_calls_again_while_no_channel_opens() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        handle.error = ConnectionError("no router")
        waiting = asyncio.ensure_future(collect(client, request([1])))
        await until(lambda: len(handle.queued) == 1)
        assert handle.calls == 2, "the failed call was not repeated"
        handle.add().kill()
        await until(lambda: handle.calls > 2)
        handle.announce()
        await until(lambda: len(handle.queued) == 1)
        handle.add()
        async with stepping(handle):
            assert await waiting == expected_tokens([1], 30)
        await until(lambda: not handle.queued)
        await client.stop()

    run(test)


def test_it_falls_asleep_and_wakes_again() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        for n in range(3):
            waiting = asyncio.ensure_future(collect(client, request([n])))
            await until(lambda: len(handle.queued) == 1)
            name = handle.add().name
            handle.announce(name)
            async with stepping(handle):
                assert await waiting == expected_tokens([n], 30)
            handle.announce()
            await until(lambda: client.status()["asleep"])
        await client.stop()

    run(test)


def test_who_waits_in_vain_is_told_so_and_health_says_it_until_a_replica_comes() -> None:
    async def test() -> None:
        handle, client = await sleeping(unavailable_after_s=0.01)
        with pytest.raises(UnavailableError, match=r"within 0\.01 s"):
            await collect(client, request([1]))
        assert not client.status()["asleep"]
        await until(lambda: not handle.queued)
        name = handle.add().name
        handle.announce(name)
        await until(lambda: client.status()["routable"] == 1)
        handle.announce()
        await until(lambda: client.status()["replicas"] == 0)
        assert client.status()["asleep"]
        await client.stop()

    run(test)


@pytest.mark.parametrize(
    ("error", "defects"),
    [
        (ConnectionError("planted"), 0),
        (ZeroDivisionError(), 1),
        (TypeError("EngineReplica.wake() got an unexpected keyword argument 'wait'"), 0),
        (TypeError("got an unexpected keyword argument"), 1),
    ],
)
def test_a_defect_in_a_wake_up_call_is_counted_and_the_call_repeated(error: Exception, defects: int) -> None:
    async def test() -> None:
        handle, client = await sleeping()
        handle.error = error
        waiting = asyncio.ensure_future(collect(client, request([1])))
        await until(lambda: len(handle.queued) == 1)
        assert client.inspect()["call_faults"] == defects
        waiting.cancel()
        await until(lambda: not handle.queued)
        await client.stop()

    run(test)


def test_what_waits_for_limits_wakes_too() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        waiting = asyncio.ensure_future(client.first_limits(60.0))
        await until(lambda: len(handle.queued) == 1)
        handle.add()
        assert await waiting is not None
        await until(lambda: not handle.queued)
        await client.stop()

    run(test)


def test_who_waits_for_limits_in_vain_is_seen_in_the_status() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        assert await client.first_limits(0.01) is None
        assert not client.status()["asleep"]
        await until(lambda: not handle.queued)
        await client.stop()

    run(test)


@pytest.mark.parametrize("to_zero", [True, False])
def test_who_waits_for_what_cannot_start_is_told_at_once_and_why(to_zero: bool) -> None:
    """And Serve is asked again for the next request: it may have started one."""
    found = "ConfigError: planted"

    async def start_failure() -> str:
        return found

    async def test() -> None:
        handle, client = await sleeping(to_zero=to_zero, start_failure=start_failure)
        for _ in range(2):
            with pytest.raises(CannotStartError, match="can start: ConfigError: planted"):
                await client.first_limits(1e9)
            with pytest.raises(CannotStartError, match="can start: ConfigError: planted"):
                await collect(client, request([1]))
        await until(lambda: not handle.queued)
        assert client._waiter._looking is None
        nonlocal found
        found = ""
        waiting = asyncio.ensure_future(client.first_limits(60.0))
        await until(lambda: client._waiter._looking is not None)
        assert not waiting.done()
        handle.add()
        assert await waiting is not None
        await client.stop()

    run(test)


def test_a_question_that_is_still_open_is_not_asked_again() -> None:
    async def test() -> None:
        asked, answer = 0, asyncio.Event()

        async def start_failure() -> str:
            nonlocal asked
            asked += 1
            await answer.wait()
            return "ConfigError: planted"

        waiter = ReplicaWaiter(None, start_failure=start_failure)
        for _ in range(3):
            assert not await waiter.wait_until(lambda: False, 5.0)
        assert (asked, waiter.failure) == (1, "")
        answer.set()
        assert not await waiter.wait_until(lambda: False, 5.0)
        assert waiter.failure == "ConfigError: planted"

    run(test)


def test_a_failed_start_beside_a_replica_that_runs_ends_no_request() -> None:
    async def start_failure() -> str:
        return "ConfigError: planted"

    async def test() -> None:
        handle, client = await sleeping(start_failure=start_failure)
        handle.add()
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
            assert not await client._waiter.wait_until(lambda: False, 0.01)
        assert client._waiter.failure == ""
        await client.stop()

    run(test)


def test_stopping_ends_the_call() -> None:
    async def test() -> None:
        handle, client = await sleeping()
        waiting = asyncio.ensure_future(collect(client, request([1])))
        early = asyncio.ensure_future(client.first_limits(60.0))
        await until(lambda: len(handle.queued) == 1)
        await client.stop()
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting
        await until(lambda: not handle.queued)
        early.cancel()

    run(test)


def test_a_fleet_that_never_sleeps_is_not_woken() -> None:
    async def test() -> None:
        handle = SleepingHandle()
        client = EngineClient(handle, unavailable_after_s=0.01)
        await client.start()
        with pytest.raises(UnavailableError):
            await collect(client, request([1]))
        assert handle.calls == 0
        assert not client.status()["asleep"]
        await client.stop()

    run(test)
