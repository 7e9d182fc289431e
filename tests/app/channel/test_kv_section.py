"""KV events on channels: the index at the other end knows what each replica holds."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

import pytest
from engine_client_setting import run, until
from kv_loopback import SCHEME, KvIngress, KvReplica, connected
from loopback import LIMITS

from app.channel import wire
from app.channel.engine_channel import LOAD_S
from app.channel.kv_feed import PIECE_KEYS
from app.channel.kv_outbox import FLUSH_RECORDS
from app.channel.wire_sections import SLICE_KEYS, SnapshotSlice
from engine.kv.kv_events import KvBatch
from engine.request import FinishReason, TokenDelta


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
        monkeypatch.setattr("app.channel.engine_channel.FLUSH_S", 1000.0)
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


def test_a_slice_is_taken_in_pieces_between_which_requests_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        replica = KvReplica("r", blocks=SLICE_KEYS)
        replica.step(*range(2 * PIECE_KEYS))
        ingress = KvIngress(replica)
        load, sizes = ingress.index.snapshot, []

        def snapshot(name: str, epoch: int, sequence: int, keys: Sequence[int], complete: bool = True) -> bool:
            assert not ingress.ledger._lock.acquire(blocking=False)
            sizes.append((len(keys), complete))
            return load(name, epoch, sequence, keys, complete)

        monkeypatch.setattr(ingress.index, "snapshot", snapshot)
        await until(lambda: ingress.in_step(replica))
        assert sizes == [(PIECE_KEYS, False), (PIECE_KEYS, False), (1, True)]
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
        replica.hub._idle_frame_s = 1000.0  # no empty frame comes to help
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
    assert "block keys of replica wrong differ" in record.getMessage()


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
        replica.step()
        await asyncio.sleep(2 * LOAD_S)
        assert len(ingress.loads) == 3
        await ingress.stop()

    run(test)
