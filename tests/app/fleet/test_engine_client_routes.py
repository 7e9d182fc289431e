"""What counts as a replica's failure, and whose records count."""

from __future__ import annotations

import asyncio

from engine_client_setting import collect, quiet, request, run, started, until
from loopback import expected_tokens, stepping

from app.channel import wire
from app.fleet.faults import MAX_DEATHS


def test_planned_stops_are_no_failures_however_many_a_request_outlives() -> None:
    async def test() -> None:
        handle, client = await started(1)
        job = asyncio.ensure_future(collect(client, request([3], 40)))
        for _ in range(MAX_DEATHS + 2):
            old = list(handle.replicas.values())[-1]
            await until(lambda old=old: bool(old.engine.live))  # type: ignore[misc]
            handle.step()
            new = handle.add()
            handle.announce(old.name, new.name)
            await until(lambda: len(handle.fleet.ledger.routable()) == 2)
            handle.announce(new.name)
            await until(lambda old=old: not old.hub.inspect())  # type: ignore[misc]
        async with stepping(handle):
            assert await job == expected_tokens([3], 40)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_a_record_from_an_old_channel_is_not_accepted() -> None:
    """Even if it is the one that is due: the engine at its end may have made other tokens."""

    async def test() -> None:
        handle, client = await started(1)
        job = asyncio.ensure_future(collect(client, request([3], 10)))
        (replica,) = handle.replicas.values()
        await until(lambda: bool(replica.engine.live))
        (name,) = replica.engine.live
        attempt = int(name.rpartition(":")[2])
        booking = handle.fleet.ledger.booking(attempt)
        assert booking is not None
        route = booking.route
        stale = type(route)(route.replica, route.epoch - 1)
        assert client.on_records(stale, [wire.Record(attempt, 0, [999])]) == []
        async with stepping(handle):
            assert await job == expected_tokens([3], 10)
        await client.stop()

    run(test)
