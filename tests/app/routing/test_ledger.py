"""Bookings: the choice, and every release exactly once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest
import routing_support
from hypothesis import given
from hypothesis import strategies as st
from index_support import claimed

from app.routing.kv_index import KvIndex
from app.routing.ledger import REMEMBERED, Ledger, NoRouteError, Route
from app.routing.policies import Policy
from app.routing.requirement import UNKNOWN_BUILD, Requirement
from app.routing.routing_meta import RoutingMeta
from engine.sampling_params import SamplingParams

A, B, C = Route("a", 1), Route("b", 2), Route("c", 3)
IDLE = replace(routing_support.IDLE, free=10_000, num_blocks=10_000)


def ledger_of(*routes: Route) -> Ledger:
    ledger = Ledger()
    for route in routes:
        ledger.open(route)
    return ledger


def book(
    ledger: Ledger,
    attempt: int,
    prefill: int = 10,
    decode: int = 5,
    members: Collection[str] | None = None,
    likely_victims: Collection[str] = (),
    **options: object,
) -> str:
    ledger.expect(attempt)
    meta = RoutingMeta(f"r{attempt}", attempt, prefill, decode, **options)  # type: ignore[arg-type]
    return ledger.book(meta, members, likely_victims).route.replica


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


def test_a_broken_route_keeps_its_attempts_and_gets_nothing_new() -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    for route in (A, B):
        ledger.open(route)
    there = [attempt for attempt in range(6) if book(ledger, attempt) == "a"]
    assert ledger.hold(Route("a", 99)) == []
    assert ledger.routable() == ["a", "b"]
    assert ledger.hold(A) == there
    assert {book(ledger, attempt) for attempt in range(6, 10)} == {"b"}
    assert index.replicas == ["b"]
    assert ledger.load()["a"] == 15 * len(there)


def test_the_next_route_takes_over_the_attempts_that_resume_and_ends_the_others() -> None:
    ledger, again = ledger_of(A), Route("a", 9)
    for attempt in range(4):
        book(ledger, attempt)
    ledger.hold(A)
    assert ledger.reopen(A, again, None, UNKNOWN_BUILD, {1, 3}) == [0, 2]
    assert (ledger.routable(), ledger.load()) == (["a"], {"a": 30})
    with pytest.raises(NoRouteError, match="attempt 0 is over"):
        ledger.book(RoutingMeta("r0", 0, 10, 5))
    assert ledger.close(A) == []
    assert ledger.close(again) == [1, 3]


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


def test_one_that_must_be_alone_goes_where_no_other_such_request_runs() -> None:
    """Of any ingress: the engine reports those of others."""
    ledger = ledger_of(A, B)
    alone = Requirement(1, SamplingParams(), alone=True)
    ledger.report(A, replace(IDLE, suspects=1))
    assert ledger.routable(requirement=alone) == ["b"]
    assert sorted(ledger.routable()) == ["a", "b"]
    assert book(ledger, 1, requirement=alone) == "b"
    with pytest.raises(NoRouteError):
        book(ledger, 2, requirement=alone)
    ledger.report(A, IDLE)
    assert book(ledger, 2, requirement=alone) == "a"


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
    # A canceled call may reach the router after its sender has released it.
    ledger = ledger_of(A)
    ledger.expect(1)
    ledger.release(1)
    with pytest.raises(NoRouteError, match="over"):
        ledger.book(RoutingMeta("r", 1, 10, 10))
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
                ledger.book(RoutingMeta("r", number, tokens, 7))
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


def test_acknowledged_bookings_are_in_the_engines_backlog_not_beside_it() -> None:
    ledger = ledger_of(A, B)
    assert ledger.report(A, IDLE)
    assert ledger.report(B, replace(IDLE, waiting_tokens=2500))
    assert [book(ledger, attempt, 1000) for attempt in (1, 2)] == ["a", "a"]
    # Both are on their way to the engine or in it: 2,000 tokens, not 4,000 and not 0.
    assert ledger.report(A, replace(IDLE, waiting_tokens=1000, acknowledged=1))
    assert book(ledger, 3, 100) == "a"
    assert ledger.report(A, replace(IDLE, waiting_tokens=2100, acknowledged=3))
    assert book(ledger, 4, 100) == "a"
    ledger.release(4)
    # Not acknowledged yet: these come on top of what the engine says.
    assert ledger.report(A, replace(IDLE, waiting_tokens=2100, acknowledged=0))
    assert book(ledger, 5, 600) == "a"
    assert book(ledger, 6, 100) == "b"


def test_acknowledged_bookings_still_count_as_load_and_as_rows() -> None:
    ledger = ledger_of(A, B)
    for attempt in range(1, 9):
        book(ledger, attempt, 1000, 200, avoid="b")
    for route in (A, B):
        ledger.report(route, replace(IDLE, acknowledged=8))
    assert ledger.load() == {"a": 8 * 1200, "b": 0}
    assert {book(ledger, attempt) for attempt in (9, 10)} == {"b"}


def test_first_token_before_the_report_and_after_it_release_the_same() -> None:
    for order in ("report first", "token first", "no report"):
        ledger = ledger_of(A, B)
        ledger.report(A, IDLE)
        ledger.report(B, IDLE)
        first = book(ledger, 1, 3000)
        route = A if first == "a" else B
        if order == "report first":
            ledger.report(route, replace(IDLE, waiting_tokens=3000, acknowledged=1))
        ledger.first_token(1)
        if order != "no report":
            ledger.report(route, replace(IDLE, running=1, kv_tokens=3000, acknowledged=1))
        assert ledger.load()[first] == 5
        ledger.release(1)
        ledger.report(route, IDLE)
        chosen = Counter(book(ledger, attempt, 100) for attempt in range(2, 22))
        assert set(chosen.values()) == {10}


def test_report_of_an_older_route_changes_nothing() -> None:
    ledger = ledger_of(A, B)
    ledger.report(B, IDLE)
    newer = Route("a", 9)
    ledger.open(newer)
    assert not ledger.report(A, replace(IDLE, waiting_tokens=10**6))
    assert not ledger.report(Route("z", 1), IDLE)
    assert ledger.report(newer, IDLE)
    assert set(Counter(book(ledger, attempt) for attempt in range(20)).values()) == {10}


def test_what_a_closed_replica_reported_is_forgotten() -> None:
    ledger = ledger_of(A, B)
    ledger.report(A, replace(IDLE, waiting_tokens=10**6))
    ledger.report(B, IDLE)
    ledger.close(A)
    ledger.open(Route("a", 5))
    assert set(Counter(book(ledger, attempt) for attempt in range(20)).values()) == {10}


def test_outputs_teach_what_to_expect_and_the_bound_stays_booked() -> None:
    ledger = ledger_of(A)
    for attempt in range(300):
        assert book(ledger, attempt, 10, 4000) == "a"
        assert ledger.load() == {"a": 4010}
        ledger.release(attempt, generated=20)
    assert ledger.load() == {"a": 0}
    assert ledger.typical_output == pytest.approx(20, rel=0.2)


def test_cached_tokens_are_not_booked() -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    ledger.open(A)
    index.snapshot("a", 1, 0, [1, 2, 3])
    ledger.expect(1)
    booking = ledger.book(RoutingMeta("r", 1, 70, 5, keys=[1, 2, 3, 4]))
    assert (booking.prefill, booking.cached) == (70 - 48, 48)
    assert ledger.load() == {"a": 27}
    ledger.expect(2)
    booking = ledger.book(RoutingMeta("r", 2, 48, 5, keys=[1, 2, 3]))
    assert (booking.prefill, booking.cached) == (16, 32)  # an engine computes the last token at least


def test_request_given_up_before_its_first_token_leaves_no_claim() -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    ledger.open(A)
    ledger.expect(1)
    ledger.book(RoutingMeta("r", 1, 70, 5, keys=[1, 2, 3, 4]))
    assert index.longest([1, 2, 3, 4]) == {"a": 4}
    ledger.release(1)
    assert index.longest([1, 2, 3, 4]) == {"a": 0}
    ledger.expect(2)
    ledger.book(RoutingMeta("r", 2, 70, 5, keys=[1, 2, 3, 4]))
    ledger.first_token(2)
    ledger.release(2)
    assert index.longest([1, 2, 3, 4]) == {"a": 4}  # computed: its event is on the way


@pytest.mark.parametrize("policy", [Policy.PREFIX, Policy.LEAST_TOKENS])
def test_random_aborts_leave_no_booking(policy: Policy) -> None:
    index, draw = KvIndex(), random.Random(7)
    ledger = Ledger(policy, index)
    routes = {name: Route(name, place) for place, name in enumerate("abcd")}
    for route in routes.values():
        ledger.open(route)
    live: list[int] = []
    for attempt in range(50_000):  # of each policy: 100,000 in all
        ledger.expect(attempt)
        if draw.random() < 0.02:
            ledger.release(attempt)  # given up before the router has seen it
            with pytest.raises(NoRouteError):
                ledger.book(RoutingMeta("r", attempt, 40, 9))
            continue
        ledger.book(RoutingMeta("r", attempt, 40, 9, keys=[attempt % 50, attempt]))
        live.append(attempt)
        if attempt % 1000 == 0:
            name = draw.choice("abcd")
            gone = set(ledger.close(routes[name]))
            live = [other for other in live if other not in gone]
            routes[name] = Route(name, attempt + 10)
            ledger.open(routes[name])
        if attempt % 50 == 0:
            ledger.report(routes[draw.choice("abcd")], replace(IDLE, running=3, acknowledged=attempt - 8))
        if len(live) > 16:
            ended = live.pop(draw.randrange(16))
            if draw.random() > 0.08:
                ledger.first_token(ended)
            assert ledger.release(ended, generated=5)
    for attempt in live:
        assert ledger.release(attempt)
    assert ledger.load() == dict.fromkeys("abcd", 0)
    assert ledger.faults == 0
    # Nor anything else of theirs.
    assert not ledger._bookings
    assert not ledger._expected
    index.expire(float("inf"))
    assert claimed(index) == 0
    assert set(ledger._replicas) == set("abcd")
    for state in ledger._replicas.values():
        assert not any((state.pending, state.bookings, state.booked_tokens))
        assert not any((state.pending_prefill, state.pending_rows, state.pending_kv_tokens))
        assert not any((state.acknowledged_rows, state.acknowledged_kv_tokens))


def test_first_token_frees_the_replica_for_the_next_choice_at_once() -> None:
    ledger = ledger_of(A, B)
    for route in (A, B):
        ledger.report(route, IDLE)
    busy = book(ledger, 1, 3000)
    other = book(ledger, 2, 500)
    assert other != busy
    ledger.first_token(1)
    assert book(ledger, 3, 100) == busy


def test_reopened_route_starts_without_the_load_of_the_older_one() -> None:
    ledger = ledger_of(A, B)
    ledger.report(B, IDLE)
    ledger.report(A, replace(IDLE, waiting_tokens=10**6))
    ledger.open(Route("a", 5))
    assert set(Counter(book(ledger, attempt) for attempt in range(20)).values()) == {10}


def test_what_is_learned_of_a_replica_survives_its_channel() -> None:
    ledger = ledger_of(A, B)
    for _ in range(100):
        ledger.report(A, replace(IDLE, running=4, kv_tokens=4000, step_seconds=0.06))
        ledger.report(B, replace(IDLE, running=4, kv_tokens=4000, step_seconds=0.02))
    slowness = ledger._replicas["a"].history.slowness
    assert slowness > 1.3
    ledger.close(A)
    assert "a" not in ledger.load()
    ledger.open(Route("a", 5))
    assert ledger._replicas["a"].history.slowness == slowness
    assert ledger.report(Route("a", 5), IDLE)
    assert ledger.report(B, IDLE)
    assert ledger._replicas["b"].history.slowness < 1.0
    assert book(ledger, 1, decode=1000) == "b", "its decode steps are quicker"


def test_the_histories_of_the_last_replicas_are_kept() -> None:
    ledger = ledger_of(A)
    for number in range(REMEMBERED + 50):
        ledger.open(Route(f"r{number}", 1))
        ledger.close(Route(f"r{number}", 1))
    assert set(ledger._replicas) == {"a", *(f"r{number}" for number in range(50, REMEMBERED + 50))}
    ledger.open(Route("r50", 2))
    ledger.close(Route("r50", 2))
    ledger.open(Route("x", 1))
    ledger.close(Route("x", 1))
    assert "r50" in ledger._replicas
    assert "r51" not in ledger._replicas


def test_an_older_routes_bookings_are_no_concern_of_a_newer_ones_reports() -> None:
    ledger = ledger_of(A)
    assert book(ledger, 1, 1000) == "a"
    newer = Route("a", 9)
    ledger.open(newer)
    assert ledger.report(newer, replace(IDLE, acknowledged=1))
    state = ledger._replicas["a"]
    assert (state.pending_prefill, state.acknowledged_rows) == (1000, 0)
    assert ledger.close(A) == [1]
    assert (state.pending_prefill, state.pending_rows, state.pending_kv_tokens) == (0, 0, 0)


@pytest.mark.parametrize("moved", [False, True])
def test_a_length_that_was_told_while_it_grew_counts_once(moved: bool) -> None:
    whole, told = Ledger(), Ledger()
    for ledger in (whole, told):
        ledger.open(Route("r", 1))
        for attempt in (1, 2):
            ledger.expect(attempt)
            ledger.book(RoutingMeta("r", attempt, 50, 2000))
    told.grow(1, 0, 600)
    assert told.typical_output == pytest.approx(256 + 256 / 2), "of two, one has outgrown 512"
    last = 2 if moved else 1
    if moved:
        told.release(1)
        told.grow(2, 600, 601)
    told.release(last, generated=700)
    whole.release(1, generated=700)
    assert told.typical_output == pytest.approx(whole.typical_output)
