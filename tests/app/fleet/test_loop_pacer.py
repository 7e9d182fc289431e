"""Turns of a busy loop: few go on in each, clients round robin, first come, first served."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from engine_client_setting import quiet, request, run, started, until
from loopback import expected_tokens

from app.fleet.engine_client import EVENTS_PER_TURN
from app.fleet.loop_pacer import LoopPacer


def test_a_few_go_on_in_each_turn_in_their_order() -> None:
    async def test() -> None:
        now = 5.0
        loop = asyncio.get_running_loop()
        pacer, woken = LoopPacer(3, lambda: now), []
        for index in range(8):
            pacer.call(lambda index=index: woken.append(index) is None, loop)
            now += 1.0
        assert pacer.lag_s == 8.0
        seen = []
        while len(woken) < 8:
            await asyncio.sleep(0)
            seen.append(len(woken))
        assert woken == list(range(8))
        assert [count for count in seen if count] == [3, 6, 8]
        assert pacer.lag_s == 0.0
        again: asyncio.Future[None] = loop.create_future()
        pacer.call(lambda: again.set_result(None) is None, loop)
        await asyncio.wait_for(again, 60.0)

    asyncio.run(test())


def test_one_that_raises_keeps_no_other_from_its_turn() -> None:
    async def test() -> None:
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        pacer = LoopPacer(1)
        last: asyncio.Future[None] = loop.create_future()
        fault = ZeroDivisionError()

        def fail() -> bool:
            raise fault

        pacer.call(fail, loop)
        pacer.call(lambda: last.set_result(None) is None, loop)
        await asyncio.wait_for(last, 60.0)
        assert told == [fault]

    asyncio.run(test())


def test_clients_pass_in_turn_and_one_in_each_turn_of_the_loop() -> None:
    async def test() -> None:
        now = 5.0
        pacer, passed = LoopPacer(1, lambda: now), []

        async def enter(client: str) -> None:
            await pacer.enter(client)
            passed.append(client)

        async with asyncio.TaskGroup() as tasks:
            for client in "aaaabbc":
                tasks.create_task(enter(client))
            await asyncio.sleep(0)
            now = 7.0
            tasks.create_task(enter("d"))
            await asyncio.sleep(0)
            assert (pacer.waited_s("b"), pacer.waited_s("d"), pacer.waited_s("e")) == (2.0, 0.0, 0.0)
            assert pacer.lag_s == 2.0
            seen = []
            while len(passed) < 8:
                await asyncio.sleep(0)
                seen.append(len(passed))
        assert "".join(passed) == "aabcadba"
        assert all(after - before <= 1 for before, after in pairwise(seen))
        assert pacer.lag_s == pacer.waited_s("a") == 0.0
        await enter("a")  # it is free again
        await enter("a")

    asyncio.run(test())


def test_the_loop_may_have_several_turns_for_others_between_two() -> None:
    async def test() -> None:
        pacer, passed = LoopPacer(1, every=4), []
        for index in range(3):
            pacer.call(lambda index=index: passed.append(index) is None, asyncio.get_running_loop())
        seen = []
        while len(passed) < 3:
            await asyncio.sleep(0)
            seen.append(len(passed))
        assert [seen.count(count) for count in (1, 2)] == [4, 4]

    asyncio.run(test())


def test_whoever_leaves_takes_no_turn() -> None:
    async def test() -> None:
        pacer = LoopPacer(1)
        await pacer.enter("a")
        waiting = [asyncio.ensure_future(pacer.enter(client)) for client in "abc"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        for _ in range(2):
            await asyncio.sleep(0)
        assert waiting[2].done()
        assert not pacer._waiting
        await asyncio.wait_for(pacer.enter("a"), 60.0)

    asyncio.run(test())


def test_the_turn_of_the_last_one_who_waited_is_not_free() -> None:
    async def test() -> None:
        pacer = LoopPacer(1)
        loop = asyncio.get_running_loop()
        last: asyncio.Future[None] = loop.create_future()
        pacer.call(lambda: last.set_result(None) is None, loop)
        await last
        newcomer = pacer.enter("a")
        newcomer.send(None)  # it waits, or this would raise
        newcomer.close()

    asyncio.run(test())


def test_a_loop_that_ends_takes_no_turn_of_the_next_one() -> None:
    pacer = LoopPacer(1, every=4)
    asyncio.run(pacer.enter("a"))

    async def two() -> None:
        for _ in range(2):
            await asyncio.wait_for(pacer.enter("a"), 60.0)

    asyncio.run(two())


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
