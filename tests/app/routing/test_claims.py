"""Claims on blocks that are coming: who makes them, confirms them, outlives them."""

from __future__ import annotations

from index_support import claimed, index_of, prompt

from app.routing.kv_index import KvIndex


def test_siblings_of_a_burst_stay_together_before_the_first_event() -> None:
    index = index_of(a=[], b=[])
    first, second = prompt(1, 1, 1, 2), prompt(1, 1, 1, 3)
    index.claim("b", first, now=0.0, deadline=2.0)
    assert index.longest(second) == {"a": 0, "b": 3}
    index.claim("b", second, now=0.0, deadline=3.0)
    assert index.longest(second) == {"a": 0, "b": 4}
    assert claimed(index) == 5 + 5


def test_blocks_as_the_walk_found_them_save_a_search_and_change_nothing() -> None:
    for blocks in (0, 2, 3, 4):  # not known, exact, with one that was coming, too many
        index = index_of(a=prompt(1, 2))
        index.claim("a", prompt(1, 2, 3), now=0.0, deadline=2.0)
        index.claim("a", prompt(1, 2, 3, 4), now=0.0, deadline=3.0, blocks=blocks)
        assert index.withdraw("a", prompt(1, 2, 3))
        assert index.longest(prompt(1, 2, 3, 4)) == {"a": 4}
        index.expire(3.0)
        assert index.longest(prompt(1, 2, 3, 4)) == {"a": 2}


def test_a_withdrawn_request_takes_nothing_from_its_siblings() -> None:
    index = index_of(a=prompt(1))
    first, second = prompt(1, 1, 2), prompt(1, 1, 3)
    index.claim("a", first, now=0.0, deadline=2.0)
    index.claim("a", second, now=0.0, deadline=3.0)
    index.claim("a", second, now=0.0, deadline=4.0)
    assert index.withdraw("a", second)
    assert index.longest(second) == {"a": 3}
    assert index.withdraw("a", second)
    assert not index.withdraw("a", second)
    assert index.longest(second) == {"a": 2}
    assert index.withdraw("a", first)
    assert index.longest(first) == {"a": 1}
    assert claimed(index) == 0


def test_of_equal_claims_the_latest_is_withdrawn() -> None:
    index = index_of(a=[])
    index.claim("a", prompt(1), now=0.0, deadline=1.0)
    index.claim("a", prompt(1), now=0.0, deadline=2.0)
    assert index.withdraw("a", prompt(1))
    assert index.longest(prompt(1)) == {"a": 1}
    assert index.expire(1.0) == 1
    assert index.longest(prompt(1)) == {"a": 0}


def test_claims_end_at_their_deadline() -> None:
    index = index_of(a=[])
    index.claim("a", prompt(1, 2), now=0.0, deadline=2.0)
    index.claim("a", prompt(1, 3), now=0.0, deadline=1.0)
    index.claim("a", prompt(4), now=1.0, deadline=1.0)
    assert index.longest(prompt(1, 3)) == {"a": 1}
    assert index.longest(prompt(4)) == {"a": 0}
    assert index.expire(2.0) == 1
    assert index.longest(prompt(1, 2)) == {"a": 0}
    assert claimed(index) == len(index) == 0


def test_a_stored_event_confirms_for_all_and_outlives_their_end() -> None:
    keys = prompt(1, 2)
    index = index_of(a=[], b=[])
    for name in "aab":
        index.claim(name, keys, now=0.0, deadline=2.0)
    assert index.apply("a", 0, 1, stored=keys[:1])
    assert index.longest(keys) == {"a": 2, "b": 2}
    index.expire(2.0)
    assert index.longest(keys) == {"a": 1, "b": 0}
    index.claim("a", keys, now=2.0, deadline=3.0)
    assert index.apply("a", 0, 2, stored=keys[1:])
    # A confirmed block that is evicted is gone, although its claim has time left.
    assert index.apply("a", 0, 3, removed=keys[1:])
    assert index.longest(keys) == {"a": 1, "b": 0}


def test_claims_are_kept_over_a_gap_and_a_snapshot() -> None:
    keys = prompt(1, 2, 3)
    index = index_of(a=prompt(9), b=keys[:1])
    index.claim("a", keys, now=0.0, deadline=9.0)
    index.claim("b", keys, now=0.0, deadline=9.0)
    assert not index.apply("a", 0, 5)
    assert index.longest(keys) == {"a": 3, "b": 3}
    assert index.snapshot("a", 0, 5, keys[:1])
    assert index.longest(keys) == {"a": 3, "b": 3}
    assert index.withdraw("a", keys)
    assert index.longest(keys) == {"a": 1, "b": 3}


def test_claims_are_bounded_those_nearest_to_their_deadline_end_first() -> None:
    index = KvIndex(max_claimed=10)
    index.add("a")
    for number, deadline in ((1, 3.0), (2, 1.0), (3, 2.0)):
        index.claim("a", prompt(number, blocks=3), now=0.0, deadline=deadline)
        assert claimed(index) <= 10
    assert [index.longest(prompt(number, blocks=3))["a"] for number in (1, 2, 3)] == [3, 0, 3]
    index.claim("a", prompt(4, blocks=40), now=0.0, deadline=9.0)
    assert claimed(index) == 10
    assert index.longest(prompt(4, blocks=40)) == {"a": 9}


def test_many_withdrawn_claims_leave_nothing() -> None:
    index = index_of(a=[])
    for number in range(1000):
        index.claim("a", prompt(number), now=0.0, deadline=1e9)
        assert index.withdraw("a", prompt(number))
    assert claimed(index) == len(index) == 0
    assert len(index._claims._deadlines) < 200
