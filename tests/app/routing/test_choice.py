"""A decision is a pure function: what it may choose, and what it must not depend on."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace

import pytest
from choice_cases import CASES, Case, margin
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from routing_cases import NOW
from routing_support import BLOCK, IDLE, replica, view

from app.routing.cost import TERMS, RoutingRequest, costs
from app.routing.fleet_estimates import WINDOW, FleetEstimates
from app.routing.policies import (
    POLICY_FUNCTIONS,
    ROUTING_REASONS,
    Policy,
    RoutingDecision,
    cheapest,
    least_booked,
    least_tokens,
    rendezvous,
    round_robin,
)
from app.routing.replica_state import ReplicaView, name_key


@settings(derandomize=True, max_examples=150, deadline=None)
@given(CASES)
def test_the_chosen_one_costs_least_but_for_a_margin(case: Case) -> None:
    views, held, request, fleet = case
    usable = [min(blocks, (request.tokens - 1) // BLOCK) for blocks in held]
    place, cached, shared, *_ = cheapest(views, held, request, fleet, NOW)
    assert (cached, shared) == (held[place], max(held))
    deficit = 0.0
    if shared:
        copies = fleet.prefixes.share(request.keys[shared - 1]) * len(views)
        deficit = min(max(copies - usable.count(max(usable)), 0.0), 1.0)
    seconds = costs(views, usable, request, fleet, NOW, deficit)
    best = seconds.index(min(seconds))
    assert seconds[place] <= min(seconds) + margin(case, best) + 1e-9
    # Of those within it, nobody has less booked.
    within = [at for at, cost in enumerate(seconds) if cost <= min(seconds) + margin(case, best) - 1e-9]
    chosen = views[place].booked_tokens, views[place].bookings
    assert chosen <= min(((views[at].booked_tokens, views[at].bookings) for at in within), default=chosen)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CASES, st.sampled_from(list(Policy)), st.data())
def test_the_order_of_the_views_does_not_matter(case: Case, policy: Policy, data: st.DataObject) -> None:
    views, held, request, fleet = case
    seconds = costs(views, held, request, fleet, NOW)
    assume(sorted(seconds)[:2] != [min(seconds)] * 2 or len(set(seconds)) == 1)
    order = data.draw(st.permutations(range(len(views))))
    first = POLICY_FUNCTIONS[policy](views, held, request, fleet, NOW)
    second = POLICY_FUNCTIONS[policy](
        [views[at] for at in order], [held[at] for at in order], request, fleet, NOW
    )
    assert views[order[second.place]].replica == views[first.place].replica


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CASES, st.sampled_from(list(Policy)))
def test_a_decision_changes_nothing_and_is_the_same_again(case: Case, policy: Policy) -> None:
    views, held, request, fleet = case
    before = deepcopy((views, held, request, vars(fleet.steps), fleet.outputs.tokens, fleet.reuse.share))
    decision = POLICY_FUNCTIONS[policy](views, held, request, fleet, NOW)
    assert POLICY_FUNCTIONS[policy](views, held, request, fleet, NOW) == decision
    after = (views, held, request, vars(fleet.steps), fleet.outputs.tokens, fleet.reuse.share)
    assert after == before


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CASES)
def test_one_that_is_worse_in_all_is_not_chosen(case: Case) -> None:
    views, held, request, fleet = case
    best = views[cheapest(views, held, request, fleet, NOW).place]
    worse = replace(
        best,
        replica="worse",
        seed=name_key("worse"),
        backlog_s=best.backlog_s + 10 * BLOCK * best.token_cost + 1e6,
        booked_tokens=best.booked_tokens + 1,
    )
    decision = cheapest([worse, *views], [0, *held], request, fleet, NOW)
    assert decision.place != 0


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CASES, st.sampled_from([0.5, 60.0]))
def test_what_makes_all_wait_alike_changes_nothing(case: Case, more: float) -> None:
    views, held, request, fleet = case
    usable = [min(blocks, (request.tokens - 1) // BLOCK) for blocks in held]
    seconds = sorted(costs(views, usable, request, fleet, NOW))
    limit = seconds[0] + max(margin(case, place) for place in range(len(views)))
    assume(len(seconds) == 1 or not fleet.prefixes._last)
    assume(all(abs(cost - limit) > 1e-6 for cost in seconds))
    later = [replace(here, backlog_s=here.backlog_s + more) for here in views]
    before = cheapest(views, held, request, fleet, NOW)
    after = cheapest(later, held, request, fleet, NOW)
    if margin(case, before.place) == margin(case, after.place):
        assert after[:3] == before[:3]


def test_all_of_a_view_is_final() -> None:
    assert {str(field.type).partition("[")[0] for field in fields(ReplicaView)} == {"Final"}


# ---- reasons


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CASES)
def test_the_reason_is_the_term_that_saves_most(case: Case) -> None:
    views, held, request, fleet = case
    decision = cheapest(views, held, request, fleet, NOW)
    assert decision.reason in ROUTING_REASONS
    assert (decision.reason == "only") is (len(views) == 1)
    usable = [min(blocks, (request.tokens - 1) // BLOCK) for blocks in held]
    if len(views) != 2 or decision.reason not in (*TERMS, "prefix"):
        return
    place, parts = decision.place, list[tuple[float, ...]]()
    costs(views, usable, request, fleet, NOW, parts=parts)
    differences = [there - here for here, there in zip(parts[place], parts[1 - place], strict=True)]
    saved = dict(zip(TERMS, differences, strict=True))
    if fleet.prefixes._last:  # then lacking copies are not charged
        return
    assert saved["compute" if decision.reason == "prefix" else decision.reason] >= max(saved.values()) - 1e-9
    assert (decision.reason == "prefix") <= (usable[place] > usable[1 - place])


def test_each_reason_is_found() -> None:
    fleet = FleetEstimates(BLOCK)
    request = RoutingRequest("r", 3207, 100.0, keys=list(range(200)))
    here, there = several((0, 0), (0, 0))
    fleet.reuse._lost = 1.0
    cases = {
        "wait": replace(there, backlog_s=5.0),
        "compute": replace(there, token_cost=2 * here.token_cost),
        "streaming": replace(there, streaming_weight=1e6),
        "eviction": replace(there, free_tokens=0.0, evictable_tokens=1e6),
        "admission": replace(there, free_slots=-10.0, slot_s=100.0),
    }
    assert list(cases) == list(TERMS)
    for reason, worse in cases.items():
        assert cheapest([here, worse], [0, 0], request, fleet, 0.0)[:4] == (0, 0, 0, reason)
    assert cheapest([here, there], [200, 0], request, fleet, 0.0).reason == "prefix"
    assert cheapest([here, there], [0, 0], request, fleet, 0.0).reason == "balance"
    assert cheapest([here], [0], request, fleet, 0.0).reason == "only"


# ---- ties


def several(*booked: tuple[int, int]) -> list[ReplicaView]:
    fleet = FleetEstimates(BLOCK)
    return [
        replace(view(replica(name=f"r{place}"), fleet), booked_tokens=tokens, bookings=bookings)
        for place, (tokens, bookings) in enumerate(booked)
    ]


@pytest.mark.parametrize(
    ("booked", "places", "expected"),
    [
        ([(9, 1), (5, 7), (5, 2), (0, 0)], [0, 1, 2], {2}),
        ([(5, 2), (5, 7), (9, 1)], [0, 1, 2], {0}),
        ([(5, 2), (5, 2), (9, 1)], [0, 1, 2], {0, 1}),
        ([(0, 0), (5, 2)], [1], {1}),
    ],
)
def test_fewest_tokens_then_fewest_bookings(
    booked: list[tuple[int, int]], places: list[int], expected: set[int]
) -> None:
    views = several(*booked)
    chosen = {least_booked(views, places, RoutingRequest(f"r{number}", 10, 1.0)) for number in range(60)}
    assert chosen == expected


def test_ties_go_by_the_first_key_that_nobody_holds() -> None:
    views, name, keys = several(*[(0, 0)] * 5), name_key("x"), [1, 2, 3]
    for held, shared, key in ((keys, 0, 1), (keys, 2, 3), (keys, 3, name), ([], 0, name)):
        request = RoutingRequest("x", 64, 1.0, keys=held)
        weights = [rendezvous(key, here.seed) for here in views]
        assert least_booked(views, range(5), request, [shared] * 5) == weights.index(max(weights))


def test_of_equal_replicas_one_that_holds_all_of_a_prompt_gets_it_again() -> None:
    views = several(*[(0, 0)] * 3, (9, 1))
    for number in range(20):
        request = RoutingRequest(f"r{number}", 27, 1.0, keys=[1])
        assert least_booked(views, range(4), request, [0, 1, 0, 1]) == 1
        assert least_booked(views, [0, 2], request, [0, 1, 0, 1]) in (0, 2)
        chosen = cheapest(views[:3], [0, 1, 0], request, FleetEstimates(BLOCK), 0.0)
        assert (chosen.place, chosen.cached_blocks) == (1, 1)


@pytest.mark.parametrize(
    ("block_size", "tokens", "cached", "within"),
    [
        (16, 1000, 0, 20),  # 2% of what is to be computed
        (16, 1000, 500, 16),  # a block
        (16, 7, 0, 16),
        (64, 1000, 0, 64),
        (64, 40, 0, 40),  # a large block, but no more than the prompt
        (64, 7, 0, 16),  # and no less than a usual one
    ],
)
def test_costs_within_a_block_or_two_per_cent_are_equal(
    block_size: int, tokens: int, cached: int, within: int
) -> None:
    fleet = FleetEstimates(block_size)
    first = replace(view(replica(), fleet), booked_tokens=500)
    request = RoutingRequest("r", tokens, 1.0, keys=range(tokens // block_size))
    held = [cached // block_size] * 2
    chosen = []
    for factor in (0.99, 1.03):
        second = replace(first, replica="r1", booked_tokens=0, backlog_s=within * factor * first.token_cost)
        chosen.append(cheapest([first, second], held, request, fleet, 0.0).place)
    assert chosen == [1, 0]


# ---- copies of what many ask for


def test_a_prefix_that_many_ask_for_is_worth_copies() -> None:
    keys = list(range(200))
    fleet = FleetEstimates(BLOCK)
    views = several((0, 0), (0, 0))
    busy = [replace(views[0], backlog_s=0.1), views[1]]
    request = RoutingRequest("r", 3207, 100.0, keys=keys)
    assert cheapest(busy, [200, 0], request, fleet, 0.0)[:4] == (0, 200, 200, "prefix")
    for _ in range(WINDOW):
        fleet.prefixes.learn(keys[199])
    assert cheapest(busy, [200, 0], request, fleet, 0.0)[:4] == (1, 0, 200, "wait")
    assert cheapest(busy, [200, 200], request, fleet, 0.0)[:4] == (1, 200, 200, "wait")
    assert cheapest(busy, [200, 100], request, fleet, 0.0)[:4] == (1, 100, 200, "wait")


def test_a_copy_that_is_there_in_full_is_counted_once_its_last_block_is_not_usable() -> None:
    # Of 3,200 tokens an engine computes the last block anyway: 199 blocks are as good as 200.
    fleet, keys = FleetEstimates(BLOCK), list(range(200))
    for _ in range(WINDOW):
        fleet.prefixes.learn(keys[199])
    here, there, empty = several((0, 0), (0, 0), (0, 0))
    views = [replace(here, backlog_s=0.2), replace(there, backlog_s=0.2), empty]
    request = RoutingRequest("r", 3200, 100.0, keys=keys)
    seconds = costs(views, [199, 199, 0], request, fleet, 0.0, copy_deficit=1.0)
    assert seconds[2] < seconds[0]
    assert cheapest(views, [200, 199, 0], request, fleet, 0.0).place == 2


# ---- the other policies


def test_round_robin_goes_by_name_and_number() -> None:
    views = several((5, 1), (0, 0), (9, 9))[::-1]
    requests = [RoutingRequest("r", 10, 1.0, ordinal=ordinal) for ordinal in range(6)]
    places = [round_robin(views, request).place for request in requests]
    assert [views[place].replica for place in places] == ["r0", "r1", "r2"] * 2


def test_least_tokens_looks_at_nothing_else() -> None:
    fleet = FleetEstimates(BLOCK)
    busy = view(replica(replace(IDLE, waiting_tokens=10**6)), fleet)
    idle = replace(view(replica(name="r1"), fleet), booked_tokens=1)
    request = RoutingRequest("r", 1000, 1.0, keys=range(62))
    assert least_tokens([busy, idle], request) == RoutingDecision(0)
