"""Load: each way in which other routers are known to overload some replicas while others idle.

The table in docs/routing.md says which failure each test stands for, and where it was seen.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from routing_support import BLOCK, IDLE, Engines, Fleet, prefix, prompt

from app.routing import fleet as fleets
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, NoRouteError, Route
from app.routing.routing_meta import RoutingMeta


def spread(chosen: Counter[str], replicas: int) -> float:
    """The busiest over the mean."""
    return max(chosen.values()) / (chosen.total() / replicas)


def test_a_hot_prefix_comes_to_be_everywhere_and_is_computed_once_for_each_replica() -> None:
    fleet = Fleet(4)
    hot = prefix(1, 400)
    fleet.store(0, hot)
    held, sequences, computed = {"r0"}, Counter({"r0": 1}), 0
    under_way: list[tuple[int, str, list[int]]] = []
    late: Counter[str] = Counter()
    for name in range(600):
        fleet.now += 0.01
        tokens, keys = prompt(hot, 2, 1000 + name)
        replica = fleet.send(tokens, keys)
        under_way.append((fleet.attempts, replica, keys))
        late[replica] += name >= 300
        if len(under_way) < 32:
            continue
        # The oldest has its prompt computed: its engine tells.
        attempt, replica, keys = under_way.pop(0)
        computed += replica not in held
        held.add(replica)
        sequences[replica] += 1
        fleet.store(int(replica[1:]), keys, sequences[replica])
        fleet.finish(attempt)
    fleet.index.expire(fleet.now + 20.0)  # so that only what engines have told counts
    assert dict(fleet.index.longest(hot)) == dict.fromkeys(("r0", "r1", "r2", "r3"), 400)
    assert computed == 3
    assert spread(late, 4) <= 1.1


def test_ties_among_the_rest_do_not_all_fall_to_the_neighbor_of_a_busy_replica() -> None:
    fleet, chosen = Fleet(8), Counter[str]()
    fleet.report(fleet.routes[3], replace(IDLE, waiting_tokens=50_000))
    for name in range(700):
        chosen[fleet.send(*prompt(prefix(name + 1, 10), 1, 2000 + name))] += 1
        fleet.finish()
    assert chosen["r3"] == 0
    assert max(chosen.values()) <= 130
    assert len(chosen) == 7
    assert min(chosen.values()) >= 70


def test_a_replica_that_looks_empty_because_its_events_lag_draws_no_new_prompts() -> None:
    fleet, chosen = Fleet(4), Counter[str]()
    for place in (0, 1, 3):
        fleet.store(place, prefix(900 + place, 3000))
    for name in range(400):
        chosen[fleet.send(*prompt(prefix(name + 1, 10), 1, 2000 + name))] += 1
        fleet.finish()
    assert 70 <= chosen["r2"] <= 130


class SlowKeys(list[int]):
    """Lets other threads run in the middle of a choice, which asks for single keys from first to last."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            time.sleep(0.001)
        return super().__getitem__(place)


