"""Named cases of the index: what goes wrong in routers that guess, and what must not here."""

from __future__ import annotations

import random

import pytest
from index_support import ROOT, claimed, index_of, prompt

from app.routing.kv_index import KvIndex
from engine.kv.block_keys import block_keys, root_key
from engine.request import CacheNamespace


def test_every_replica_in_one_walk() -> None:
    keys = prompt(*range(40))
    held = {f"r{number}": keys[:number] for number in range(0, 41, 3)}
    index = index_of(**held)
    assert index.longest(keys) == {name: len(mine) for name, mine in held.items()}
    assert index.longest(keys[:5]) == {name: min(5, len(mine)) for name, mine in held.items()}


def test_a_walk_visits_few_of_the_keys() -> None:
    class Visits(list[int]):
        count = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            self.count += 1
            return super().__getitem__(place)

        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("visits all keys")

    keys = Visits(prompt(*range(1024)))
    index = index_of(a=list(keys[:700]), b=list(keys[:200]), c=[])
    keys.count = 0
    assert index.longest(keys) == {"a": 700, "b": 200, "c": 0}
    assert keys.count <= 2 + 2 * 10 + 3  # of each end, also the next one


def test_a_prompt_shorter_than_a_block_has_every_replica_as_a_candidate() -> None:
    assert index_of(a=prompt(1), b=[]).longest([]) == {"a": 0, "b": 0}


def test_no_replica() -> None:
    assert KvIndex().longest(prompt(1, 2)) == {}


def test_another_root_never_matches() -> None:
    tokens = [7] * 64
    roots = [
        ROOT,
        root_key("model", "float32", 16, CacheNamespace(salt="x")),
        root_key("model", "float32", 16, CacheNamespace(adapter="x")),
        root_key("model", "float32", 16, CacheNamespace(tenant="x")),
        root_key("model", "bfloat16", 16, CacheNamespace()),
    ]
    index = index_of(a=block_keys(roots[0], tokens, 16))
    assert [index.longest(block_keys(root, tokens, 16))["a"] for root in roots] == [4, 0, 0, 0, 0]


def test_a_replica_counts_only_from_its_snapshot_on() -> None:
    """A router that starts late knows deep blocks without their roots; it must not act on them."""
    keys = prompt(1, 2, 3, 4)
    index = KvIndex()
    index.add("a")
    assert not index.apply("a", 0, 8, stored=keys[2:])
    assert index.apply("a", 0, 9, removed=keys[3:])
    assert not index.synced("a")
    assert index.longest(keys) == {"a": 0}
    assert index.snapshot("a", 0, 7, keys[:2])
    assert index.digest("a") == (9, keys[0] ^ keys[1] ^ keys[2], 3)
    assert index.longest(keys) == {"a": 3}


def test_a_lost_delta_stops_a_replicas_blocks_from_counting_until_a_snapshot() -> None:
    keys = prompt(1, 2, 3)
    index = index_of(a=keys[:1], b=keys)
    assert not index.apply("a", 0, 2, stored=keys[2:])
    assert index.longest(keys) == {"a": 0, "b": 3}
    assert index.counters.gaps == 1
    assert index.apply("a", 0, 3, removed=keys[2:])
    assert index.snapshot("a", 0, 1, keys[:2])
    assert index.longest(keys) == {"a": 2, "b": 3}


def test_what_is_replayed_never_resurrects_a_block() -> None:
    keys = prompt(1, 2)
    index = index_of(a=keys)
    assert index.apply("a", 0, 1, removed=keys[1:])
    assert index.apply("a", 0, 1, stored=keys[1:])
    assert index.apply("a", 0, 0, stored=keys[1:])
    assert index.snapshot("a", 0, 0, keys)
    assert index.longest(keys) == {"a": 1}
    assert index.counters.replays == 3

    assert not index.apply("a", 0, 3, removed=keys[:1])
    assert not index.snapshot("a", 0, 1, keys)
    assert index.counters.late == 1
    assert index.longest(keys) == {"a": 0}
    assert index.snapshot("a", 0, 4, keys[:1])
    assert index.longest(keys) == {"a": 1}


