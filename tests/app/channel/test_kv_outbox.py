"""What waits for one channel: a snapshot in slices, then batches."""

from __future__ import annotations

from app.channel.kv_outbox import MAX_BACKLOG, KvOutbox
from app.channel.wire_sections import SLICE_KEYS, KvSection, SnapshotSlice
from engine.kv.kv_events import KvBatch, KvSnapshot


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
