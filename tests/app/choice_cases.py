"""Random decisions for property tests of the choice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from routing_cases import FLEETS, replicas
from routing_support import BLOCK, view

from app.routing.cost import RoutingRequest
from app.routing.fleet_estimates import WINDOW, FleetEstimates
from app.routing.replica_state import ReplicaView, name_key


@st.composite
def fleets_of_views(draw: st.DrawFn) -> tuple[list[ReplicaView], list[int], RoutingRequest, FleetEstimates]:
    """Views, held blocks, request and estimates; a few kinds of replicas, so that many are alike."""
    fleet = draw(FLEETS)
    kinds = draw(st.lists(replicas(), min_size=1, max_size=3))
    size = draw(st.integers(1, 8))
    views = [
        replace(view(kinds[draw(st.integers(0, len(kinds) - 1))], fleet), replica=name, seed=name_key(name))
        for name in (f"r{number}" for number in range(size))
    ]
    tokens = draw(st.integers(1, 4000))
    keys = [7 << 32 | block for block in range(tokens // BLOCK)]
    held = [min(draw(st.sampled_from([0, 0, 3, 50, 300])), len(keys)) for _ in views]
    for _ in range(draw(st.sampled_from([0, 0, 40, WINDOW]))):
        fleet.prefixes.learn(keys[max(held) - 1] if keys and max(held) else 0)
    output = draw(st.sampled_from([1.0, 256.0, 5000.0]))
    request = RoutingRequest("request", tokens, output, draw(st.integers(1, 3)), keys)
    return views, held, request, fleet


CASES = fleets_of_views()
Case = tuple[list[ReplicaView], list[int], RoutingRequest, FleetEstimates]


def margin(case: Case, place: int) -> float:
    """Seconds that make no difference."""
    views, held, request, _ = case
    uncached = request.tokens - min(held[place], (request.tokens - 1) // BLOCK) * BLOCK
    return 1.01 * max(BLOCK, uncached // 50) * views[place].token_cost
