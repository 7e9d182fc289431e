"""What the bound on overtaking trades: the waits of large requests for those of small ones, in simulated time.

``--log-cli-level=INFO`` shows the figures.
"""

from __future__ import annotations

import logging
import random
from statistics import mean
from typing import NamedTuple

from engine.request import Request
from engine.sampling_params import SamplingParams
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica, StepCost

COST = StepCost(base=0.02, prefill_token=0.0002, decode_row=0.001, context_token=1e-6)
BLOCKS, BLOCK, BUDGET = 64, 16, 256
OUTPUT = 32
SMALL, LARGE = 20, 480
"""Tokens of a prompt; with its output a large request takes half of the pool."""
CLIENTS = {SMALL: 60, LARGE: 3}
"""So many requests of each size are there at any time."""
DURATION_S, SETTLED_S = 300.0, 20.0

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """Means, in seconds from a request's arrival to its first step, and what is done in a second."""

    small_s: float
    large_s: float
    work: float
    """Tokens of prompts and outputs."""


def serve(max_overtakes: int) -> Served:
    replica, draw = SimulatedReplica(ReplicaConfig(COST, BLOCKS, BLOCK, BUDGET)), random.Random(1)
    replica.scheduler.state.max_overtakes = max_overtakes
    now, made, ended = 0.0, 0, 0
    arrived: dict[str, tuple[int, float]] = {}
    waits: dict[int, list[float]] = {SMALL: [], LARGE: []}

    def send(size: int) -> None:
        nonlocal made
        made += 1
        arrived[str(made)] = size, now
        prompt = [draw.randrange(10**6, 2**31) for _ in range(size)]
        params = SamplingParams(max_tokens=draw.randint(1, 2 * OUTPUT - 1), ignore_eos=True)
        replica.add(Request(str(made), prompt, params, arrival=1.0 + now))

    for size in draw.sample(
        [size for size, count in CLIENTS.items() for _ in range(count)], k=sum(CLIENTS.values())
    ):
        send(size)
    while now < DURATION_S:
        seconds, plan = replica.begin_step(), replica.plan
        assert seconds is not None
        assert plan is not None
        for sequence in plan.admitted:
            size, since = arrived[sequence.request_id]
            if since > SETTLED_S:
                waits[size].append(now - since)
        now += seconds
        for delta in replica.end_step([2**31 + made] * plan.num_samples):
            if delta.finish_reason is not None:
                size, _ = arrived.pop(delta.request_id)
                ended += (size + delta.index + len(delta.token_ids)) if now > SETTLED_S else 0
                send(size)
    return Served(mean(waits[SMALL]), mean(waits[LARGE]), ended / (now - SETTLED_S))


def test_a_lower_bound_lets_large_requests_start_sooner_and_small_ones_later() -> None:
    served = {bound: serve(bound) for bound in (8, 32, 128)}
    for bound, one in served.items():
        logger.info(
            "at most %d overtakes: small ones start after %.2f s, large ones after %.2f s; %.0f tokens/s",
            bound,
            one.small_s,
            one.large_s,
            one.work,
        )
    assert served[8].large_s < served[32].large_s < served[128].large_s
    assert served[8].small_s > served[32].small_s > served[128].small_s
    assert served[8].work > 0.9 * served[32].work
    assert served[32].large_s < 3.0 * served[32].small_s
