"""Streams on a busy loop: few in each turn, those that have waited longest first, all that has come at once."""

from __future__ import annotations

import asyncio

from engine_client_setting import quiet, request, run, started, until
from loopback import expected_tokens

from app.fleet.engine_client import EVENTS_PER_TURN
from app.fleet.turns import Turns


def test_a_few_go_on_in_each_turn_in_their_order() -> None:
    async def test() -> None:
        now = 5.0
        turns, woken = Turns(3, lambda: now), []
        futures = [asyncio.get_running_loop().create_future() for _ in range(8)]
        for index, future in enumerate(futures):
            future.add_done_callback(lambda _, index=index: woken.append(index))
            turns.wake(future)
            now += 1.0
        assert turns.lag_s == 8.0
        seen = []
        while len(woken) < 8:
            await asyncio.sleep(0)
            seen.append(len(woken))
        assert woken == list(range(8))
        assert [count for count in seen if count] == [3, 6, 8]
        assert turns.lag_s == 0.0
        again: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns.wake(again)
        await asyncio.wait_for(again, 1.0)

    asyncio.run(test())


def test_whoever_leaves_holds_nobody_up() -> None:
    async def test() -> None:
        turns = Turns(1)
        gone, stays = (asyncio.get_running_loop().create_future() for _ in range(2))
        turns.wake(gone)
        turns.wake(stays)
        gone.cancel()
        await asyncio.wait_for(stays, 1.0)

    asyncio.run(test())


def test_an_ingress_that_is_behind_serves_all_streams_alike() -> None:
    """A token for each stream comes with every turn of the loop, and each turn serves a part of the streams."""
    count, tokens = 5 * EVENTS_PER_TURN, 40

    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        events = [0] * count
        turn = most = 0

        async def read(index: int) -> list[int]:
            nonlocal most
            made: list[int] = []
            before = began = -1
            async for delta in client.generate(request([index], tokens)):
                made += delta.token_ids
                events[index] += 1
                began = began if before >= 0 else turn
                before = turn
            most = max(most, (before - began) // max(events[index] - 1, 1))
            return made

        jobs = [asyncio.ensure_future(read(index)) for index in range(count)]
        await until(lambda: len(only.engine.live) == count)
        lag = 0.0
        while not all(job.done() for job in jobs):
            handle.step()
            turn += 1
            await asyncio.sleep(0)
            lag = max(lag, client.lag_s())
        assert [job.result() for job in jobs] == [expected_tokens([index], tokens) for index in range(count)]
        assert 1 < max(events) <= min(events) + 1 < tokens / 3
        assert 4 <= most <= 6
        assert lag > 0.0
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)
