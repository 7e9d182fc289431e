"""Bookings: the choice, and every release exactly once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.ledger import Ledger, NoRouteError, Route

A, B, C = Route("a", 1), Route("b", 2), Route("c", 3)


def ledger_of(*routes: Route) -> Ledger:
    ledger = Ledger()
    for route in routes:
        ledger.open(route)
    return ledger


def book(ledger: Ledger, attempt: int, prefill: int = 10, decode: int = 5, **options: object) -> str:
    ledger.expect(attempt)
    return ledger.book(f"r{attempt}", attempt, prefill, decode, **options).route.replica  # type: ignore[arg-type]


def test_least_booked_tokens_win() -> None:
    ledger = ledger_of(A, B)
    first = book(ledger, 1, 100)
    others = [book(ledger, attempt, 10) for attempt in range(2, 8)]
    assert first not in others[:6]
    assert sorted(ledger.load().values()) == [90, 105]


def test_burst_spreads_evenly() -> None:
    ledger = ledger_of(A, B, C)
    chosen = [book(ledger, attempt) for attempt in range(64)]
    assert sorted(chosen.count(name) for name in "abc") == [21, 21, 22]


def test_ties_go_by_request_not_by_order_of_opening() -> None:
    firsts = {book(ledger_of(A, B, C), attempt) for attempt in range(40)}
    assert firsts == {"a", "b", "c"}
    assert book(ledger_of(A, B, C), 7) == book(ledger_of(C, B, A), 7)


def test_prefill_part_is_released_at_the_first_token_and_the_rest_at_the_end() -> None:
    ledger = ledger_of(A)
    book(ledger, 1, prefill=100, decode=7)
    assert ledger.load() == {"a": 107}
    ledger.first_token(1)
    ledger.first_token(1)
    assert ledger.load() == {"a": 7}
    assert ledger.release(1)
    assert not ledger.release(1)
    ledger.first_token(1)
    assert ledger.load() == {"a": 0}


def test_close_returns_the_attempts_of_that_epoch_only() -> None:
    ledger = ledger_of(A, B)
    here = [attempt for attempt in range(10) if book(ledger, attempt) == "a"]
    assert ledger.close(Route("a", 99)) == []
    assert ledger.close(A) == here
    assert ledger.close(A) == []
    assert ledger.routable() == ["b"]
    assert "a" not in ledger.load()
    assert not any(ledger.release(attempt) for attempt in here)


def test_late_close_leaves_a_newer_epoch_open() -> None:
    ledger = ledger_of(A)
    newer = Route("a", 9)
    ledger.open(newer)
    ledger.close(A)
    assert ledger.routable() == ["a"]
    book(ledger, 1)
    booking = ledger.booking(1)
    assert booking is not None
    assert booking.route == newer


def test_suspects_get_nothing_new_but_keep_what_they_have() -> None:
    ledger = ledger_of(A, B)
    ledger.suspect("a", True)
    assert {book(ledger, attempt) for attempt in range(4)} == {"b"}
    ledger.suspect("b", True)
    with pytest.raises(NoRouteError):
        book(ledger, 9)
    assert ledger.booking(2) is not None
    ledger.suspect("a", False)
    assert book(ledger, 9) == "a"


def test_only_members_are_chosen() -> None:
    ledger = ledger_of(A, B)
    assert {book(ledger, attempt, members={"b", "z"}) for attempt in range(4)} == {"b"}
    with pytest.raises(NoRouteError):
        book(ledger, 9, members={"z"})


def test_avoided_replica_is_taken_only_if_there_is_no_other() -> None:
    ledger = ledger_of(A, B)
    book(ledger, 1, 1000, avoid="a")
    assert book(ledger, 2, avoid="a") == "b"
    ledger.close(B)
    assert book(ledger, 3, avoid="a") == "a"


def test_attempt_that_is_over_cannot_be_booked() -> None:
    # A cancelled call may reach the router after its sender has released it.
    ledger = ledger_of(A)
    ledger.expect(1)
    ledger.release(1)
    with pytest.raises(NoRouteError, match="over"):
        ledger.book("r", 1, 10, 10)
    assert ledger.load() == {"a": 0}


def test_booking_again_replaces_the_older_booking() -> None:
    ledger = ledger_of(A, B)
    book(ledger, 1, 10, 0)
    book(ledger, 1, 30, 0)
    assert sum(ledger.load().values()) == 30


@given(st.lists(st.tuples(st.sampled_from("brfco"), st.integers(0, 5), st.integers(0, 50)), max_size=60))
def test_load_is_always_the_sum_of_live_bookings(steps: list[tuple[str, int, int]]) -> None:
    ledger = ledger_of(A, B)
    routes = (A, B)
    expected: dict[int, tuple[int, int]] = {}
    for what, number, tokens in steps:
        if what == "b":
            ledger.expect(number)
            expected.pop(number, None)
            try:
                ledger.book("r", number, tokens, 7)
                expected[number] = (tokens, 7)
            except NoRouteError:
                pass
        elif what == "r":
            assert ledger.release(number) == (expected.pop(number, None) is not None)
        elif what == "f":
            ledger.first_token(number)
            if number in expected:
                expected[number] = (0, 7)
        elif what == "c":
            for attempt in ledger.close(routes[number % 2]):
                del expected[attempt]
        else:
            ledger.open(routes[number % 2])
        assert sum(ledger.load().values()) == sum(prefill + decode for prefill, decode in expected.values())


def test_two_threads_keep_the_books() -> None:
    ledger = ledger_of(A, B)

    def work(start: int) -> None:
        for attempt in range(start, start + 300):
            book(ledger, attempt)
            ledger.first_token(attempt)
            ledger.release(attempt)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.load() == {"a": 0, "b": 0}
