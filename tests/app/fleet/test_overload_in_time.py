"""Demand that lasts beyond what a replica can do, in simulated time: the wait stays near its limit."""

from __future__ import annotations

import pytest
from routing_support import Engines, Fleet

from app.fleet.overload import OverloadControl

LONGEST = 2.0
RATE = 10_000  # prompt tokens/s of the replica
PROMPT = 500  # tokens: 20 requests/s are what it can do
TICK = 0.0625


@pytest.mark.parametrize("load", [1.5, 3.0, 10.0])
def test_the_wait_is_held_at_the_limit_and_the_replica_stays_busy(load: float) -> None:
    fleet = Fleet(1)
    engines = Engines(fleet)
    overload = OverloadControl(
        lambda: fleet.ledger.expected_wait(["r0"]), max_wait_s=LONGEST, clock=lambda: fleet.now
    )
    began = fleet.now
    waits: list[tuple[float, float]] = []  # of those taken: when, and prompts before them in seconds
    refused, due = 0, 0.0
    first_refused = float("inf")
    while fleet.now < began + 60.0:
        due += load * RATE * TICK / PROMPT
        while due >= 1.0:
            due -= 1.0
            if overload.refusal() is not None:
                refused += 1
                first_refused = min(first_refused, fleet.now)
                continue
            waits.append((fleet.now, engines.waiting("r0") / RATE))
            engines.take(fleet, fleet.send(PROMPT), PROMPT)
        fleet.now += TICK
        engines.work(int(RATE * TICK))
        if fleet.now > began + 10.0:
            assert engines.waiting("r0") > 0, "it idles while requests are refused"

    arrived_in_a_tick = load * TICK
    assert first_refused - began >= LONGEST
    assert max(wait for _, wait in waits) <= LONGEST + (load - 1.0) * (LONGEST + 2 * TICK) + arrived_in_a_tick
    settled = [wait for when, wait in waits if when > first_refused + load * LONGEST + 1.0]
    assert settled
    assert max(settled) <= LONGEST + arrived_in_a_tick + TICK
    taken = len(settled) * PROMPT / RATE
    assert taken == pytest.approx(began + 60.0 - (first_refused + load * LONGEST + 1.0), rel=0.1)
    assert refused > 0
    # It ends: without demand the door opens.
    for _ in range(100):
        fleet.now += TICK
        engines.work(int(RATE * TICK))
    assert overload.refusal() is None