def test_what_is_replayed_while_a_snapshot_is_awaited_never_resurrects_a_block() -> None:
    keys = prompt(1, 2)
    index = KvIndex()
    index.add("a")
    assert not index.apply("a", 0, 3, stored=keys[1:])
    assert index.apply("a", 0, 4, removed=keys[1:])
    assert index.apply("a", 0, 3, stored=keys[1:])
    assert index.snapshot("a", 0, 2, keys[:1])
    assert index.digest("a") == (4, keys[0], 1)


def test_a_gap_among_the_deltas_that_wait_asks_again() -> None:
    keys = prompt(*range(6))
    index = KvIndex()
    index.add("a")
    assert not index.apply("a", 0, 3, stored=keys[3:4])
    assert index.apply("a", 0, 3, stored=keys[3:4])
    assert index.apply("a", 0, 2, stored=keys[2:3])
    assert not index.apply("a", 0, 5, stored=keys[5:])
    assert not index.snapshot("a", 0, 2, keys[:3])
    assert not index.synced("a")
    assert index.apply("a", 0, 4, stored=keys[:1])
    assert index.snapshot("a", 0, 4, keys[:5])
    assert index.longest(keys) == {"a": 6}
    assert index.counters.repeated == 0


def test_a_new_replica_in_an_old_ones_slot_is_named_as_itself() -> None:
    keys = prompt(1, 2)
    index = index_of(a=keys)
    assert index.longest(keys) == {"a": 2}
    index.remove("a")
    while index.sweep():
        pass
    index.add("b")
    assert index.snapshot("b", 0, 0, keys)
    assert index.slots == 1
    assert index.longest(keys) == {"b": 2}


def test_an_older_epoch_is_refused_and_a_newer_one_starts_empty() -> None:
    keys = prompt(1, 2)
    index = index_of(a=keys)
    index.claim("a", prompt(1, 2, 3), now=0.0, deadline=9.0)
    assert not index.apply("a", 1, 5, stored=keys)
    assert index.longest(prompt(1, 2, 3)) == {"a": 0}
    assert claimed(index) == 0
    assert not index.snapshot("a", 0, 99, keys)
    assert not index.apply("a", 0, 1, stored=keys)
    assert index.counters.stale == 2
    assert index.snapshot("a", 1, 5, keys[:1])
    assert index.longest(keys) == {"a": 1}
    index.add("a", epoch=2)
    assert index.longest(keys) == {"a": 0}
    assert not index.snapshot("a", 1, 6, keys)


def test_snapshots_in_parts_with_deltas_in_between() -> None:
    keys = prompt(*range(6))
    index = index_of(a=prompt(9))
    assert not index.apply("a", 0, 7)
    assert index.snapshot("a", 0, 6, keys[:2], complete=False)
    assert index.longest(keys) == {"a": 0}
    assert index.apply("a", 0, 8, stored=keys[5:], removed=keys[:0])
    assert index.snapshot("a", 0, 6, keys[2:4], complete=False)
    assert index.apply("a", 0, 9, removed=keys[5:])
    assert index.snapshot("a", 0, 6, keys[4:5])
    assert index.longest(keys) == {"a": 5}
    assert index.longest(prompt(9)) == {"a": 0}
    digest = index.digest("a")
    assert digest is not None
    assert digest[0] == 9


def test_parts_of_an_abandoned_snapshot_leave_nothing() -> None:
    index = index_of(a=[])
    assert not index.apply("a", 0, 4)
    assert index.snapshot("a", 0, 5, prompt(1), complete=False)
    assert index.longest(prompt(1)) == {"a": 0}
    assert index.snapshot("a", 0, 6, prompt(2))
    assert index.digest("a") == (6, prompt(2)[0], 1)
    assert index.longest(prompt(1)) == {"a": 0}


