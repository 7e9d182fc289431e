"""Where streams go when all engines are idle: one to each, unless an engine has just been much slower."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from routing_support import IDLE, Fleet

ENGINE = replace(IDLE, prefill_rate=2500.0, max_running=256)  # a small model on one core
STEP_S, ROW_S, NOISE = 0.007, 0.0005, 0.2
EVERY_S, IDLE_EVERY_S = 0.05, 0.5
STREAM = {"tokens": 14, "output": 1100}


def run(fleet: Fleet, rows: tuple[int, int], seconds: float, slower: float = 1.0, seed: int = 1) -> None:
    """So many streams run on each of two engines; a step of the first takes ``slower`` times as long."""
    random = Random(seed)
    for _ in range(round(seconds / EVERY_S)):
        fleet.now += EVERY_S
        for route, running in zip(fleet.routes, rows, strict=True):
            step = (STEP_S + ROW_S * running) * random.lognormvariate(-(NOISE**2) / 2, NOISE)
            step *= slower if route is fleet.routes[0] else 1.0
            fleet.report(route, replace(ENGINE, running=running, kv_tokens=100 * running, step_seconds=step))
    rest(fleet, EVERY_S)


def rest(fleet: Fleet, seconds: float) -> None:
    for _ in range(max(round(seconds / IDLE_EVERY_S), 1)):
        fleet.now += IDLE_EVERY_S
        for route in fleet.routes:
            fleet.report(route, replace(ENGINE, step_seconds=STEP_S))


def two(fleet: Fleet) -> list[str]:
    """Where two streams go that come together; they end before the next two."""
    chosen = [fleet.send(**STREAM) for _ in range(2)]
    for attempt in (fleet.attempts - 1, fleet.attempts):
        fleet.finish(attempt)
    return sorted(chosen)


@pytest.mark.parametrize("rows", [(4, 4), (7, 1), (1, 7)])
@pytest.mark.parametrize("seconds", [0.5, 1.5, 8.0])
def test_they_get_a_stream_each_whatever_they_were_learned_from(rows: tuple[int, int], seconds: float) -> None:
    fleet = Fleet(2)
    run(fleet, rows, seconds)
    assert two(fleet) == ["r0", "r1"]


def test_a_replacement_gets_a_stream_as_the_survivor_does() -> None:
    fleet = Fleet(2)
    run(fleet, (8, 8), 8.0)
    fleet.ledger.close(fleet.routes.pop())
    for _ in range(100):
        fleet.now += EVERY_S
        step = STEP_S + ROW_S * 16
        fleet.report(fleet.routes[0], replace(ENGINE, running=16, kv_tokens=1600, step_seconds=step))
    fleet.routes.append(replacement := fleet.routes[0]._replace(replica="r2", epoch=9))
    fleet.open(replacement)
    rest(fleet, 1.0)
    assert two(fleet) == ["r0", "r2"]


def test_one_that_was_much_slower_a_moment_ago_gets_none_of_two_until_that_is_forgotten() -> None:
    fleet = Fleet(2)
    run(fleet, (4, 4), 8.0, slower=1.4)
    assert two(fleet) == ["r1", "r1"]  # a second row costs less
    assert {fleet.send(**STREAM) for _ in range(8)} == {"r0", "r1"}
    for attempt in range(fleet.attempts - 7, fleet.attempts + 1):
        fleet.finish(attempt)
    rest(fleet, 120.0)
    assert two(fleet) == ["r0", "r1"]
