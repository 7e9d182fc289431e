"""An ingress with channels to a part of the fleet, which grows while that part is not enough."""

from __future__ import annotations

import asyncio

import pytest
from engine_client_setting import collect, quiet, request, run, until
from loopback import LoopbackHandle, LoopbackReplica, expected_tokens, stepping

from app.channel.channel_set import WIDE_S, ChannelSet
from app.channel.ingress_channel import DEAD_S
from app.fleet.engine_client import EngineClient
from app.fleet.generation import UnavailableError
from app.routing.fleet import Fleet
from app.routing.subset import Subset

FLEET = 20
PART = Subset(3, 0, 10)  # two of ten ingresses for each replica, so four for each ingress


def begun(replicas: int = FLEET) -> tuple[LoopbackHandle, EngineClient]:
    handle = LoopbackHandle(replicas)
    handle.fleet.set_subset(PART)
    return handle, EngineClient(handle, unavailable_after_s=20.0)


def with_channels(handle: LoopbackHandle) -> set[str]:
    return {name for name, replica in handle.replicas.items() if replica.hub.inspect() and not replica.dead}


def settled(fleet: Fleet, handle: LoopbackHandle) -> bool:
    living = {name for name in fleet.members if not handle.replicas[name].dead}
    return with_channels(handle) == living == set(fleet.ledger.routable(fleet.members))


def test_requests_go_to_the_subset_and_calls_to_all() -> None:
    async def test() -> None:
        handle, client = begun()
        for replica in handle.replicas.values():
            replica.cached_blocks = 2
        await client.start()
        part = PART.of(frozenset(handle.replicas))
        assert len(part) < FLEET / 2
        await until(lambda: settled(handle.fleet, handle))
        async with stepping(handle):
            asked = [collect(client, request([number, 5])) for number in range(40)]
            assert await asyncio.gather(*asked) == [expected_tokens([number, 5], 30) for number in range(40)]
        used = {name for name, replica in handle.replicas.items() if replica.engine.submitted}
        assert used == with_channels(handle) == part
        status = client.status()
        assert (status["channels"].keys(), {*status["elsewhere"]}) == (part, handle.replicas.keys() - part)
        (other, *_) = set(handle.replicas) - part
        assert (await client.block_map(other)).each == 1
        reset = await client.reset_prefix_cache()
        assert reset.freed_blocks == dict.fromkeys(handle.replicas, 2)
        await client.stop()

    run(test)


def test_a_request_whose_subset_has_died_goes_on_elsewhere_and_the_subset_shrinks_again() -> None:
    async def test() -> None:
        handle, client = begun()
        await client.start()
        await until(lambda: settled(handle.fleet, handle))
        for name in handle.fleet.members:  # the controller has not noticed
            handle.replicas[name].kill()
        async with stepping(handle):
            assert await collect(client, request([1, 2])) == expected_tokens([1, 2], 30)
            wide = handle.fleet.members
            assert wide > PART.of(frozenset(handle.replicas))
            long = asyncio.ensure_future(collect(client, request([3, 4], 1500)))
            (other,) = await _running(handle)
            handle.announce(*(name for name, replica in handle.replicas.items() if not replica.dead))
            # It narrows while the long request runs: that one stays where it is, and keeps its channel.
            await asyncio.sleep(1.0)
            assert not long.done()
        await asyncio.sleep(WIDE_S + 1.0)
        narrow = PART.of(handle.fleet.known)
        assert handle.fleet.members == narrow
        await until(lambda: with_channels(handle) == narrow | {other.name})
        assert client.inspect()["moved"] == 0
        async with stepping(handle):
            assert await long == expected_tokens([3, 4], 1500)
        await until(lambda: settled(handle.fleet, handle) and quiet(handle, client))
        await client.stop()

    run(test)


async def _running(handle: LoopbackHandle) -> list[LoopbackReplica]:
    await until(lambda: any(replica.engine.live for replica in handle.replicas.values()))
    return [replica for replica in handle.replicas.values() if replica.engine.live]


def test_a_request_that_no_replica_of_the_subset_may_continue_finds_one_outside() -> None:
    async def test() -> None:
        handle, client = begun(0)
        old = [handle.add(weights=1) for _ in range(2)]
        await client.start()
        await until(lambda: settled(handle.fleet, handle))
        async with stepping(handle):
            job = asyncio.ensure_future(collect(client, request([1, 2], 3000)))
            (at,) = await _running(handle)
            (left,) = (replica for replica in old if replica is not at)
            await asyncio.sleep(0.1)  # it has got tokens
            new = [handle.add() for _ in range(FLEET)]
            names = [replica.name for replica in new]
            while left.name in PART.of(frozenset([*names, left.name])):  # it shall belong to another ingress
                names.append(handle.add().name)
            handle.announce(*names, left.name)
            await until(lambda: at.name not in handle.fleet.members and len(at.engine.live) == 1)
            at.kill()
            assert await job == expected_tokens([1, 2], 3000, weights=1)
        assert left.engine.submitted
        await client.stop()

    run(test)


def test_without_any_replica_that_lives_it_takes_all_and_says_so() -> None:
    async def test() -> None:
        handle, client = begun()
        await client.start()
        await until(lambda: settled(handle.fleet, handle))
        for replica in handle.replicas.values():
            replica.kill()
        with pytest.raises(UnavailableError, match="no engine replica became ready within 20 s"):
            await collect(client, request([1]))
        assert handle.fleet.members == handle.fleet.known
        await client.stop()

    run(test)


@pytest.mark.parametrize(("opens_after_s", "wider"), [(8.0, False), (1000.0, True)])
def test_channels_that_open_slowly_are_waited_for_before_others_are_opened(
    opens_after_s: float, wider: bool
) -> None:
    """And if they hang, the request finds a replica outside of the subset before its time is over."""

    async def test() -> None:
        handle, client = begun()
        part = PART.of(frozenset(handle.replicas))
        for name in part:
            handle.replicas[name].opens_after_s = opens_after_s
        async with stepping(handle):
            assert await collect(client, request([1, 2])) == expected_tokens([1, 2], 30)
        assert (handle.fleet.members > part) is wider
        assert (with_channels(handle) == part) is not wider
        await client.stop()

    run(test)


def test_members_that_hang_and_are_replaced_keep_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some member is always about to answer."""

    async def test() -> None:
        handle, client = begun()
        part = PART.of(frozenset(handle.replicas))
        for name in part:
            handle.replicas[name].opens_after_s = 1000.0
        monkeypatch.setattr(ChannelSet, "opening", lambda self: True)
        async with stepping(handle):
            asked = asyncio.ensure_future(collect(client, request([1, 2])))
            await asyncio.sleep(DEAD_S)
            assert not asked.done()
            assert handle.fleet.members == part
            assert await asked == expected_tokens([1, 2], 30)
            assert part < handle.fleet.members < handle.fleet.known
        await client.stop()

    run(test)


def test_what_earlier_requests_waited_for_slow_channels_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        handle, client = begun()
        await client.start()
        part = PART.of(frozenset(handle.replicas))
        monkeypatch.setattr(ChannelSet, "opening", lambda self: True)
        channels = client._parts.channels
        channels.widen(1.0)
        await asyncio.sleep(DEAD_S + 1.0)
        channels.widen(1.0)  # of another request
        assert handle.fleet.members == part
        await asyncio.sleep(DEAD_S)
        channels.widen(DEAD_S + 1.0)
        assert handle.fleet.members > part
        await client.stop()

    run(test)
