"""Where requests go: each way in which such routers are known to fail, played through ledger and index."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from index_support import claimed
from routing_support import BLOCK, IDLE, Fleet, prefix, prompt

from app.routing.kv_index import KvIndex
from app.routing.ledger import NoRouteError, Route
from app.routing.load import LoadReport
from app.routing.policies import Policy, rendezvous
from app.routing.replica_state import LONGEST_CLAIM_S

# ---- bursts and load


def test_burst_of_distinct_prefixes_spreads() -> None:
    fleet, draw = Fleet(4), random.Random(3)
    tokens: Counter[str] = Counter()
    for name in range(64):
        fleet.now += 0.005 / 64
        wanted, keys = prompt(prefix(name, draw.randint(50, 150)), 5, 1000 + name)
        tokens[fleet.send(wanted, keys)] += wanted
    assert max(tokens.values()) / (sum(tokens.values()) / 4) <= 1.15


def test_burst_of_one_cold_prefix_is_computed_at_most_twice() -> None:
    fleet = Fleet(4)
    cold = prefix(1, 375)
    chosen = Counter(fleet.send(*prompt(cold, 3, 1000 + name)) for name in range(64))
    assert len(chosen) <= 2


def test_burst_of_requests_without_a_full_block_spreads() -> None:
    # No block to find must not mean no load to see.
    fleet = Fleet(4)
    chosen = Counter(fleet.send(9, [], 4) for _ in range(40))
    assert set(chosen.values()) == {10}


def test_a_claim_that_has_ended_counts_no_more_though_nothing_was_heard_since() -> None:
    fleet = Fleet(2)
    cold = prefix(1, 50)
    sent = fleet.send(*prompt(cold, 0, 9))
    assert fleet.send(*prompt(cold, 0, 9)) == sent
    assert fleet.cached == 50 * BLOCK
    fleet.now += LONGEST_CLAIM_S
    fleet.send(*prompt(cold, 0, 9))
    assert fleet.cached == 0


def test_a_policy_that_goes_by_load_alone_claims_nothing() -> None:
    fleet = Fleet(2, Policy.LEAST_TOKENS)
    fleet.send(*prompt(prefix(1, 5), 0, 9))
    assert claimed(fleet.index) == 0
    fleet.ledger.configure(Policy.PREFIX)
    fleet.send(*prompt(prefix(2, 5), 0, 9))
    before = claimed(fleet.index)
    assert before > 0
    fleet.ledger.configure(Policy.ROUND_ROBIN)
    fleet.send(*prompt(prefix(3, 5), 0, 9))
    assert claimed(fleet.index) == before


def test_hot_prefix_spills_over_when_its_replica_is_too_busy() -> None:
    fleet = Fleet(3)
    hot = prefix(1, 100)
    fleet.store(0, hot)
    assert {fleet.send(*prompt(hot, 2, 10 + name)) for name in range(5)} == {"r0"}
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=20_000))
    assert fleet.send(*prompt(hot, 2, 99)) != "r0"


def test_prefix_that_everyone_shares_comes_to_be_everywhere_and_load_even() -> None:
    fleet = Fleet(4)
    hot = prefix(1, 100)
    chosen = []
    for name in range(800):
        chosen.append(fleet.send(*prompt(hot, 2, 10 + name)))
        if name >= 16:
            fleet.finish(name - 15)
    late = Counter(chosen[400:])
    assert max(late.values()) / 100 <= 1.15


def test_one_hot_replica_does_not_switch_affinity_off_for_others() -> None:
    fleet = Fleet(3)
    mine = prefix(5, 60)
    fleet.store(1, mine)
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=10**6, running=250, kv_tokens=10**6))
    assert fleet.send(*prompt(mine, 1, 77)) == "r1"


def test_miss_goes_to_the_least_work_however_little_is_cached_there() -> None:
    fleet = Fleet(2)
    fleet.store(1, prefix(9, 500))
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=5000))
    assert {fleet.send(*prompt(prefix(name, 10), 1, 50 + name)) for name in range(10, 20)} == {"r1"}


def test_one_long_prompt_weighs_more_than_many_short_ones() -> None:
    fleet = Fleet(2)
    long = fleet.send(*prompt(prefix(1, 1000), 1, 2))
    short = Counter(fleet.send(*prompt(prefix(name, 2), 1, 100 + name), output=4) for name in range(10, 90))
    assert short[long] == 0


def test_half_used_prefix_is_worth_its_tokens_not_its_ratio() -> None:
    # 90% of a short prompt are little against a backlog that half of a long one outweighs.
    fleet = Fleet(2)
    fleet.store(0, [*prefix(1, 9), *prefix(2, 1000)])
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=6000))
    assert fleet.send(*prompt(prefix(1, 9), 1, 30)) == "r1"
    assert fleet.send(*prompt(prefix(2, 1000), 1000, 40)) == "r0"


def test_replica_whose_pool_is_saturated_gives_its_sessions_up() -> None:
    fleet = Fleet(2)
    session = prefix(1, 100)
    fleet.store(0, session)
    busy = replace(IDLE, running=40, kv_tokens=60_000, waiting_tokens=6000, num_blocks=4000)
    fleet.report(fleet.routes[1], replace(busy, waiting_tokens=0, referenced=1000, free=3000))
    fleet.report(fleet.routes[0], replace(busy, referenced=2000, free=0, evictable=2000))
    assert fleet.send(*prompt(session, 4, 50)) == "r0"
    fleet.finish()
    fleet.report(fleet.routes[0], replace(busy, referenced=4000, free=0, evictable=0))
    assert fleet.send(*prompt(session, 4, 51)) == "r1"


# ---- ties


def test_ties_spread_and_independent_processes_agree_on_a_cold_prefix() -> None:
    homes = [[Fleet(4).send(*prompt(prefix(name, 20), 0, 0)) for name in range(1, 200)] for _ in range(2)]
    assert homes[0] == homes[1]
    assert max(Counter(homes[0]).values()) < 1.4 * 199 / 4


def test_cold_prefix_beyond_a_root_that_all_hold_has_one_home() -> None:
    # The first key that nobody holds decides: not the root, which is the same, nor what each request asks.
    def home(name: int, question: int) -> str:
        fleet = Fleet(4)
        root = prefix(1, 8)
        for place in range(4):
            fleet.store(place, root)
        return fleet.send(*prompt([*root, *prefix(name, 30)], 4, question))

    homes = {name: {home(name, question) for question in (900, 901, 902)} for name in range(10, 60)}
    assert all(len(where) == 1 for where in homes.values())
    assert len({next(iter(where)) for where in homes.values()}) == 4


def test_requests_one_after_another_do_not_all_go_to_one_replica() -> None:
    # Nothing is in flight at any decision.
    fleet, chosen = Fleet(4), Counter[str]()
    for name in range(200):
        chosen[fleet.send(*prompt(prefix(name + 1, 10), 1, 1000 + name))] += 1
        fleet.finish()
        fleet.report(next(route for route in fleet.routes))
    assert min(chosen[route.replica] for route in fleet.routes) >= 25


def test_short_requests_one_after_another_spread_too() -> None:
    fleet, chosen = Fleet(4), Counter[str]()
    for _ in range(200):
        chosen[fleet.send(9)] += 1
        fleet.finish()
    assert min(chosen[route.replica] for route in fleet.routes) >= 25


def test_rendezvous_ranks_evenly_when_one_replica_leaves() -> None:
    draw = random.Random(1)
    seeds = [draw.getrandbits(64) for _ in range(5)]
    keys = [draw.getrandbits(64) for _ in range(5000)]
    homes = {key: max(seeds, key=lambda seed, key=key: rendezvous(key, seed)) for key in keys}  # type: ignore[misc]
    left = {key: max(seeds[1:], key=lambda seed, key=key: rendezvous(key, seed)) for key in keys}  # type: ignore[misc]
    moved = [key for key in keys if homes[key] != left[key]]
    assert all(homes[key] == seeds[0] for key in moved)
    shares = Counter(left[key] for key in moved)
    assert min(shares.values()) > 0.8 * len(moved) / 4


# ---- several ingresses, changes of the fleet


def test_foreign_load_is_seen_by_engine_truth() -> None:
    mine, theirs = Fleet(2), Fleet(2)
    busy = theirs.send(*prompt(prefix(1, 500), 1, 2))
    place = int(busy[1:])
    mine.report(mine.routes[place], replace(IDLE, waiting_tokens=8000), seen=0)
    assert {mine.send(*prompt(prefix(name, 5), 1, 90 + name)) for name in range(5, 15)} == {f"r{1 - place}"}


def test_processes_with_the_same_events_send_a_session_to_the_same_replica() -> None:
    session = prefix(1, 50)
    for _ in range(2):
        fleet = Fleet(4)
        fleet.store(2, session)
        assert fleet.send(*prompt(session, 2, 70)) == "r2"


def test_new_replica_gets_its_share_of_cold_and_hot_requests() -> None:
    fleet, draw = Fleet(2), random.Random(5)
    groups = [prefix(name, 40) for name in range(1, 9)]
    running: list[int] = []

    def run(count: int) -> Counter[str]:
        chosen: Counter[str] = Counter()
        for _ in range(count):
            chosen[fleet.send(*prompt(draw.choice(groups), 3, draw.getrandbits(31)))] += 1
            running.append(fleet.attempts)
            if len(running) > 48:
                fleet.finish(running.pop(0))
        return chosen

    run(400)
    for place in (2, 3):
        fleet.routes.append(Route(f"r{place}", place + 1))
        fleet.open(fleet.routes[-1])
    run(400)
    chosen = run(400)
    assert chosen["r2"] + chosen["r3"] >= 0.8 * 400 / 2
    assert min(chosen.values()) >= 0.7 * 400 / 4


def test_suspects_and_strangers_count_in_no_statistic() -> None:
    # A replica that looks empty because it is ill must not change what healthy ones are compared with.
    chosen = []
    for ill in (False, True):
        fleet = Fleet(3, reported=False)
        fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=3000))
        if ill:
            fleet.report(fleet.routes[2])
        fleet.ledger.suspect("r2", True)
        chosen.append([fleet.send(*prompt(prefix(name, 9), 1, 100 + name)) for name in range(10, 30)])
    assert chosen[0] == chosen[1]
    assert "r2" not in chosen[0]


def test_replica_without_a_report_is_taken_for_an_average_one() -> None:
    fleet = Fleet(3, reported=False)
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=10_000))
    fleet.report(fleet.routes[1], replace(IDLE, waiting_tokens=2_000))
    chosen = Counter(fleet.send(*prompt(prefix(name, 9), 1, 100 + name)) for name in range(10, 14))
    assert chosen == {"r1": 4}
    assert "r2" in {fleet.send(*prompt(prefix(name, 90), 1, 100 + name)) for name in range(20, 24)}


def test_an_average_is_as_of_now_whatever_an_older_route_reported() -> None:
    fleet = Fleet(2)
    fleet.now += 60.0
    newer = Route("r1", 9)
    fleet.open(newer, reported=False)
    for place in (0, 1):
        assert fleet.ledger._replicas[f"r{place}"].reported_at == 1000.0
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=10_000))
    chosen = Counter(fleet.send(*prompt(prefix(name, 9), 1, 100 + name)) for name in range(10, 30))
    assert min(chosen["r0"], chosen["r1"]) >= 8, "it would look empty"


def test_a_request_that_is_placed_again_does_not_find_its_own_blocks_lost() -> None:
    fleet, (tokens, keys) = Fleet(2), prompt(prefix(1, 40), 5, 2)
    first = fleet.send(tokens, keys)
    fleet.ledger.release(fleet.attempts)  # nothing of it was computed
    assert fleet.send(tokens, keys, avoid=first) != first
    fleet.ledger.release(fleet.attempts)
    assert fleet.ledger._estimates.reuse.share == 0.0
    fleet.send(tokens, keys)  # another request for the same
    fleet.ledger.release(fleet.attempts)
    assert fleet.ledger._estimates.reuse.share > 0.0


def test_the_only_replica_that_may_take_it_does_even_if_it_is_full() -> None:
    fleet = Fleet(2)
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=10**6, free=0, referenced=4000, num_blocks=4000))
    assert fleet.send(100, members={"r0"}) == "r0"
    assert fleet.send(100, avoid="r1") == "r0"
    with pytest.raises(NoRouteError):
        fleet.send(100, members={"gone"})


# ---- faults and effort


class Counting(KvIndex):
    """Counts walks, and fails on demand."""

    walks = 0
    broken = ""

    def longest(self, keys: Sequence[int]) -> dict[str, int]:
        self.walks += 1
        if self.broken == "longest":
            raise RuntimeError("planted")
        return super().longest(keys)

    def claim(self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int = 0) -> None:
        if self.broken == "claim":
            raise RuntimeError("planted")
        super().claim(replica, keys, now, deadline, blocks)

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        if self.broken == "withdraw":
            raise RuntimeError("planted")
        return super().withdraw(replica, keys)


def test_one_walk_for_each_decision() -> None:
    index = Counting()
    fleet = Fleet(8, index=index)
    for name in range(10):
        fleet.send(*prompt(prefix(name, 20), 1, 100 + name))
    assert index.walks == 10


@pytest.mark.parametrize("where", ["longest", "claim", "withdraw"])
def test_fault_in_a_choice_degrades_to_the_least_booked(where: str, caplog: pytest.LogCaptureFixture) -> None:
    index = Counting()
    fleet = Fleet(4, index=index)
    index.broken = where
    with caplog.at_level(logging.ERROR):
        chosen = Counter(fleet.send(*prompt(prefix(name, 20), 1, 100 + name)) for name in range(40))
        for attempt in range(1, 41):
            fleet.ledger.release(attempt)
    assert set(chosen.values()) == {10}
    assert fleet.ledger.faults == 40
    assert len(caplog.records) == 6  # of faults 1, 2, 4, 8, 16, 32
    assert not any(fleet.ledger.load().values())


def test_broken_report_breaks_no_placement() -> None:
    fleet = Fleet(2)
    nan, inf = float("nan"), float("inf")
    fleet.report(
        fleet.routes[0],
        LoadReport(-1, nan, 10**400, -5, nan, nan, nan, inf, nan, -1, 0, 0, nan, -1, inf, 0, 0, 0),  # type: ignore[arg-type]
    )
    assert set(Counter(fleet.send(500) for _ in range(10)).values()) == {5}
    assert fleet.ledger.faults == 0


# ---- the other policies


def test_least_tokens_knows_no_prefix() -> None:
    fleet = Fleet(3, Policy.LEAST_TOKENS)
    fleet.store(0, prefix(1, 100))
    chosen = Counter(fleet.send(*prompt(prefix(1, 100), 1, 9)) for _ in range(30))
    assert set(chosen.values()) == {10}
    booking = fleet.ledger.booking(1)
    assert booking is not None
    assert booking.cached == 0


def test_round_robin_takes_turns_whatever_the_load() -> None:
    fleet = Fleet(3, Policy("round_robin"))
    fleet.report(fleet.routes[0], replace(IDLE, waiting_tokens=10**6))
    chosen = [fleet.send(100 * (number % 4 + 1)) for number in range(9)]
    assert chosen[:3] * 3 == chosen
    assert sorted(chosen[:3]) == ["r0", "r1", "r2"]
