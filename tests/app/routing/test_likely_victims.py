"""Likely victims of autoscaling: nothing new goes there that others can take nearly as well."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from choice_cases import CASES, Case
from engine_client_setting import run
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_cases import NOW
from routing_support import BLOCK, IDLE, Fleet, prefix, prompt, replica, view
from serve_router import ServeRouter

from app.routing.cost import RoutingRequest, costs
from app.routing.fleet_estimates import FleetEstimates
from app.routing.likely_victims import EXTRA_S, EXTRA_SHARE, places_that_stay
from app.routing.load import PREFILL_RATE
from app.routing.policies import Policy, cheapest, least_tokens
from app.routing.router import EngineRouter

VICTIM = frozenset({"r0"})

COSTS = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 1.0 + EXTRA_SHARE + EXTRA_S])


@settings(derandomize=True, max_examples=250, deadline=None)
@given(
    st.lists(st.tuples(COSTS, st.booleans()), min_size=1, max_size=8),
    st.sampled_from([0.0, EXTRA_S, 250.0]),
    st.sampled_from([0.0, 0.01, 3.0]),
)
def test_those_that_stay_are_taken_within_the_margin_and_only_there(
    fleet: list[tuple[float, bool]], near: float, tie: float
) -> None:
    names = [f"r{place}" for place in range(len(fleet))]
    costs = [seconds for seconds, _ in fleet]
    victims = {name for name, (_, fades) in zip(names, fleet, strict=True) if fades}
    most = 1.25 * min(costs) + near
    near_enough = [place for place, (seconds, fades) in enumerate(fleet) if not fades and seconds <= most]
    places = places_that_stay(names, costs, victims, near, tie)
    assert bool(places) == bool(near_enough)
    assert set(places) <= set(near_enough)
    if places:
        best = min(costs[place] for place in near_enough)
        assert places == [place for place in near_enough if costs[place] <= best + tie]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(CASES, st.sets(st.integers(0, 7)))
def test_a_choice_is_never_much_worse_than_the_best(case: Case, victims: set[int]) -> None:
    views, held, request, fleet = case
    held = [min(blocks, (request.tokens - 1) // BLOCK) for blocks in held]
    request = request._replace(likely_victims={f"r{victim}" for victim in victims})
    fleet.prefixes = FleetEstimates(BLOCK).prefixes  # no copies are wanted
    seconds = costs(views, held, request, fleet, NOW)
    usual = cheapest(views, held, request._replace(likely_victims=()), fleet, NOW)
    chosen = cheapest(views, held, request, fleet, NOW)
    most = (1 + EXTRA_SHARE) * min(seconds) + EXTRA_S
    assert seconds[chosen.place] <= most + 1e-9 or chosen == usual
    others = [seconds[place] for place, at in enumerate(views) if at.replica not in request.likely_victims]
    if views[chosen.place].replica in request.likely_victims:
        assert min(others, default=float("inf")) > most - 1e-9
        assert chosen == usual, "then it is the one that would be chosen anyway"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0, 100, 1000, 1200, 1600, 50_000]), min_size=1, max_size=6), st.integers(0, 63)
)
def test_a_choice_by_tokens_is_never_much_worse_than_the_least(tokens: list[int], victims: int) -> None:
    fleet = FleetEstimates(BLOCK)
    views = [
        view(replica(name=f"r{place}", booked_tokens=booked), fleet) for place, booked in enumerate(tokens)
    ]
    likely = {f"r{place}" for place in range(6) if victims >> place & 1}
    request = RoutingRequest("request", 100, 100.0, likely_victims=likely)
    chosen = least_tokens(views, request).place
    most = (1 + EXTRA_SHARE) * min(tokens) + EXTRA_S * PREFILL_RATE
    staying = [at.booked_tokens for at in views if at.replica not in likely and at.booked_tokens <= most]
    assert tokens[chosen] == min(staying or tokens)
    assert bool(staying) == (views[chosen].replica not in likely)


@pytest.mark.parametrize(("policy", "each"), [(Policy.PREFIX, 4), (Policy.LEAST_TOKENS, 1)])
def test_new_sessions_begin_where_they_can_stay(policy: Policy, each: int) -> None:
    fleet = Fleet(4, policy)
    chosen = Counter(fleet.send(*prompt([], 5, name), likely_victims=VICTIM) for name in range(3 * each))
    assert chosen == {"r1": each, "r2": each, "r3": each}, "the others share them evenly"


@pytest.mark.parametrize("policy", [Policy.PREFIX, Policy.LEAST_TOKENS])
def test_a_fading_replica_goes_on_helping_when_the_others_have_much_to_do(policy: Policy) -> None:
    fleet = Fleet(2, policy)
    chosen = Counter(fleet.send(*prompt([], 100, name), likely_victims=VICTIM) for name in range(60))
    assert chosen["r1"] > chosen["r0"] > 60 / (2 * (1 + EXTRA_SHARE)) - 3, chosen


def test_a_session_whose_prefix_is_on_a_fading_replica_stays_there() -> None:
    fleet = Fleet(3)
    session = prefix(1, 200)
    fleet.store(0, session)
    assert fleet.send(*prompt(session, 2, 10), likely_victims=VICTIM) == "r0"
    assert fleet.cached == 200 * BLOCK
    fleet.finish()
    assert fleet.send(*prompt(prefix(2, 200), 2, 11), likely_victims=VICTIM) != "r0"


def test_a_copy_elsewhere_is_preferred_to_one_on_a_fading_replica() -> None:
    fleet = Fleet(3)
    shared = prefix(1, 200)
    fleet.store(0, shared)
    fleet.store(2, shared)
    assert {fleet.send(*prompt(shared, 1, 10 + name), likely_victims=VICTIM) for name in range(4)} == {"r2"}


def test_when_demand_is_back_it_is_used_as_before() -> None:
    fleet = Fleet(2)
    for name in range(6):
        assert fleet.send(*prompt([], 2, name), likely_victims=VICTIM) == "r1"
        fleet.finish()
    chosen = Counter(fleet.send(*prompt([], 40, 100 + name)) for name in range(10))
    assert chosen["r0"] == 5


@pytest.mark.parametrize("policy", list(Policy))
def test_where_all_fade_or_nobody_else_is_left_requests_go_on(policy: Policy) -> None:
    fleet = Fleet(3, policy)
    everyone = {route.replica for route in fleet.routes}
    chosen = Counter(fleet.send(*prompt([], 5, name), likely_victims=everyone) for name in range(9))
    assert set(chosen.values()) == {3}
    assert fleet.send(*prompt([], 5, 20), likely_victims=VICTIM, members=["r0"]) == "r0"
    assert fleet.send(*prompt([], 5, 21), likely_victims={"r0", "r1"}, members=["r0", "r1"], avoid="r1") == "r0"
    assert fleet.ledger.faults == 0


def test_a_retry_does_not_go_to_a_fading_replica_either() -> None:
    fleet = Fleet(3)
    assert fleet.send(*prompt([], 5, 1), avoid="r1", likely_victims=VICTIM) == "r2"


def test_a_busy_replica_is_not_chosen_for_the_sake_of_one_that_is_idle_and_fades() -> None:
    fleet = Fleet(2)
    fleet.report(fleet.routes[1], replace(IDLE, waiting_tokens=5000))
    assert fleet.send(*prompt([], 5, 1), likely_victims=VICTIM) == "r0"


def test_the_router_asks_its_fleet_for_likely_victims() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b")
        serve.fleet.likely_victims.set({"a"}, 60)
        for index in range(6):
            await serve.send(str(index), meta=serve.meta(prefill=1, decode=1))
        assert serve.sent() == {"a": 0, "b": 6}
        serve.fleet.likely_victims.set((), 0)
        await serve.send("later", meta=serve.meta(prefill=1, decode=1))
        assert serve.sent() == {"a": 1, "b": 6}

    run(test)


@pytest.mark.parametrize("fades", [True, False])
def test_a_fading_replica_empties_as_its_sessions_end(fades: bool) -> None:
    fleet, draw = Fleet(4), random.Random(5)
    homes: dict[int, str] = {}
    histories: dict[int, list[int]] = {}
    batches: Counter[str] = Counter()
    moved = 0

    def turn(session: int, fading: frozenset[str]) -> bool:
        """One more question of a session; whether it was answered elsewhere than the one before."""
        before = homes.get(session)
        history = histories.setdefault(session, prefix(session, 60))
        history += prefix(session << 8 | len(history), 10)
        fleet.now += 0.2
        home = homes[session] = fleet.send(len(history) * BLOCK + 7, history, likely_victims=fading)
        batches[home] += 1
        assert fleet.index.apply(home, int(home[1:]) + 1, batches[home], history, [], False)
        fleet.finish()
        return before not in (None, home)

    live = list(range(1, 41))
    for session in live:
        turn(session, frozenset())
    assert Counter(homes[session] for session in live)["r0"] >= 5
    # All of these end one after another, and a new one comes for each.
    for session in range(41, 81):
        for _ in range(6):
            moved += turn(draw.choice(live), VICTIM if fades else frozenset())
        live.remove(session - 40)
        live.append(session)
        turn(session, VICTIM if fades else frozenset())
    left = Counter(homes[session] for session in live)["r0"]
    assert moved == 0, "no session is computed anew for this"
    assert left == 0 if fades else left >= 5
