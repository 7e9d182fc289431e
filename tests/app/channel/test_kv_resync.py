"""KV events that are lost, late or too many: the index comes to know what each replica holds all the same."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Iterable

import pytest
from engine_client_setting import run, until
from kv_loopback import KvIngress, KvReplica, connected
from virtual_time import loop_time

from app.channel import ingress_channel, wire
from app.channel.engine_channel import MAX_UNACKNOWLEDGED
from app.channel.kv_outbox import MAX_BACKLOG
from app.channel.wire_sections import SLICE_KEYS, KvSection, SnapshotSlice
from engine.kv.kv_events import KvBatch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon."""
    monkeypatch.setattr(ingress_channel, "RESYNC_S", 0.02)
    monkeypatch.setattr(ingress_channel, "BEAT_S", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_lost_batch_leads_to_a_snapshot() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        ingress = await connected(replica)
        replica.step(1)
        await until(lambda: ingress.in_step(replica))
        replica.hub.change = lambda section: None if section.sequence == 2 else section
        replica.step(2)
        replica.step(3)
        await until(lambda: replica.snapshots == 2 and ingress.in_step(replica))
        assert ingress.holds(2) == ingress.holds(3) == {"r": 2}
        assert ingress.index.counters.gaps == 1
        await asyncio.sleep(0.1)  # several times as long as it waits before it asks again
        assert (replica.snapshots, ingress.closed) == (2, [])
        await ingress.stop()

    run(test)


def test_a_frame_that_is_lost_ends_the_channel() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        ingress = await connected(replica)
        replica.hub._channels["ingress"].sequence += 1
        replica.step(1)
        await until(lambda: bool(ingress.closed))
        (reason,) = ingress.closed
        assert "received frame" in reason
        await until(lambda: ingress.in_step(replica))
        assert [route.epoch for route in ingress.routes] == [1, 2]
        await ingress.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_lost_batch_is_noticed_though_nothing_follows_the_one_after_it() -> None:
    """The first answer to the request for a snapshot is lost as well; the engine is idle by then."""

    async def test() -> None:
        replica = KvReplica("r")
        ingress = await connected(replica)
        lost = iter([True, False, True])

        def lose(section: KvSection) -> KvSection | None:
            return None if next(lost, False) else section

        replica.hub.change = lose
        replica.step(1)
        await until(lambda: replica.hub.inspect()["ingress"]["frames"] > 2)
        replica.step(2)
        await until(lambda: ingress.in_step(replica))
        assert replica.snapshots == 3
        await ingress.stop()

    run(test)


def test_a_request_for_a_snapshot_that_failed_is_repeated_with_the_next_beat() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        ingress = await connected(replica)
        beat, asked = replica.hub.beat, list[float]()

        def fail_once(
            cid: str,
            epoch: int,
            acknowledged: int,
            stale: Iterable[int] = (),
            unwanted: Iterable[tuple[int, int]] = (),
            resync: bool = False,
            last: bool = False,
        ) -> bool:
            if resync:
                asked.append(loop_time())
                if len(asked) == 1:
                    raise ConnectionError("a test broke it")
            return beat(cid, epoch, acknowledged, stale, unwanted, resync, last)

        replica.hub.beat = fail_once  # type: ignore[method-assign]
        lost = iter([True])
        replica.hub.change = lambda section: None if next(lost, False) else section
        replica.step(1)
        await until(lambda: replica.hub.inspect()["ingress"]["frames"] > 2)
        replica.step(2)
        await until(lambda: ingress.in_step(replica))
        first, second = asked
        assert second - first <= 1.1 * ingress_channel.BEAT_S < ingress_channel.RESYNC_S
        await ingress.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_digest_that_differs_leads_to_a_snapshot() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        ingress = await connected(replica)

        def lose(section: KvSection) -> KvSection:
            """A key arrives wrongly."""
            if isinstance(section, KvBatch) and section.sequence == 2:
                return dataclasses.replace(section, stored=[key ^ 1 for key in section.stored])
            return section

        replica.hub.change = lose
        for text in range(4):
            replica.step(text)
            await asyncio.sleep(0)
        await until(lambda: replica.snapshots == 2 and ingress.in_step(replica))
        assert ingress.index.counters.drift == 1
        assert ingress.holds(1) == {"r": 2}
        await ingress.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_snapshot_that_is_lost_in_part_is_asked_for_again() -> None:
    async def test() -> None:
        replica = KvReplica("r", blocks=2 * SLICE_KEYS)
        replica.step(*range(SLICE_KEYS + 5))
        lost = iter([True])
        replica.hub.change = lambda section: None if next(lost, False) else section
        ingress = KvIngress(replica)
        await until(lambda: replica.snapshots == 2 and ingress.in_step(replica))
        await ingress.stop()

    run(test)


def test_a_slow_ingress_bounds_what_waits_and_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.channel.engine_channel.FLUSH_S", 0.0)

    async def test() -> None:
        replica = KvReplica("r", blocks=40)
        stream = replica.hub.stream("ingress", 1)
        sections = wire.unpack_frame(await anext(stream)).kv
        frames = 1
        while frames < MAX_UNACKNOWLEDGED:
            replica.step(frames)
            sections += wire.unpack_frame(await anext(stream)).kv
            frames += 1
            assert replica.hub.beat("ingress", 1, 0)
        waiting = asyncio.ensure_future(anext(stream))
        outbox = replica.hub._channels["ingress"].kv
        most = 0
        texts = itertools.count(1000)
        while not outbox.wanted:
            replica.step(*itertools.islice(texts, 30))
            most = max(most, outbox.backlog)
            assert replica.hub.beat("ingress", 1, 0)
        assert MAX_BACKLOG - 100 < most <= MAX_BACKLOG
        for _ in range(100):
            replica.step(next(texts))
            await asyncio.sleep(0)
        assert (outbox.backlog, bool(outbox), waiting.done(), replica.snapshots) == (0, False, False, 1)
        # It reads on: all that it missed comes as one snapshot.
        assert replica.hub.beat("ingress", 1, frames)
        arrived = wire.unpack_frame(await waiting).kv
        while not arrived:
            arrived = wire.unpack_frame(await anext(stream)).kv
        (part,) = arrived
        assert isinstance(part, SnapshotSlice)
        made = replica.events.snapshot()
        assert (part.sequence, set(part.keys), part.xor) == (made.sequence, set(made.keys), made.xor)
        assert replica.snapshots == 2
        replica.step(next(texts))
        assert [section.sequence for section in wire.unpack_frame(await anext(stream)).kv] == [
            made.sequence + 1
        ]

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_replica_that_comes_back_begins_anew() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        replica.step(1, 2)
        ingress = await connected(replica)
        assert ingress.holds(1) == {"r": 2}
        # The same replica by name, with another engine behind it.
        again = KvReplica("r")
        again.step(3)
        replica.kill()
        ingress.handle.replicas["r"] = again
        await until(lambda: len(ingress.routes) == 2 and ingress.index.synced("r"))
        assert ingress.in_step(again)
        assert (ingress.holds(1), ingress.holds(3)) == ({"r": 1}, {"r": 2})
        assert ingress.routes[1].epoch > ingress.routes[0].epoch
        await ingress.stop()
        assert ingress.index.replicas == []

    run(test)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_the_index_is_right_in_the_end(seed: int) -> None:
    async def test() -> None:
        draw = random.Random(seed)
        replicas = [KvReplica(f"r{number}", blocks=30) for number in range(2)]
        ingress = await connected(*replicas)

        def lose(section: KvSection) -> KvSection | None:
            return None if draw.random() < 0.1 else section

        for replica in replicas:
            replica.hub.change = lose
        for _ in range(200):
            replica = draw.choice(replicas)
            if draw.random() < 0.02:
                replica.index.reset()
            replica.step(*(draw.randrange(40) for _ in range(draw.randrange(3))))
            await asyncio.sleep(0 if draw.random() < 0.9 else 0.005)
        for replica in replicas:
            replica.hub.change = None
            replica.step(99)
        await until(lambda: all(map(ingress.in_step, replicas)))
        await ingress.stop()

    run(test)
