"""Fleets of which only some replicas can be connected to: each attempt goes the way of its replica."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import pytest
from engine_client_setting import (
    break_at_random,
    calls_through_serve,
    collect,
    connected,
    quiet,
    request,
    until,
)
from engine_client_setting import run as run_test
from loopback import LoopbackHandle, expected_tokens, stepping

from app.channel.ingress_channel import RECONNECT_S
from app.fleet.engine_client import EngineClient

CONNECTED = (True,)
"""See ``conftest``."""

BLOCKED = "replica-0"


def block(handle: LoopbackHandle, name: str, blocked: bool = True) -> None:
    """Whether connections to a replica are refused from now on; one that it has breaks."""
    server = handle.replicas[name].server
    assert server is not None
    server.closed = blocked
    if blocked:
        server.cut()


async def started_partly(replicas: int = 3) -> tuple[LoopbackHandle, EngineClient]:
    """A client with a connection to each replica but one."""
    handle = LoopbackHandle(replicas)
    block(handle, BLOCKED)
    client = EngineClient(handle, unavailable_after_s=60.0)
    await client.start()
    await until(lambda: len(handle.fleet.ledger.routable()) == replicas and connected(client, BLOCKED))
    return handle, client


def live(handle: LoopbackHandle) -> dict[str, int]:
    return {name: len(replica.engine.live) for name, replica in handle.replicas.items()}


def test_only_attempts_whose_replica_lacks_a_connection_go_through_serve() -> None:
    """Whichever way it goes, an attempt counts once, and from its choice on."""

    async def test() -> None:
        handle, client = await started_partly()
        through_serve = calls_through_serve(handle)
        jobs = [asyncio.ensure_future(collect(client, request([index]))) for index in range(12)]
        await until(lambda: sum(live(handle).values()) == 12)
        assert live(handle) == dict.fromkeys(handle.replicas, 4), "the two ways see each other's load"
        assert handle.fleet.routed == live(handle)
        assert Counter(route.replica for route in through_serve) == {BLOCKED: 4}
        booked = client.status()["booked_tokens"]
        assert len(set(booked.values())) == 1
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 30) for index in range(12)]
        assert [len(replica.engine.submitted) for replica in handle.replicas.values()] == [4, 4, 4]
        await until(lambda: quiet(handle, client))
        assert client._parts.attempts.budget.resubmitted == 0
        assert client.inspect()["call_faults"] == 0
        await client.stop()

    run_test(test)


def test_connections_that_come_and_go_cost_no_token_and_no_attempt() -> None:
    async def test() -> None:
        handle, client = await started_partly()
        through_serve = calls_through_serve(handle)
        jobs = [asyncio.ensure_future(collect(client, request([index], 9000))) for index in range(9)]
        await until(lambda: live(handle) == dict.fromkeys(handle.replicas, 3))
        async with stepping(handle, 0.01):
            assert [route.replica for route in through_serve] == [BLOCKED] * 3
            block(handle, "replica-1")
            await until(lambda: connected(client, BLOCKED, "replica-1"))
            block(handle, BLOCKED, False)
            await asyncio.sleep(2 * RECONNECT_S)
            await until(lambda: connected(client, "replica-1"))
            through_serve.clear()
            late = [collect(client, request([100 + index])) for index in range(9)]
            assert await asyncio.gather(*late) == [expected_tokens([100 + index], 30) for index in range(9)]
            assert [route.replica for route in through_serve] == ["replica-1"] * 3
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 9000) for index in range(9)]
        assert client._parts.attempts.budget.resubmitted == 0
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)


def test_a_replica_that_leaves_before_its_call_is_routed_gets_nothing() -> None:
    """Its channel is still open, and the attempt goes to another one, without blame."""

    async def test() -> None:
        handle, client = await started_partly(2)
        send = handle.generate.remote
        blocked, other = handle.replicas.values()

        def leave_first(*arguments: Any, **named: Any) -> Any:
            handle.announce(other.name)
            return send(*arguments, **named)

        handle.generate.remote = leave_first
        jobs = [asyncio.ensure_future(collect(client, request([index]))) for index in range(2)]
        await until(lambda: len(other.engine.live) == 2)
        assert blocked.engine.submitted == []
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 30) for index in range(2)]
        assert client.inspect()["call_faults"] == 0
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)


@pytest.mark.parametrize("name", [BLOCKED, "replica-1"], ids=["through Serve", "connected"])
def test_streams_of_a_replica_that_dies_go_on_either_way(name: str) -> None:
    async def test() -> None:
        handle, client = await started_partly()
        jobs = [asyncio.ensure_future(collect(client, request([index], 200))) for index in range(9)]
        await until(lambda: live(handle) == dict.fromkeys(handle.replicas, 3))
        async with stepping(handle):
            await asyncio.sleep(0.05)
            handle.replicas[name].kill()
            handle.announce(*(other for other in handle.replicas if other != name))
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 200) for index in range(9)]
        assert client._parts.attempts.budget.resubmitted == 3
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_breaks_texts_are_whole_and_no_booking_is_left(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        handle, client = await started_partly()

        async def come_and_go() -> None:
            while True:
                await asyncio.sleep(rng.random() * 0.02)
                alive = [name for name, replica in handle.replicas.items() if not replica.dead]
                block(handle, rng.choice(alive), rng.random() < 0.5)

        changes = asyncio.ensure_future(come_and_go())
        async with stepping(handle):
            faults = asyncio.ensure_future(break_at_random(handle, rng))
            jobs = [collect(client, request([index], 150)) for index in range(20)]
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 150) for index in range(20)]
            await faults
        changes.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await changes
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)
