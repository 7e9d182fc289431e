"""How long a new request would wait: prompts before it, own bookings included, and seats and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_support import BLOCK, IDLE, Fleet

from app.routing.policies import Policy
from app.routing.waiting import ExpectedWait, tokens_until

FULL = replace(IDLE, running=8, max_running=8, referenced=800, free=99_200)


def wait_of(fleet: Fleet, *members: str) -> ExpectedWait:
    wait = fleet.ledger.expected_wait(members or [route.replica for route in fleet.routes])
    assert wait is not None
    return wait


def test_nothing_is_known_before_a_report() -> None:
    fleet = Fleet(2, reported=False)
    assert fleet.ledger.expected_wait(["r0", "r1"]) is None
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=10_000))
    assert wait_of(fleet) == (1.0, 1)
    assert fleet.ledger.expected_wait(["r1"]) is None
    assert fleet.ledger.expected_wait([]) is None


def test_it_is_that_of_the_shortest_queue_of_those_asked_for() -> None:
    fleet = Fleet(3)
    for route, tokens in zip(fleet.routes, (30_000, 20_000, 10_000), strict=True):
        fleet.report(route, replace(IDLE, waiting_tokens=tokens))
    assert wait_of(fleet) == (1.0, 3)
    assert wait_of(fleet, "r0", "r1") == (2.0, 2)
    fleet.ledger.suspect("r2", True)
    assert wait_of(fleet) == (2.0, 2)


def test_reported_work_passes_with_time_but_an_engine_that_hangs_does_not_empty_itself() -> None:
    fleet = Fleet(1)
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=50_000))
    waits = []
    for _ in range(3):
        waits.append(wait_of(fleet).seconds)
        fleet.now += 2.0
    assert waits == pytest.approx([5.0, 3.0, 2.0])


@pytest.mark.parametrize("policy", list(Policy))
def test_bookings_that_no_report_has_yet_count_with_every_policy(policy: Policy) -> None:
    fleet = Fleet(2, policy)
    for _ in range(4):
        fleet.send(10_000)
    assert wait_of(fleet).seconds == pytest.approx(2.0)
    for attempt in range(1, 5):
        fleet.finish(attempt)
    assert wait_of(fleet) == (0.0, 2)


def test_whoever_finds_no_seat_waits_for_those_before_it_and_then_for_one() -> None:
    fleet = Fleet(1)
    waits = []
    for lacking in (0, 1, 2):
        fleet.report(fleet.routes[0], replace(FULL, waiting=lacking, num_lacking=lacking))
        waits.append(wait_of(fleet).seconds)
    assert waits[0] > 0
    assert waits[1:] == pytest.approx(
        [2 * waits[0], 3 * waits[0]], rel=1e-3
    )  # step times are learned meanwhile
    fleet.report(fleet.routes[0], replace(FULL, running=7))
    assert wait_of(fleet) == (0.0, 1)


def test_short_outputs_free_seats_sooner_than_those_learned() -> None:
    def wait(output: int) -> float:
        fleet = Fleet(1)
        fleet.send(BLOCK, output=output)
        fleet.report(fleet.routes[0], FULL)
        return wait_of(fleet).seconds

    assert wait(64) == pytest.approx(wait(128) / 2)
    assert wait(10_000) == wait(256), "no longer than learned"


def test_blocks_that_are_out_are_waited_for() -> None:
    def wait(free: int, evictable: int, waiting_tokens: int = 0, own: int = 100 * BLOCK) -> float:
        fleet = Fleet(1)
        fleet.send(own)
        load = replace(
            IDLE,
            running=4,
            max_running=8,
            num_blocks=1000,
            free=free,
            evictable=evictable,
            referenced=1000 - free - evictable,
            waiting_tokens=waiting_tokens,
        )
        fleet.report(fleet.routes[0], load)
        return wait_of(fleet).seconds

    # A prompt of 100 blocks needs one more for its first token, and each running sequence keeps one to grow.
    assert wait(free=105, evictable=0) == 0.0
    assert wait(free=0, evictable=105) == 0.0
    assert wait(free=104, evictable=0) > 0.0
    assert wait(free=0, evictable=50) > 0.0
    assert wait(free=0, evictable=0) == wait(free=0, evictable=50)  # one end frees enough for either
    assert wait(free=0, evictable=0, own=600 * BLOCK) > wait(free=0, evictable=50, own=600 * BLOCK)
    assert wait(free=50, evictable=0, waiting_tokens=100 * BLOCK) > wait(free=50, evictable=0) + 0.1
    assert wait(free=0, evictable=55, own=50 * BLOCK) == 0.0


TOGETHER = replace(FULL, first_end=200.0, half_ended=200.0, all_ended=200.0)


def test_where_the_engine_expects_ends_the_wait_is_until_then() -> None:
    fleet = Fleet(1)
    waits = []
    for load in (FULL, TOGETHER, replace(TOGETHER, waiting=7, num_lacking=7)):
        fleet.report(fleet.routes[0], load)
        waits.append(wait_of(fleet).seconds)
    step_s = waits[0] / (256 / 8)  # evenly, one of eight outputs of 256 tokens ends every 32 steps
    assert waits[1:] == pytest.approx([200 * step_s, 200 * step_s], rel=1e-2)
    fleet.report(fleet.routes[0], replace(TOGETHER, waiting=8, num_lacking=8))
    assert wait_of(fleet).seconds == pytest.approx((200 + 256) * step_s, rel=1e-2)
    longer = replace(FULL, first_end=900.0, half_ended=900.0, all_ended=900.0, waiting=8, num_lacking=8)
    fleet.report(fleet.routes[0], longer)  # those that wait take longer than was learned, too
    assert wait_of(fleet).seconds == pytest.approx((900 + 900) * step_s, rel=1e-2)
    fleet.report(fleet.routes[0], replace(TOGETHER, running=7))
    assert wait_of(fleet) == (0.0, 1)


def test_tokens_until_ends_go_from_mark_to_mark_and_turn_by_turn() -> None:
    load = replace(FULL, first_end=10.0, half_ended=40.0, all_ended=100.0)
    assert [tokens_until(ends, load, 120.0) for ends in (0.5, 1, 2.5, 4, 6, 8)] == [10, 10, 25, 40, 70, 100]
    assert [tokens_until(ends, load, 120.0) for ends in (9, 12, 16, 17)] == [130, 160, 220, 250]
    one = replace(load, running=1)
    assert [tokens_until(ends, one, 120.0) for ends in (1, 2, 3)] == [10, 130, 250]


@given(
    running=st.integers(1, 300),
    marks=st.tuples(*[st.floats(0.01, 1e6)] * 3),
    output=st.floats(1, 1e6),
    ends=st.tuples(*[st.floats(0, 5000)] * 2),
)
def test_later_ends_are_never_sooner(
    running: int, marks: tuple[float, float, float], output: float, ends: tuple[float, float]
) -> None:
    first, half, last = marks
    load = replace(FULL, running=running, first_end=first, half_ended=half, all_ended=last)
    early, late = (tokens_until(one, load, output) for one in sorted(ends))
    assert first <= early <= late * (1 + 1e-9)
    assert late <= first + output * (1 + max(ends) / running) + 1e-3
