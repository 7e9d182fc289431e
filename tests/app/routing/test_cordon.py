"""Cordoned replicas get nothing new, and what runs there for long goes on elsewhere."""

from __future__ import annotations

import asyncio

import pytest
from engine_client_setting import collect, quiet, request, run, started, until
from loopback import LoopbackHandle, expected_tokens, stepping

from app.fleet import drain
from app.routing.fleet import Fleet
from app.routing.ledger import Route
from app.routing.timed_set import TimedSet


class Clock:
    """Set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(drain, "CHECK_EVERY_S", 0.005)


def live(handle: LoopbackHandle) -> list[int]:
    return [len(replica.engine.live) for replica in handle.replicas.values()]


def test_a_cordon_ends_by_itself_and_goes_on_when_repeated() -> None:
    clock = Clock()
    cordon = TimedSet(clock)
    assert cordon.names() == frozenset()
    cordon.set({"a", "b"}, 10)
    clock.now += 6
    cordon.set({"b", "c"}, 10)
    assert cordon.names() == {"b", "c"}
    assert cordon.longer_than(5) == {"b"}, "b has been cordoned all the while, c has just come"
    clock.now += 10
    assert cordon.names() == frozenset()
    assert cordon.longer_than(0) == frozenset()
    cordon.set({"b"}, 10)
    assert cordon.longer_than(5) == frozenset(), "after a break it begins anew"
    cordon.set({"b"}, 0)
    assert cordon.names() == frozenset()
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="cannot last"):
            cordon.set({"b"}, wrong)


def test_cordoned_replicas_take_requests_only_when_no_other_can() -> None:
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.ledger.open(Route(name, 1))
    members = ["a", "b", "c"]
    assert fleet.eligible(members) == members
    fleet.cordon.set({"a"}, 60)
    assert set(fleet.eligible(members)) == {"b", "c"}
    fleet.ledger.suspect("b", True)
    assert set(fleet.eligible(["a", "b"])) == {"a", "b"}, "b cannot take it, so a may"
    fleet.cordon.set({"a", "b", "c"}, 60)
    assert set(fleet.eligible(members)) == {"a", "b", "c"}
    assert list(fleet.eligible([])) == []


def test_new_requests_pass_a_cordoned_replica_by_until_the_cordon_ends() -> None:
    async def test() -> None:
        handle, client = await started(2)
        first, _ = handle.replicas.values()
        await client.cordon([first.name], 60)
        assert client.status()["cordoned"] == [first.name]
        jobs = [asyncio.ensure_future(collect(client, request([index], 50))) for index in range(8)]
        await until(lambda: sum(live(handle)) == 8)
        assert live(handle) == [0, 8]
        await client.cordon([], 0)
        jobs += [asyncio.ensure_future(collect(client, request([index], 50))) for index in range(8)]
        await until(lambda: sum(live(handle)) == 16)
        assert live(handle) == [8, 8]
        async with stepping(handle):
            await asyncio.gather(*jobs)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_requests_leave_a_replica_that_is_cordoned_for_long(quick: None) -> None:
    async def test() -> None:
        handle, client = await started(2)
        first, second = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 400))) for index in range(8)]
        await until(lambda: live(handle) == [4, 4])
        async with stepping(handle):
            await client.cordon([first.name], 60, after_s=0.05)
            await asyncio.sleep(0.01)
            assert live(handle) == [4, 4], "not at once: most end by themselves"
            await until(lambda: live(handle) == [0, 8])
            assert client.status()["channels"] == {first.name: "open", second.name: "open"}
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 400) for index in range(8)]
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_a_cordon_without_another_replica_ends_no_request(quick: None) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([3], 200)))
        async with stepping(handle):
            await until(lambda: bool(only.engine.live))
            await client.cordon([only.name], 60, after_s=0.0)
            await asyncio.sleep(0.03)
            assert only.engine.live
            assert not only.engine.aborted
            later = asyncio.ensure_future(collect(client, request([4], 5)))
            assert await later == expected_tokens([4], 5)
            handle.add()
            await until(lambda: not only.engine.live)
            assert await job == expected_tokens([3], 200)
            assert only.engine.aborted, "it moved as soon as another one could take it"
        await client.stop()

    run(test)


def test_a_cordon_that_is_lifted_in_time_moves_nothing(quick: None) -> None:
    async def test() -> None:
        handle, client = await started(2)
        first, _ = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 60))) for index in range(4)]
        await until(lambda: live(handle) == [2, 2])
        await client.cordon([first.name], 60, after_s=0.2)
        await client.cordon([], 60, after_s=0.0)
        await asyncio.sleep(0.02)
        async with stepping(handle):
            await asyncio.gather(*jobs)
        assert not first.engine.aborted
        with pytest.raises(ValueError, match="after_s is -1 but must be at least 0"):
            await client.cordon([first.name], 60, after_s=-1)
        await client.stop()

    run(test)