def test_requests_that_are_routed_at_the_same_instant_see_each_other() -> None:
    ledger = Ledger(index=KvIndex())
    for place in range(4):
        ledger.open(Route(f"r{place}", 1))
    chosen: list[str] = []
    start = threading.Barrier(16)

    def route(thread: int) -> None:
        start.wait()
        for attempt in (thread, thread + 16):
            ledger.expect(attempt)
            keys = SlowKeys(prefix(attempt + 1, 50))
            chosen.append(ledger.book(RoutingMeta(f"q{attempt}", attempt, 807, 10, keys=keys)).route.replica)

    threads = [threading.Thread(target=route, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Counter(chosen).values()) == {8}


@pytest.mark.parametrize("blocks", [0, 20])
def test_ingresses_that_know_nothing_of_each_other_do_not_start_on_one_replica(blocks: int) -> None:
    first: Counter[str] = Counter()
    for number in range(1, 17):
        ingress = Fleet(4)
        ingress.attempts = 100 * number  # each has requests of its own
        first[ingress.send(7 + BLOCK * blocks, prefix(number, blocks))] += 1
    assert len(first) == 4
    assert max(first.values()) <= 7


@pytest.mark.parametrize("ingresses", [1, 16])
def test_many_ingresses_see_a_slow_replica_as_one_does(ingresses: int) -> None:
    """Engines tell all of them what waits; each adds what it has sent since."""
    engines = Engines(*(Fleet(4) for _ in range(ingresses)))
    draw, widest = random.Random(7), 0
    for number in range(640):
        tokens, keys = prompt(prefix(number + 1, draw.randint(5, 120)), 1, 2000 + number)
        entry = draw.choice(engines.entries)
        engines.take(entry, entry.send(tokens, keys), tokens)
        if number % 8 == 7:
            engines.work(2_100, r0=900)
            waiting = [engines.waiting(replica) for replica in engines.queues]
            widest = max(widest, max(waiting) - min(waiting))
    assert widest <= 12_000  # tokens: less than the 8 longest prompts, sent between two reports


def test_a_replica_that_streams_stays_busy_until_the_last_token() -> None:
    fleet = Fleet(2)
    busy = fleet.send(*prompt(prefix(1, 2), 1, 2), output=4000)
    fleet.ledger.first_token(1)
    for attempt in range(2, 7):
        assert fleet.send(9, output=10) != busy
        fleet.ledger.first_token(attempt)
    for attempt in range(1, 7):
        fleet.finish(attempt)
    assert not any(fleet.ledger.load().values())
    fleet.send(9, output=10)
    assert busy in {fleet.send(9, output=10) for _ in range(3)}


def test_prompts_of_a_replica_that_leaves_find_one_new_home_each() -> None:
    entries, left = [Fleet(4), Fleet(4)], {"r1", "r2", "r3"}
    groups = [prefix(name, 60) for name in range(1, 25)]
    homes: list[set[str]] = []
    for sequence, group in enumerate(groups, 1):
        for entry in entries:
            entry.store(0, group, sequence)
            assert entry.send(*prompt(group, 1, 300)) == "r0"
            entry.finish()
        where = set()
        for entry in entries:
            where |= {entry.send(*prompt(group, 1, 400 + question), members=left) for question in range(3)}
        homes.append(where)
    assert all(len(where) == 1 for where in homes)
    assert set().union(*homes) == left
    for entry in entries:
        entry.ledger.close(entry.routes[0])
        assert "r0" not in dict(entry.index.longest(groups[0]))


def test_whoever_cannot_take_a_request_is_left_out_before_the_choice_not_after_it() -> None:
    fleet = Fleet(3)
    mine = prefix(1, 200)
    fleet.store(0, mine)
    assert fleet.send(*prompt(mine, 1, 10)) == "r0"
    # It has the whole prompt and no load, and would be the best of all.
    assert fleet.send(*prompt(mine, 1, 11), members={"r1", "r2"}) != "r0"
    assert fleet.send(*prompt(mine, 1, 12), avoid="r0") != "r0"
    fleet.ledger.suspect("r0", True)
    assert fleet.send(*prompt(mine, 1, 13)) != "r0"
    fleet.ledger.suspect("r0", False)
    fleet.ledger.close(fleet.routes[0])
    assert fleet.send(*prompt(mine, 1, 14)) != "r0"
    with pytest.raises(NoRouteError):
        fleet.send(*prompt(mine, 1, 15), members={"r0"})
    assert fleet.ledger.faults == 0


def test_deployments_know_nothing_of_each_others_replicas() -> None:
    one, two = fleets.get_fleet("an application", "small"), fleets.get_fleet("an application", "large")
    one.set_members(frozenset({"a"}))
    one.ledger.open(Route("a", 1))
    one.index.snapshot("a", 1, 0, [1, 2, 3])
    assert fleets.get_fleet("an application", "small") is one
    assert two.members == frozenset()
    assert two.ledger.routable() == []
    assert not two.index.longest([1, 2, 3])
