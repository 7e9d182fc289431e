"""Who has which key, and the memory that it takes: slots that come back, sweeps, every size."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from functools import reduce
from operator import xor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_support import claimed, index_of, prompt

from app.routing.block_masks import BlockMasks


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "retire", "sweep"]),
            st.integers(0, 3),
            st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 8), max_size=8),
        ),
        max_size=40,
    )
)
def test_masks_against_sets(acts: list[tuple[str, int, list[int]]]) -> None:
    """Slots in any use, keys stored twice and removed without being there; a slot comes back without a bit."""
    masks = BlockMasks()
    slots = [masks.acquire() for _ in range(4)]
    held: list[set[int]] = [set() for _ in slots]
    seen: set[int] = set()
    for act, number, keys in acts:
        seen.update(keys)
        mine = held[number]
        if act == "store":
            change = masks.store(slots[number], keys)
            new = set(keys) - mine
            assert (change.xor, change.count) == (reduce(xor, new, 0), len(new))
            assert change.repeated == len(keys) - len(new)
            mine |= new
        elif act == "remove":
            change = masks.remove(slots[number], keys)
            old = set(keys) & mine
            assert (change.xor, change.count) == (reduce(xor, old, 0), len(old))
            assert change.repeated == len(keys) - len(old)
            mine -= old
        elif act == "retire":
            masks.retire(slots[number])
            slots[number] = masks.acquire()
            assert not any(mask >> slots[number] & 1 for mask in masks.masks(seen))
            mine.clear()
        else:
            masks.sweep(1 + len(keys) * 40)
        for slot, mine in zip(slots, held, strict=True):
            assert {key for key in seen if masks.masks([key])[0] >> slot & 1} == mine
    while masks.sweep(64):
        pass
    assert len(masks) == len(set().union(*held))


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_a_sweep_does_no_more_than_its_limit(limit: int) -> None:
    masks = BlockMasks()
    slot = masks.acquire()
    draw = random.Random(0)
    masks.store(slot, [draw.getrandbits(64) for _ in range(500)])
    masks.retire(slot)
    left = len(masks)
    while masks.sweep(limit):
        assert left - limit <= len(masks) <= left
        left = len(masks)
    assert len(masks) == 0
    assert masks.acquire() == slot


def test_a_removed_replica_is_gone_at_once_and_its_slot_comes_back_swept() -> None:
    draw = random.Random(0)
    keys = prompt(1, 2, 3)
    index = index_of(a=keys, b=keys)
    index.apply("a", 0, 1, stored=[draw.getrandbits(64) for _ in range(5000)])
    index.claim("a", prompt(1, 5), now=0.0, deadline=9.0)
    index.remove("a")
    index.remove("a")
    assert index.longest(keys) == {"b": 3}
    assert not index.apply("a", 0, 2, stored=keys)
    assert not index.snapshot("a", 0, 2, keys)
    assert not index.synced("a")
    assert index.digest("a") is None
    index.claim("a", keys, now=0.0, deadline=9.0)
    assert not index.withdraw("a", keys)
    assert index.longest(keys) == {"b": 3}
    # Not swept yet: the next replica gets another slot.
    index.add("c")
    assert index.longest(keys) == {"b": 3, "c": 0}
    assert index.slots == 3
    while index.sweep():
        pass
    assert len(index) == 3
    index.add("d")
    assert index.snapshot("d", 0, 0, keys[:1])
    assert index.slots == 3
    assert index.longest(keys) == {"b": 3, "c": 0, "d": 1}


def test_replicas_that_come_and_go_for_long_leave_nothing() -> None:
    draw = random.Random(0)
    index = index_of(keep=prompt(1))
    for generation in range(400):
        index.add("a", generation)
        assert index.snapshot("a", generation, 0, [draw.getrandbits(64) for _ in range(50)])
        index.claim("a", prompt(2, generation), now=0.0, deadline=9.0)
        index.remove("a")
    assert index.slots <= 100
    while index.sweep():
        pass
    assert len(index) == 1
    assert claimed(index) == 0
    assert index.longest(prompt(1)) == {"keep": 1}


def test_one_replicas_events_sweep_what_others_left() -> None:
    draw = random.Random(0)
    index = index_of(a=[draw.getrandbits(64) for _ in range(3000)], b=[])
    index.remove("a")
    for sequence in range(1, 40):
        assert index.apply("b", 0, sequence)
    assert len(index) == index.unswept == 0


def test_memory_for_each_distinct_block_at_every_size_and_after_turnover() -> None:
    draw = random.Random(0)
    index = index_of(**{f"r{number}": [] for number in range(40)})
    sequences = dict.fromkeys(index.replicas, 0)
    names = list(sequences)

    def apply(number: int, stored: list[int], removed: list[int]) -> None:
        for name in {names[(number + step * 7) % 40] for step in range(3)}:
            sequences[name] += 1
            # Every replica's events bring numbers of their own, none of which may be kept twice.
            assert index.apply(name, 0, sequences[name], [key ^ 0 for key in stored], removed)

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        # The numbers of a batch go with it: what is known here costs 8 bytes a key.
        batches: list[array[int]] = []
        for number in range(24):
            batches.append(array("Q", (draw.getrandbits(64) for _ in range(500))))
            apply(number, batches[-1].tolist(), [])
            used = tracemalloc.get_traced_memory()[0] - before - 8 * 500 * len(batches)
            if number >= 10:  # fixed costs do not matter any more
                assert used <= 120 * len(index)
        for number in range(24):
            apply(number, [draw.getrandbits(64) for _ in range(500)], batches[number].tolist())
        used = tracemalloc.get_traced_memory()[0] - before - 8 * 500 * len(batches)
        assert len(index) == 24 * 500
        assert used <= 120 * len(index)
    finally:
        tracemalloc.stop()
    assert index.counters.unknown == index.counters.repeated == 0
