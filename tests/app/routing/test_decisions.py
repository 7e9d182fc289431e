"""Sequences of a ledger's calls: totals are the sums of bookings, and no view is ever out of date."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_cases import LOADS
from routing_support import BLOCK, IDLE, Fleet, prefix, view

from app.routing import chooser
from app.routing.ledger import Ledger
from app.routing.load import LoadReport
from app.routing.replica_state import Booking, Route

ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["book"] * 6 + ["first_token", "release", "release", "report", "report", "reopen", "store"]
        ),
        st.integers(0, 10**6),
        st.sampled_from([0.0, 0.004, 0.05, 1.0]),
        LOADS,
    ),
    min_size=5,
    max_size=60,
)


def check(ledger: Ledger) -> None:
    """Every total is the sum over the live bookings, and every view is as it would be made now."""
    live: dict[str, list[Booking]] = {}
    for booking in ledger._bookings.values():
        live.setdefault(booking.route.replica, []).append(booking)
    for name, state in ledger._replicas.items():
        bookings = live.get(name, [])
        pending = [booking for booking in bookings if not booking.acknowledged]
        known = [booking for booking in bookings if booking.acknowledged]
        assert state.bookings == len(bookings)
        assert state.booked_tokens == sum(
            booking.decode + (0 if booking.prefilled else booking.prefill) for booking in bookings
        )
        assert state.pending_prefill == sum(booking.prefill for booking in pending if not booking.prefilled)
        assert state.pending_rows == sum(booking.rows for booking in pending)
        assert state.pending_kv_tokens == sum(booking.kv_tokens for booking in pending)
        assert state.acknowledged_rows == sum(booking.rows for booking in known)
        assert state.acknowledged_kv_tokens == sum(booking.kv_tokens for booking in known)
        assert set(state.pending.values()) == {booking for booking in pending if booking.route == state.route}
        if state.view is not None:
            assert asdict(state.view) == asdict(view(state, ledger._estimates))
    open_routes = {name for name, state in ledger._replicas.items() if state.route is not None}
    assert set(ledger.routable()) <= open_routes


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(1, 9), ACTS)
def test_any_sequence_of_calls_keeps_totals_and_views_current(
    size: int, acts: list[tuple[str, int, float, LoadReport]]
) -> None:
    fleet = Fleet(size)
    live: list[int] = []
    epochs, stored = itertools.count(1000), dict.fromkeys(range(size), 0)
    for act, number, later, load in acts:
        fleet.now += later
        place = number % size
        if act == "book":
            shared = prefix(number % 3, number % 41)
            keys = [*shared, *prefix(10 + number, number % 7)]
            avoid = f"r{place}" if number % 11 == 0 else ""
            members = {route.replica for route in fleet.routes[place:]} if number % 5 == 0 else None
            fleet.send(
                len(keys) * BLOCK + number % 9 + 1,
                keys,
                number % 900 + 1,
                avoid=avoid,
                members=members,
                sequences=1 + (number % 13 == 0),
            )
            live.append(fleet.attempts)
        elif act == "report":
            fleet.report(fleet.routes[place], load, seen=max(fleet.attempts - number % 4, 0))
        elif act == "reopen":
            if number % 2:  # else a newer channel opens before the older one is known to be closed
                ended = fleet.ledger.close(fleet.routes[place])
                live = [attempt for attempt in live if attempt not in ended]
            fleet.routes[place] = Route(f"r{place}", next(epochs))
            fleet.open(fleet.routes[place])
            stored[place] = 0
        elif act == "store":
            stored[place] += 1
            fleet.store(place, prefix(number % 3, number % 50), stored[place])
        elif live and act == "first_token":
            fleet.ledger.first_token(live[number % len(live)])
        elif live:
            assert fleet.ledger.release(live.pop(number % len(live)))
        check(fleet.ledger)
    assert fleet.ledger.faults == 0
    for attempt in live:
        fleet.ledger.release(attempt)
    check(fleet.ledger)
    assert not any(fleet.ledger.load().values())


def test_what_one_replica_teaches_of_steps_counts_for_all_at_once() -> None:
    fleet = Fleet(2)
    for _ in range(4):
        fleet.send(100)
    for rows in range(1, 40):
        load = replace(IDLE, running=rows, kv_tokens=rows * 100, step_seconds=0.01 + 0.001 * rows)
        fleet.report(fleet.routes[0], load)
        check(fleet.ledger)


def test_a_burst_of_decisions_makes_one_view_anew_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = chooser.view_of

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]

    fleet = Fleet(8)
    monkeypatch.setattr(chooser, "view_of", counted)
    for name in range(20):
        fleet.send(1607, prefix(name, 100))
    assert len(made) == 19
    fleet.report(fleet.routes[0])
    assert not fleet.ledger._chooser._outdated, "else each report takes longer than the one before"
