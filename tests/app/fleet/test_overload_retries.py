"""Clients that are refused and try again when they are told to: large requests are refused like small ones.

In simulated time, with the engine's scheduler behind the real ledger and overload control.
``--log-cli-level=INFO`` shows the figures.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import mean
from typing import NamedTuple

import pytest
from waiting_support import BLOCK, BUDGET, COST, Ask, Line

from app.api.errors import ApiError
from app.api.live_requests import LiveRequests, Permit
from app.fleet.overload import OverloadControl
from app.option_groups import IngressOptions
from loadtests.experiments.simulated_replica import ReplicaConfig

logger = logging.getLogger(__name__)

LONGEST_S = 2.0
BLOCKS = 64
OUTPUT = 32
PROMPTS = {"small": 20, "large": 480}
"""Tokens; with its output a large one takes half of the pool."""
COUNTS = {"small": 60, "large": 6}
"""Clients, each of which sends a request as soon as its last one is answered."""
DURATION_S, SETTLED_S = 400.0, 20.0


class Turn(NamedTuple):
    """When a client sends its request, for the first time or again."""

    when: float
    client: str
    size: str
    first: float  # when it was sent first
    refusals: int


@dataclass
class Answered:
    size: str
    refusals: int
    waited_s: float
    """From the first try to the first step that computed something for it."""


def serve(account_of: Callable[[Turn], str]) -> list[Answered]:
    """What the clients see; ``account_of`` names the one in whose fair share a request is."""
    line, draw = Line(ReplicaConfig(COST, BLOCKS, BLOCK, BUDGET)), random.Random(1)
    overload = OverloadControl(
        lambda: line.ledger.expected_wait([line.replica.name]),
        max_wait_s=LONGEST_S,
        clock=lambda: line.now,
        rng=random.Random(2),
    )
    live, options, began = LiveRequests(), IngressOptions(), line.now
    turns: list[Turn] = []
    accepted: dict[str, tuple[Turn, Permit]] = {}
    answered: list[Answered] = []

    def send_at(when: float, client: str, size: str) -> None:
        heappush(turns, Turn(when, client, size, when, 0))

    for size, count in COUNTS.items():
        for number in range(count):
            send_at(began + draw.random(), f"{size}-{number}", size)
    while line.now < began + DURATION_S:
        while turns and turns[0].when <= line.now:
            turn = heappop(turns)
            account = account_of(turn)
            try:
                permit = live.admit(account, 1, options, overload)
            except ApiError as error:
                again = line.now + (error.fault.retry_after_s or math.inf)
                heappush(turns, turn._replace(when=again, refusals=turn.refusals + 1))
                continue
            prompt = [draw.randrange(10**6, 2**31) for _ in range(PROMPTS[turn.size])]
            accepted[line.ask(Ask(prompt, OUTPUT, client=account), foreign=False)] = turn, permit
        if line.replica.scheduler.has_work():
            line.step()
        else:
            line.now = max(line.now, turns[0].when)
        for name in [name for name in accepted if line.coming[name].ended is not None]:
            turn, permit = accepted.pop(name)
            permit.release()
            began_at = line.coming[name].began
            assert began_at is not None
            if turn.first > began + SETTLED_S:
                answered.append(Answered(turn.size, turn.refusals, began_at - turn.first))
            send_at(line.now + 0.1 * draw.random(), turn.client, turn.size)
    for turn in (*turns, *(turn for turn, _ in accepted.values())):  # what still tries or waits counts, too
        if turn.first < line.now:
            answered.append(Answered(turn.size, turn.refusals, line.now - turn.first))
    assert line.ledger.faults == 0
    return answered


ACCOUNTS: dict[str, Callable[[Turn], str]] = {
    "a-share-for-each-client": lambda turn: turn.client,
    "one-share-for-all": lambda turn: "all",
    "one-share-for-the-small-ones": lambda turn: "small" if turn.size == "small" else turn.client,
}


@pytest.mark.parametrize("accounts", ACCOUNTS)
def test_a_large_request_is_refused_no_more_often_than_small_ones(accounts: str) -> None:
    answered = serve(ACCOUNTS[accounts])
    refusals, waited, most = {}, {}, {}
    for size in PROMPTS:
        of_size = [one for one in answered if one.size == size]
        refusals[size] = mean(one.refusals for one in of_size)
        waited[size] = mean(one.waited_s for one in of_size)
        most[size] = max(one.waited_s for one in of_size)
        logger.info(
            "%s, %s: %d requests, %.1f refusals of each, started after %.1f s, %.0f s at most",
            *(accounts, size, len(of_size), refusals[size], waited[size], most[size]),
        )
    assert refusals["small"] > 1.0, "there is no overload"
    assert refusals["large"] < 1.5 * refusals["small"]
    assert waited["large"] < 3.0 * waited["small"]
    assert most["large"] < 1.5 * most["small"]
