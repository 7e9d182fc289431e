"""KV events on channels: the index at the other end knows what each replica holds, whatever goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from kv_loopback import SCHEME, KvIngress, KvReplica
from loopback import LIMITS
from relay_setting import until

from app import channel_ingress, wire
from app.channel import MAX_UNACKNOWLEDGED
from app.channel_kv import FLUSH_RECORDS, MAX_BACKLOG, KvOutbox
from app.wire_kv import SLICE_KEYS, KvSection, SnapshotSlice
from engine.kv_events import KvBatch, KvSnapshot
from engine.request import FinishReason, TokenDelta


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon."""
    monkeypatch.setattr(channel_ingress, "RESYNC_S", 0.02)
    monkeypatch.setattr(channel_ingress, "BEAT_S", 0.02)


async def connected(*replicas: KvReplica) -> KvIngress:
    ingress = KvIngress(*replicas)
    await until(lambda: all(ingress.index.synced(replica.name) for replica in replicas))
    return ingress


def test_a_new_channel_begins_with_what_is_there_and_goes_on_from_there() -> None:
    async def test() -> None:
        one, two = KvReplica("one"), KvReplica("two")
        one.step(5)
        ingress = await connected(one, two)
        assert ingress.holds(5) == {"one": 2, "two": 0}
        two.step(5, 6)
        one.step(7)
        await until(lambda: ingress.in_step(one) and ingress.in_step(two))
        assert ingress.holds(5) == {"one": 2, "two": 2}
        assert ingress.holds(6) == {"one": 1, "two": 2}
        assert ingress.holds(8) == {"one": 1, "two": 1}
        one.index.reset()
        one.step()
        await until(lambda: ingress.in_step(one))
        assert ingress.holds(7) == {"one": 0, "two": 1}
        assert one.snapshots == two.snapshots == 1
        await ingress.stop()

    run(test)


def test_evictions_arrive() -> None:
    async def test() -> None:
        replica = KvReplica("r", blocks=3)
        ingress = await connected(replica)
        for text in range(20):
            replica.step(text)
        await until(lambda: ingress.in_step(replica))
        assert ingress.holds(19) == {"r": 2}
        assert sum(ingress.holds(text)["r"] == 2 for text in range(20)) == len(replica.index) - 1
        assert replica.snapshots == 1
        await ingress.stop()

    run(test)


def test_events_leave_with_tokens_at_once_when_many_and_else_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        replica = KvReplica("r", blocks=2 * FLUSH_RECORDS)
        stream = replica.hub.stream("ingress", 1)
        frames = [wire.unpack_frame(await anext(stream)) for _ in range(2)]
        assert [type(section) for section in frames[1].kv] == [SnapshotSlice]
        replica.hub.attach("ingress", 1, 4, "e4")
        replica.step(1, deltas=(TokenDelta("e4", 0, (9,)),))
        frame = wire.unpack_frame(await anext(stream))
        assert (len(frame.records), len(frame.kv)) == (1, 1)
        # Few events without tokens wait for each other.
        replica.step(2)
        replica.step(3)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        frame = wire.unpack_frame(await waiting)
        assert [section.sequence for section in frame.kv] == [2, 3]
        monkeypatch.setattr("app.channel.FLUSH_S", 1000.0)
        replica.step(*range(10, 10 + FLUSH_RECORDS))
        frame = wire.unpack_frame(await anext(stream))
        assert [section.sequence for section in frame.kv] == [4]

    run(test)


def test_a_large_cache_comes_in_slices_and_batches_wait_behind_them() -> None:
    async def test() -> None:
        texts = 2 * SLICE_KEYS
        replica = KvReplica("r", blocks=texts + 10)
        replica.step(*range(texts))
        replica.after_snapshot = lambda: replica.step(texts + 1)
        ingress = await connected(replica)
        await until(lambda: ingress.in_step(replica))
        parts = [section for section in ingress.sections if isinstance(section, SnapshotSlice)]
        assert [len(part.keys) for part in parts] == [SLICE_KEYS, SLICE_KEYS, 1]
        assert [type(section) for section in ingress.sections[3:]] == [KvBatch]
        assert (replica.snapshots, ingress.index.counters.gaps) == (1, 0)
        await ingress.stop()

    run(test)


def test_a_snapshot_is_made_while_batches_flow() -> None:
    async def test() -> None:
        replica = KvReplica("r", blocks=40)
        texts = itertools.count()

        def step() -> None:
            replica.step(next(texts))

        replica.before_snapshot = replica.after_snapshot = step
        ingress = await connected(replica)
        for _ in range(50):
            step()
            await asyncio.sleep(0)
        await until(lambda: ingress.in_step(replica))
        assert replica.snapshots == 1
        numbers = [section.sequence for section in ingress.sections]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        await ingress.stop()

    run(test)


def test_a_snapshot_that_was_asked_for_waits_for_nothing() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        replica.hub._beat_s = 1000.0  # no empty frame comes to help
        stream = replica.hub.stream("ingress", 1)
        for _ in range(2):
            await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        assert replica.hub.beat("ingress", 1, 2, resync=True)
        frame = wire.unpack_frame(await waiting)
        while not frame.kv:
            frame = wire.unpack_frame(await anext(stream))
        assert isinstance(frame.kv[0], SnapshotSlice)

    run(test)


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
        await until(lambda: replica.hub.snapshot()["ingress"]["frames"] > 2)
        replica.step(2)
        await until(lambda: ingress.in_step(replica))
        assert replica.snapshots == 3
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
    monkeypatch.setattr("app.channel.FLUSH_S", 0.0)

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


