"""Block maps at an ingress: one question for all viewers, two a second at most."""

from __future__ import annotations

import asyncio
import gc

import pytest
from virtual_time import loop_time, run_virtually

from app.dashboard.block_maps import EVERY_S, BlockMaps, digits, shown_names
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap


class Replicas:
    """Answer ``takes_s`` after they are asked."""

    def __init__(self, takes_s: float = 1.0) -> None:
        self.takes_s = takes_s
        self.asked: list[tuple[str, str]] = []
        self.error: Exception | None = None

    async def ask(self, model: str, replica: str, by: GroupBy) -> BlockMap:
        self.asked.append((model, replica))
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return BlockMap(1, bytes([len(self.asked)]), b"", names=(by,))


def test_viewers_share_an_answer_and_a_later_one_gets_another() -> None:
    async def test() -> None:
        replicas = Replicas()
        maps = BlockMaps(replicas.ask, loop_time)
        both = await asyncio.gather(maps.get("m", "a"), maps.get("m", "a"), maps.get("m", "b"))
        assert [found.device for found in both] == [b"\2", b"\2", b"\2"]
        assert replicas.asked == [("m", "a"), ("m", "b")]
        await asyncio.sleep(EVERY_S)
        assert (await maps.get("m", "a")).device == b"\3"
        assert len(maps._asked) == 1  # what nobody looks at is forgotten

    run_virtually(test())


def test_an_answer_is_given_again_for_a_while() -> None:
    async def test() -> None:
        replicas = Replicas(takes_s=EVERY_S / 8)
        maps = BlockMaps(replicas.ask, loop_time)
        for _ in range(3):
            assert (await maps.get("m", "a")).device == b"\1"
        await asyncio.sleep(EVERY_S)
        assert (await maps.get("m", "a")).device == b"\2"

    run_virtually(test())


def test_a_viewer_that_leaves_takes_nothing_from_the_others() -> None:
    async def test() -> None:
        replicas = Replicas()
        maps = BlockMaps(replicas.ask, loop_time)
        first = asyncio.ensure_future(maps.get("m", "a"))
        second = asyncio.ensure_future(maps.get("m", "a"))
        await asyncio.sleep(0.1)
        first.cancel()
        assert (await second).device == b"\1"
        assert first.cancelled()

    run_virtually(test())


def test_a_replica_that_fails_is_asked_again() -> None:
    async def test() -> None:
        replicas = Replicas()
        replicas.error = ConnectionError("gone")
        maps = BlockMaps(replicas.ask, loop_time)
        with pytest.raises(ConnectionError):
            await maps.get("m", "a")
        replicas.error = None
        await asyncio.sleep(EVERY_S)
        assert (await maps.get("m", "a")).device == b"\2"

    run_virtually(test())


def test_a_failure_that_no_viewer_waits_for_is_not_reported_as_forgotten() -> None:
    async def test() -> None:
        complaints: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        replicas = Replicas()
        replicas.error = ConnectionError("gone")
        maps = BlockMaps(replicas.ask, loop_time)
        viewer = asyncio.ensure_future(maps.get("m", "a"))
        await asyncio.sleep(0.1)
        viewer.cancel()
        await asyncio.sleep(2 * replicas.takes_s)
        replicas.error = None
        maps._asked.clear()
        gc.collect()
        assert replicas.asked == [("m", "a")]
        assert complaints == []

    run_virtually(test())


def test_groupings_are_asked_for_apart() -> None:
    async def test() -> None:
        maps = BlockMaps(Replicas().ask, loop_time)
        found = await asyncio.gather(*(maps.get("m", "a", by) for by in GroupBy))
        assert [one.names for one in found] == [(by,) for by in GroupBy]

    run_virtually(test())


def test_requests_of_other_tenants_have_no_names() -> None:
    found = BlockMap(1, b"", b"", names=("one", "two"), tenants=("a", "b"))
    assert shown_names(found, "b") == [None, "two"]
    assert shown_names(found, None) == ["one", "two"]
    assert shown_names(BlockMap(1, b"", b"", names=("prefix",)), "b") == ["prefix"]


def test_cells_are_digits() -> None:
    assert digits(bytes([0, 1, 2, 3, 3])) == "01233"