def test_what_waits_for_a_snapshot_is_bounded_and_the_bound_asks_again() -> None:
    keys = prompt(*range(20))
    index = KvIndex(max_waiting=10)
    index.add("a")
    answers = [index.apply("a", 0, sequence, stored=keys[sequence : sequence + 1]) for sequence in range(7)]
    # The first has no snapshot before it; from the sixth on the oldest go.
    assert answers == [False, True, True, True, True, False, False]
    assert not index.snapshot("a", 0, 0, keys[:1])
    assert index.snapshot("a", 0, 4, keys[:5])
    assert index.longest(keys) == {"a": 7}
    assert not index.apply("a", 0, 9, stored=keys)
    assert not index.snapshot("a", 0, 8, keys)
    assert index.snapshot("a", 0, 9, keys)
    assert index.longest(keys) == {"a": 20}


def test_a_digest_that_differs_asks_for_a_snapshot() -> None:
    keys = prompt(1, 2)
    index = index_of(a=keys)
    assert index.verify("a", 0, keys[0] ^ keys[1], 2)
    assert index.verify("a", 7, 0, 0)  # of a batch that has not come
    assert not index.verify("a", 0, keys[0] ^ keys[1], 3)
    assert index.longest(keys) == {"a": 0}
    assert index.counters.drift == 1
    assert not index.verify("a", 0, keys[0] ^ keys[1], 2)  # as long as no snapshot comes
    assert not index.verify("b", 0, 0, 0)
    assert index.snapshot("a", 0, 0, keys)
    assert index.longest(keys) == {"a": 2}


def test_keys_stored_twice_or_removed_without_being_there_are_counted_and_change_nothing() -> None:
    keys = prompt(1, 2)
    index = index_of(a=keys)
    assert index.apply("a", 0, 1, stored=[*keys, keys[0]])
    assert index.apply("a", 0, 2, removed=[*prompt(3), keys[1], keys[1]])
    assert index.digest("a") == (2, keys[0], 1)
    assert index.apply("a", 0, 3, removed=[keys[0], keys[0]])
    assert index.digest("a") == (3, 0, 0)
    assert (index.counters.repeated, index.counters.unknown) == (3, 3)
    assert len(index) == 0


def test_cleared() -> None:
    keys = prompt(1, 2, 3)
    index = index_of(a=keys, b=keys)
    index.claim("a", prompt(1, 2, 3, 4), now=0.0, deadline=9.0)
    assert index.apply("a", 0, 1, stored=keys[:1], cleared=True)
    assert index.digest("a") == (1, keys[0], 1)
    assert index.longest(keys) == {"a": 1, "b": 3}


def test_routers_that_saw_the_same_events_agree() -> None:
    """However they came to it: one from the first event on, one from a snapshot in the middle."""
    draw = random.Random(0)
    early, late = index_of(a=[]), KvIndex()
    late.add("a")
    held: list[int] = []
    for sequence in range(1, 100):
        stored = [draw.getrandbits(64) for _ in range(20)]
        removed, held = held[:10], held[10:] + stored
        for index in (early, late):
            index.apply("a", 0, sequence, stored, removed)
        if sequence == 50:
            assert late.snapshot("a", 0, sequence, held)
    assert early.digest("a") == late.digest("a")
    assert len(early) == len(late)


@pytest.mark.parametrize(("window", "expected"), [(None, 2), (1, 9), (2, 9), (3, 5), (4, 2)])
def test_a_windowed_hit_needs_only_the_last_blocks(window: int | None, expected: int) -> None:
    keys = prompt(*range(10))
    index = KvIndex(window_blocks=window)
    index.add("a")
    held = [0, 1] if window is None else [0, 1, 2, 3, 4, 7, 8] if window == 3 else [0, 1, 7, 8]
    index.snapshot("a", 0, 0, [keys[place] for place in held])
    assert index.longest(keys) == {"a": expected}


def test_options_have_to_be_positive() -> None:
    for options in ({"window_blocks": 0}, {"max_claimed": 0}, {"max_waiting": -1}):
        with pytest.raises(ValueError, match="at least 1"):
            KvIndex(**options)  # type: ignore[arg-type]
