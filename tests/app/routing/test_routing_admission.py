"""Requests go where they are let in: seats and blocks that are out keep them away, even from their prefix."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from routing_support import IDLE, Fleet, prefix, prompt

# Fifty sequences of about 256 tokens run in steps of some 35 ms: five or six end in a second.
BUSY = replace(IDLE, running=50, kv_tokens=150_000, max_running=256)


def warm() -> Fleet:
    """Two replicas under like load, the first of which holds a prefix of 2,000 tokens."""
    fleet = Fleet(2)
    fleet.store(0, prefix(1, 125))
    for route in fleet.routes:
        fleet.report(route, BUSY)
    return fleet


def test_a_prefix_draws_while_there_are_seats_and_blocks() -> None:
    fleet = warm()
    assert fleet.send(*prompt(prefix(1, 125), 2, 9)) == "r0"


def test_a_replica_whose_queue_has_hardly_a_token_to_compute_is_not_idle() -> None:
    fleet = warm()
    fleet.report(fleet.routes[0], replace(BUSY, waiting_tokens=140, waiting=140, num_blocked=140))
    assert fleet.send(*prompt(prefix(1, 125), 2, 9)) == "r1"


def test_a_queue_that_only_waits_for_its_prompts_does_not_scare() -> None:
    fleet = warm()
    fleet.report(fleet.routes[0], replace(BUSY, waiting_tokens=140, waiting=140))
    assert fleet.send(*prompt(prefix(1, 125), 2, 9)) == "r0"


def test_own_bookings_fill_the_seats_before_any_report() -> None:
    fleet = warm()
    for route in fleet.routes:
        fleet.report(route, replace(BUSY, max_running=56))
    chosen = [fleet.send(*prompt(prefix(1, 125), 2, 10 + number)) for number in range(50)]
    # Six seats, and some ends that come sooner than 2,000 tokens are computed; then the other has a copy, too.
    first = chosen.index("r1")
    assert 6 <= first < 25
    assert chosen[first : first + 6] == ["r1"] * 6
    assert Counter(chosen)["r1"] >= 20
    unlimited = warm()
    assert {unlimited.send(*prompt(prefix(1, 125), 2, 10 + number)) for number in range(first + 1)} == {"r0"}


def test_seats_of_replicas_may_differ() -> None:
    fleet = Fleet(2)
    fleet.report(fleet.routes[0], replace(IDLE, max_running=2))
    fleet.report(fleet.routes[1], replace(IDLE, max_running=64))
    chosen = Counter(fleet.send(500) for _ in range(20))
    assert chosen["r0"] < chosen["r1"]


def test_everybody_full_is_as_even_as_everybody_free() -> None:
    fleet = Fleet(4)
    for route in fleet.routes:
        fleet.report(route, replace(BUSY, running=256, waiting=10, num_blocked=10))
    assert set(Counter(fleet.send(500) for _ in range(40)).values()) == {10}


def test_large_blocks_do_not_make_a_full_replica_as_good_as_an_empty_one() -> None:
    # A block's worth of computing is ten seconds here; the prompt's is a quarter of one.
    fleet = Fleet(2)
    large = replace(IDLE, block_size=2048, num_blocks=40, prefill_rate=200.0, max_running=256)
    fleet.report(fleet.routes[0], replace(large, free=0, referenced=40, running=40, waiting=25, num_blocked=25))
    fleet.report(fleet.routes[1], replace(large, free=20, referenced=20, running=20))
    chosen = Counter(fleet.send(50) for _ in range(8))
    assert chosen == {"r1": 8}


def test_after_a_few_short_answers_full_seats_are_a_short_wait() -> None:
    # Eight run in steps of 20 ms. If they made 256 tokens each, one would end in 0.6 s; of 16, in 0.04 s.
    fleet = Fleet(2)
    fleet.store(0, prefix(1, 40))
    full = replace(IDLE, running=8, kv_tokens=5_000, max_running=8)

    def choice(number: int) -> str:
        for route, load in zip(fleet.routes, (full, IDLE), strict=True):
            fleet.report(route, load)
        chosen = fleet.send(*prompt(prefix(1, 40), 1, number), 24)
        assert fleet.ledger.release(fleet.attempts, generated=16)
        return chosen

    chosen = [choice(100 + number) for number in range(20)]
    assert chosen[0] == "r1", "until an answer has ended"
    assert set(chosen[10:]) == {"r0"}, "0.1 s of waiting is less than computing 640 tokens again"