def test_a_replica_that_names_blocks_otherwise_counts_by_its_load_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        wrong = KvReplica("wrong", hello=wire.Hello(LIMITS, SCHEME, None, (1, 2, 3)))
        right = KvReplica("right")
        wrong.step(1)
        right.step(1)
        ingress = KvIngress(wrong, right)
        await until(lambda: ingress.index.synced("right") and len(ingress.loads) == 2)
        assert ingress.holds(1) == {"right": 2}
        assert sorted(ingress.ledger.routable()) == ["right", "wrong"]
        wrong.step(2)
        await until(
            lambda: wrong.events.snapshot().sequence in {section.sequence for section in ingress.sections}
        )
        assert ingress.holds(2) == {"right": 1}
        # Its channel breaks and comes back; all is said already.
        for call in list(wrong.calls):
            call.cancel()
        await until(lambda: len(ingress.routes) == 3 and ingress.index.replicas == ["right"])
        assert sorted(ingress.ledger.routable()) == ["right", "wrong"]
        await ingress.stop()

    with caplog.at_level(logging.ERROR):
        run(test)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "replica wrong names blocks otherwise" in record.getMessage()


def test_a_replica_without_a_prefix_cache_sends_its_load() -> None:
    async def test() -> None:
        replica = KvReplica("r", hello=wire.Hello.of(LIMITS, None, None))
        ingress = KvIngress(replica)
        await until(lambda: bool(ingress.routes))
        replica.step()
        await until(lambda: bool(ingress.loads))
        assert (ingress.sections, replica.snapshots, ingress.feed.keys) == ([], 0, None)
        assert (ingress.index.replicas, ingress.ledger.routable()) == ([], ["r"])
        await ingress.stop()

    run(test)


def test_load_says_which_attempts_it_counts() -> None:
    async def test() -> None:
        replica = KvReplica("r")
        replica.step()
        ingress = await connected(replica)
        await until(lambda: len(ingress.loads) == 1)  # as of now, for who is new
        assert ingress.loads[0].acknowledged == 0
        assert (ingress.loads[0].num_blocks, ingress.loads[0].block_size) == (LIMITS.num_blocks, 16)
        for number in (3, 5, 4):
            replica.hub.attach("ingress", 1, number, f"e{number}")
        replica.step(taken=("e3", "e5", "unknown"))
        await until(lambda: len(ingress.loads) == 2)
        # The one that was taken in and ended at once counts, too; a lower one does not lower it.
        ended = TokenDelta("e4", 0, (), FinishReason.ERROR, final=True)
        replica.step(1, taken=("e4",), deltas=(ended,))
        await until(lambda: len(ingress.loads) == 3)
        assert [load.acknowledged for load in ingress.loads] == [0, 5, 5]
        assert ingress.loads[2].evictable == 2
        # Nothing new is not sent.
        frames = replica.hub.snapshot()["ingress"]["frames"]
        replica.step()
        await asyncio.sleep(0.1)
        assert replica.hub.snapshot()["ingress"]["frames"] == frames
        await ingress.stop()

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


# ---- what waits for one channel


def batch(sequence: int, keys: int = 1) -> KvBatch:
    return KvBatch(sequence, list(range(keys)), [], False, 0, 0)


def snapshot(sequence: int, keys: int = 0) -> KvSnapshot:
    return KvSnapshot(sequence, list(range(keys)), 0, keys)


def numbers(sections: list[KvSection]) -> list[tuple[type[KvSection], int]]:
    return [(type(section), section.sequence) for section in sections]


def test_outbox_drops_what_the_snapshot_has() -> None:
    outbox = KvOutbox()
    outbox.add(batch(1))
    assert outbox.wanted
    outbox.fetch()
    for sequence in (2, 3, 4):
        outbox.add(batch(sequence))
    assert not outbox
    assert outbox.take() == []
    outbox.begin(snapshot(3))
    assert numbers(outbox.take()) == [(SnapshotSlice, 3)]
    assert numbers(outbox.take()) == [(KvBatch, 4)]
    assert (bool(outbox), outbox.backlog) == (False, 0)


def test_outbox_does_not_trust_a_snapshot_asked_for_before_it_dropped_batches() -> None:
    outbox = KvOutbox()
    outbox.fetch()
    outbox.add(batch(1, MAX_BACKLOG))
    outbox.add(batch(2))
    outbox.begin(snapshot(0))
    assert (bool(outbox), outbox.wanted) == (False, True)
    outbox.fetch()
    outbox.begin(snapshot(2))
    assert numbers(outbox.take()) == [(SnapshotSlice, 2)]
    outbox.add(batch(3))
    assert numbers(outbox.take()) == [(KvBatch, 3)]


def test_outbox_that_is_asked_again_goes_on_with_the_snapshot_under_way() -> None:
    outbox = KvOutbox()
    outbox.fetch()
    outbox.resend()  # the engine is slow: it would never get done if each request began anew
    outbox.begin(snapshot(0, 2 * SLICE_KEYS))
    assert numbers(outbox.take()) == [(SnapshotSlice, 0)]
    outbox.resend()
    assert numbers(outbox.take()) == [(SnapshotSlice, 0)]
    assert (bool(outbox), outbox.wanted) == (False, False)
    outbox.resend()
    assert outbox.wanted


def test_outbox_gives_batches_up_to_a_slice_at_a_time() -> None:
    outbox = KvOutbox()
    outbox.fetch()
    outbox.begin(snapshot(0))
    outbox.take()
    for sequence, keys in ((1, 2 * SLICE_KEYS), (2, SLICE_KEYS - 1), (3, 1), (4, 1)):
        outbox.add(batch(sequence, keys))
    assert [[section.sequence for section in outbox.take()] for _ in range(4)] == [[1], [2, 3], [4], []]
    assert outbox.backlog == 0
