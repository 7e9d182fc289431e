"""Requests leave a stopping or cordoned replica a few at a time, and go where they can stay."""

from __future__ import annotations

import asyncio

from engine_client_setting import collect, quiet, request, run, started, until
from loopback import LoopbackReplica, expected_tokens, stepping

from app.fleet import drain
from app.routing.requirement import Build

PROMPT = [1] * 2000


def live(*replicas: LoopbackReplica) -> list[int]:
    return [len(replica.engine.live) for replica in replicas]


def test_long_requests_move_as_fast_as_others_compute_their_prompts() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (old,) = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index, *PROMPT], 400))) for index in range(6)]
        jobs.append(asyncio.ensure_future(collect(client, request([9], 400))))
        await until(lambda: live(old) == [7])
        for _ in range(3):
            handle.step()
        new = handle.add()
        handle.announce(new.name)
        await asyncio.sleep(drain.LEAVE_AFTER_S - 0.1)
        assert live(old, new) == [7, 0]
        await asyncio.sleep(1.0)
        # A quarter of a second at an unknown rate, 1,250 tokens: the short one, and none of the long ones.
        assert live(old, new) == [6, 1]
        new.engine.step()
        await asyncio.sleep(0.5)
        assert live(old, new) == [5, 2]
        async with stepping(handle):
            await until(lambda: live(old) == [0])
            outcomes = await asyncio.gather(*jobs)
        assert outcomes == [
            *(expected_tokens([index, *PROMPT], 400) for index in range(6)),
            expected_tokens([9], 400),
        ]
        await until(lambda: quiet(handle, client) and not old.hub.inspect())
        await client.stop()

    run(test)


def test_a_request_that_gets_nowhere_does_not_stop_the_drain() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (old,) = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index, *PROMPT], 50))) for index in range(3)]
        await until(lambda: live(old) == [3])
        new = handle.add()
        handle.announce(new.name)
        await asyncio.sleep(drain.LEAVE_AFTER_S + 2.5 * drain.PATIENCE_S)  # and the new engine makes no step
        assert live(old, new) == [0, 3]
        async with stepping(handle):
            await asyncio.gather(*jobs)
        await client.stop()

    run(test)


def test_what_moves_goes_to_replicas_that_stay() -> None:
    async def test() -> None:
        handle, client = await started(4)
        first, cordoned, victim, stays = handle.replicas.values()
        await client.cordon([cordoned.name, victim.name, stays.name], 600, after_s=600)
        jobs = [asyncio.ensure_future(collect(client, request([index], 300))) for index in range(8)]
        await until(lambda: live(first) == [8])
        handle.step()
        await client.cordon([first.name, cordoned.name, victim.name], 600, after_s=600)
        jobs += [asyncio.ensure_future(collect(client, request([*PROMPT, index], 300))) for index in range(8)]
        await until(lambda: live(stays) == [8])
        await client.cordon([cordoned.name], 600, after_s=600)
        handle.fleet.likely_victims.set([victim.name], 600)
        handle.announce(cordoned.name, victim.name, stays.name)
        await until(lambda: live(first) == [0])
        await until(lambda: sum(live(cordoned, victim, stays)) == 16)
        assert live(cordoned, victim, stays) == [0, 0, 16], "however much is to do there"
        async with stepping(handle):
            await asyncio.gather(*jobs)
        await client.stop()

    run(test)


def test_a_request_moves_to_a_likely_victim_where_no_other_is_left() -> None:
    async def test() -> None:
        handle, client = await started(2)
        first, victim = handle.replicas.values()
        handle.fleet.likely_victims.set([victim.name], 600)
        job = asyncio.ensure_future(collect(client, request([3], 300)))
        await until(lambda: live(first) == [1])
        handle.announce(victim.name)
        await until(lambda: live(victim) == [1])
        async with stepping(handle):
            assert await job == expected_tokens([3], 300)
        await client.stop()

    run(test)


def test_while_a_redeploy_rolls_streams_move_once() -> None:
    async def test() -> None:
        handle, client = await started(0)
        old = [handle.add(build=Build("old", float(place))) for place in range(3)]
        await until(lambda: len(handle.fleet.ledger.routable()) == 3)
        jobs = [asyncio.ensure_future(collect(client, request([index], 300))) for index in range(9)]
        await until(lambda: live(*old) == [3, 3, 3])
        new = handle.add(build=Build("new", 9.0))
        await until(lambda: len(handle.fleet.ledger.routable()) == 4)
        await client.cordon([replica.name for replica in old], 600, after_s=600)
        jobs += [asyncio.ensure_future(collect(client, request([index], 300))) for index in range(9, 18)]
        await until(lambda: live(*old, new) == [3, 3, 3, 9])
        await client.cordon([], 0)
        handle.announce(*[replica.name for replica in (*old[1:], new)])
        await until(lambda: live(old[0]) == [0])
        await until(lambda: sum(live(*old, new)) == 18)
        assert live(*old, new) == [0, 3, 3, 12]
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 300) for index in range(18)]
        await client.stop()

    run(test)
