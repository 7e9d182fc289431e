"""The ledger and the index of who holds what: it follows the routes, and a defect in it loses no replica."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
import routing_support
from engine_client_setting import run, until
from kv_loopback import KvIngress, KvReplica, connected

from app.channel import ingress_channel
from app.routing.claims import Claims
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from app.routing.policies import ROUTING_REASONS
from app.routing.routing_meta import RoutingMeta

A, B = Route("a", 1), Route("b", 2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon."""
    monkeypatch.setattr(ingress_channel, "RESYNC_S", 0.02)
    monkeypatch.setattr(ingress_channel, "BEAT_S", 0.02)


def fail(*_: Any) -> None:
    raise RuntimeError("planted")


def test_index_follows_the_routes() -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    ledger.open(A)
    assert index.replicas == ["a"]
    ledger.open(B)
    assert ledger.with_index("a", lambda: index.longest([1])) == {"a": 0, "b": 0}
    ledger.close(Route("a", 99))
    ledger.close(A)
    assert index.replicas == ["b"]


def test_state_tells_what_runs_where_a_route_has_reported() -> None:
    ledger = Ledger()
    for route in (A, B):
        ledger.open(route)
    ledger.report(A, replace(routing_support.IDLE, running=3))
    undecided = dict.fromkeys(ROUTING_REASONS, 0)
    assert ledger.state() == {"faults": 0, "reasons": undecided, "running": {"a": 3}}
    ledger.close(A)
    assert ledger.state() == {"faults": 0, "reasons": undecided, "running": {}}


def test_a_replica_that_the_index_cannot_add_is_routed_to_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    monkeypatch.setattr(index, "add", fail)
    with caplog.at_level(logging.ERROR):
        ledger.open(A)
    ledger.expect(1)
    assert ledger.book(RoutingMeta("r", 1, 50, 5, keys=[1, 2, 3])).route == A
    assert ledger.faults == ledger.state()["faults"] == len(caplog.records) == 1


@pytest.mark.parametrize(
    ("owner", "method", "faults"),
    [
        (KvIndex, "remove", 2),  # dropping the replica after the first failure fails, too
        (Claims, "clear", 1),
    ],
)
def test_a_route_closes_though_the_index_cannot_forget_its_replica(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, faults: int
) -> None:
    ledger = Ledger(index=KvIndex())
    for route in (A, B):
        ledger.open(route)
    keys = [1, 2, 3]
    for attempt in range(8):
        ledger.expect(attempt)
    booked = [ledger.book(RoutingMeta(f"r{attempt}", attempt, 50, 5, keys=keys)).route for attempt in range(8)]
    monkeypatch.setattr(owner, method, fail)
    assert ledger.close(A) == [attempt for attempt, route in enumerate(booked) if route == A]
    assert ledger.faults == faults
    assert (ledger.routable(), list(ledger.load())) == (["b"], ["b"])
    ledger.expect(9)
    assert ledger.book(RoutingMeta("r9", 9, 50, 5, keys=keys)).route == B
    assert ledger.faults == faults


@pytest.mark.parametrize(("method", "faults"), [("claim", 1), ("withdraw", 1), ("expire", 2)])
def test_a_defect_in_claims_is_counted_and_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, method: str, faults: int
) -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    ledger.open(A)
    monkeypatch.setattr(index, method, fail)
    ledger.expect(1)
    assert ledger.book(RoutingMeta("r", 1, 50, 5, keys=[1, 2, 3])).route == A
    assert ledger.release(1)
    assert ledger.faults == faults  # claims expire at the choice and at the release


def test_keys_that_no_choice_can_use_fail_no_request() -> None:
    ledger = Ledger(index=KvIndex())
    for route in (A, B):
        ledger.open(route)
    ledger.expect(1)
    wrong: Any = ["a", "b"]
    assert ledger.book(RoutingMeta("r", 1, 50, 5, keys=wrong)).reason == "fault"
    assert ledger.release(1)


def test_an_index_that_cannot_drop_a_replica_after_a_defect_counts_two_faults(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    ledger.open(A)
    monkeypatch.setattr(index, "remove", fail)
    assert ledger.with_index("a", fail) is None
    assert ledger.faults == 2
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "cannot drop a replica" in caplog.messages[1]


def test_a_defect_while_the_index_changes_takes_its_replica_out() -> None:
    index = KvIndex()
    ledger = Ledger(index=index)
    for route in (A, B):
        ledger.open(route)
        index.snapshot(*route, 1, [1, 2])
    assert ledger.with_index("a", fail) is None
    assert index.longest([1, 2]) == {"b": 2}
    assert (ledger.routable(), ledger.faults) == (["a", "b"], 1)
    ledger.close(A)
    ledger.open(Route("a", 3))
    assert index.longest([1, 2]) == {"a": 0, "b": 2}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("method", ["apply", "snapshot", "add"])
def test_a_defect_in_taking_events_in_ends_no_channel_and_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def test() -> None:
        replica, other = KvReplica("r"), KvReplica("s")
        ingress = KvIngress(replica, other) if method != "apply" else await connected(replica, other)
        original = getattr(ingress.index, method)

        def broken(name: str, *rest: Any) -> Any:
            return fail() if name == "r" else original(name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(ingress.index, method, broken)
            await until(lambda: len(ingress.routes) == 2)
            replica.step(1)
            await until(lambda: ingress.ledger.faults > 0)
            await asyncio.sleep(0.05)
            snapshots = replica.snapshots
        for text in range(2, 6):
            replica.step(text)
            other.step(text)
            await asyncio.sleep(0.03)  # longer than it waits before it asks again
        assert ingress.closed == []
        assert replica.snapshots == snapshots
        assert sorted(ingress.ledger.routable()) == ["r", "s"]
        await until(lambda: ingress.in_step(other))
        assert ingress.holds(5) == {"s": 2}
        assert ingress.feed.state()["r"]["digest"] is None
        assert ingress.ledger.faults == 1
        # Its next channel begins anew.
        again = KvReplica("r")
        again.step(3)
        ingress.handle.replicas["r"] = again
        replica.kill()
        await until(lambda: ingress.in_step(again))
        await ingress.stop()

    run(test)
