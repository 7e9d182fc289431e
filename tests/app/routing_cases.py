"""Loads, replicas, requests and fleet estimates for property tests; few values each, so that ties occur."""

from __future__ import annotations

from hypothesis import strategies as st
from routing_support import BLOCK, replica

from app.routing.cost import RoutingRequest
from app.routing.fleet_estimates import FleetEstimates
from app.routing.load import LoadReport
from app.routing.replica_state import ReplicaState

NOW = 10.0

LOADS = st.builds(
    LoadReport,
    waiting_tokens=st.sampled_from([0, 0, 300, 5000, 200_000]),
    running=st.integers(0, 40),
    kv_tokens=st.sampled_from([0, 5000, 400_000]),
    referenced=st.integers(0, 5000),
    free=st.sampled_from([0, 40, 1000, 100_000]),
    evictable=st.sampled_from([0, 50, 5000]),
    num_blocks=st.just(100_000),
    block_size=st.just(BLOCK),
    prefill_rate=st.sampled_from([500.0, 10_000.0, 11_000.0]),
    step_seconds=st.just(0.02),
    acknowledged=st.just(0),
    waiting=st.integers(0, 30),
    num_blocked=st.sampled_from([0, 0, 0, 12]),
    num_lacking=st.sampled_from([0, 12]),
    max_running=st.sampled_from([0, 32]),
    first_end=st.sampled_from([0.0, 3.0]),
    half_ended=st.sampled_from([50.0, 2.0]),
    all_ended=st.sampled_from([100.0, 1.0]),
)

broken = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=True, allow_infinity=True))
BROKEN_LOADS = st.builds(LoadReport, *[broken] * 18)

TOTALS = st.fixed_dictionaries(
    {
        "pending_prefill": st.sampled_from([0, 0, 900, 60_000]),
        "pending_rows": st.integers(0, 9),
        "pending_kv_tokens": st.sampled_from([0, 9000]),
        "acknowledged_rows": st.integers(0, 50),
        "acknowledged_kv_tokens": st.sampled_from([0, 90_000]),
    }
)


@st.composite
def replicas(draw: st.DrawFn, name: str = "r0") -> ReplicaState:
    state = replica(draw(LOADS), name, draw(st.sampled_from([NOW, NOW - 0.04, 0.0])), **draw(TOTALS))
    state.history.slowness = draw(st.sampled_from([1.0, 1.0, 1.5]))
    state.booked_tokens, state.bookings = draw(st.sampled_from([(0, 0), (500, 1), (500, 2)]))
    return state


REPLICAS = replicas()


@st.composite
def fleet_estimates(draw: st.DrawFn) -> FleetEstimates:
    fleet = FleetEstimates(BLOCK)
    fleet.outputs.tokens = draw(st.sampled_from([1.0, 256.0, 5000.0]))
    fleet.reuse._lost = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return fleet


FLEETS = fleet_estimates()

REQUESTS = st.builds(
    RoutingRequest,
    request_id=st.just("request"),
    tokens=st.integers(16, 4000),
    output=st.sampled_from([1.0, 100.0, 5000.0]),
    sequences=st.integers(1, 3),
)
