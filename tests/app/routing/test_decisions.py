"""Sequences of a ledger's calls: each choice is the one by the reference sum, of terms made anew for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import reference_cost as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_support import BLOCK, Fleet, prefix
from test_choice import LOADS

from app.routing import cost
from app.routing.booking import Standing
from app.routing.ledger import Route
from app.routing.load import LoadReport
from app.routing.policies import Chooser, Wanted, least_booked


class Compared(Chooser):
    """Chooses as the application does, and as the reference does."""

    compared = 0
    tails: dict[int, float]

    def refresh(self, standing: Standing) -> None:
        """Terms keep the rest of a sequence that was expected when they were made."""
        super().refresh(standing)
        self.tails[id(standing)] = self.outputs.tokens / 2

    def choose(self, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted, now: float) -> int:
        self.settle()
        expected, costs = self._expected(standings, held, wanted, now)
        place = super().choose(standings, held, wanted, now)
        assert place == expected, costs
        self.compared += 1
        return place

    def _expected(
        self, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted, now: float
    ) -> tuple[int, list[float]]:
        size, deepest = self.block_size, max(held)
        most = self.cached(wanted, deepest) if deepest else 0
        cached = [min(blocks * size, most) for blocks in held]
        due = 0.0
        if deepest:
            found = self.hot.share(wanted.keys[deepest - 1]) * len(held) - cached.count(most)
            due = min(max(found, 0.0), 1.0)
        now_tail = self.outputs.tokens / 2
        terms = []
        for standing in standings:
            assert standing.load is not None
            tail = self.tails[id(standing)] if standing.terms is not None else now_tail
            terms.append(
                reference.terms(
                    standing.load, standing.booked, self.steps, standing.speed, size, tail, standing.reported
                )
            )
        output = self.expected_output(wanted)
        demand = cost.Demand(wanted.tokens, output, now_tail, wanted.sequences, most, due)
        costs = reference.seconds(terms, cached, demand, self.steps, self.reuse.share, now)
        blocks = [tokens // size for tokens in cached]
        quick = cost.seconds(
            self._terms(standings, now), blocks, demand, self.steps, self.reuse.share, now, size
        )
        assert quick == pytest.approx(costs, rel=1e-9)
        best = costs.index(min(costs))
        least = max(min(size, max(wanted.tokens, 16)), (wanted.tokens - cached[best]) // 50)
        margin = 1.01 * least * terms[best].per_token
        ties = [place for place, seconds in enumerate(costs) if seconds <= costs[best] + margin]
        return least_booked(standings, ties, wanted, deepest), costs


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


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(1, 9), ACTS)
def test_choices_in_any_sequence_of_calls_are_the_references(
    size: int, acts: list[tuple[str, int, float, LoadReport]]
) -> None:
    fleet = Fleet(size)
    chooser = Compared(fleet.ledger._chooser.policy, BLOCK)
    chooser.tails = {}
    fleet.ledger._chooser = chooser
    for route in fleet.routes:
        fleet.report(route)
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
            made = float(number % 700) if number % 2 else None
            assert fleet.ledger.release(live.pop(number % len(live)), made=made)
    assert fleet.ledger.faults == 0
    assert chooser.compared == fleet.attempts
