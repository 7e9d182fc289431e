"""The expected wait against the real one, in simulated time: the engine's scheduler behind the real ledger.

``--log-cli-level=INFO`` shows the figures.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import mean

import pytest
from waiting_support import BLOCK, BUDGET, COST, Ask, Line, Wait

from loadtests.experiments.simulated_replica import ReplicaConfig

logger = logging.getLogger(__name__)

FACTOR = 1.5
"""By which the expected wait may differ from the real one, on average in each regime."""
LATER_S = 0.05
"""From an answer to the next request of the same client, at most."""


def flood(
    clients: int, make: Callable[[Random], Ask], blocks: int = 4096, seqs: int = 256, foreign: float = 0.0
) -> list[Wait]:
    """The waits of clients that ask again and again, once each has asked twice.

    A part of the requests is ``foreign``: sent by another ingress.
    """
    line, random = Line(ReplicaConfig(COST, blocks, BLOCK, BUDGET, max_num_seqs=seqs)), Random(1)
    due, left = [line.now + LATER_S * place for place in range(clients)], 4 * clients
    while left:
        due.sort()
        while left and due and due[0] <= line.now:
            due.pop(0)
            left -= 1
            line.ask(make(random), random.random() < foreign)
        due += [line.now + LATER_S * random.random() for _ in range(line.step())]
    assert line.ledger.faults == 0
    while line.replica.scheduler.has_work():
        line.step()
    return line.waits()[2 * clients :]


def means(waits: list[Wait]) -> tuple[float, float]:
    return mean(wait.expected for wait in waits), mean(wait.real for wait in waits)


def asks(*lengths: int, output: int = 32, shared: int = 0, sequences: int = 1) -> Callable[[Random], Ask]:
    """Prompts of these lengths, after ``shared`` tokens that all have."""

    def ask(random: Random) -> Ask:
        own = [random.randrange(10**6, 2**31) for _ in range(random.choice(lengths))]
        return Ask([*range(shared), *own], output, sequences)

    return ask


REGIMES = {
    "slots": partial(flood, 30, asks(40), seqs=6),
    "blocks": partial(flood, 40, asks(20), blocks=16),
    "blocks-for-few": partial(flood, 11, asks(20), blocks=16),
    "blocks-for-foreign-ones": partial(flood, 30, asks(20), blocks=16, foreign=0.5),
    "slots-and-blocks": partial(flood, 30, asks(20, 20, 100), blocks=24, seqs=6),
    "long-prompts-among-short-ones": partial(flood, 30, asks(20, 20, 20, 400), blocks=64),
    "prompts": partial(flood, 30, asks(600, output=4)),
    "prompts-and-blocks": partial(flood, 20, asks(500, output=20), blocks=128),
    "blocks-beside-a-shared-prefix": partial(flood, 40, asks(20, output=48, shared=320), blocks=48),
    "slots-for-several-sequences": partial(flood, 20, asks(40, sequences=4), seqs=12),
    "blocks-for-several-sequences": partial(flood, 20, asks(40, sequences=4), blocks=64),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_the_expected_wait_is_the_real_one(regime: str) -> None:
    expected, real = means(REGIMES[regime]())
    logger.info("%s: expected %.2g s, real %.2g s", regime, expected, real)
    assert real > 0.5, "nobody waits"
    assert 1 / FACTOR < expected / real < FACTOR


def test_where_there_is_room_nobody_waits() -> None:
    assert max(wait.expected for wait in flood(5, asks(20), blocks=64)) < 0.1


def test_where_only_the_reserve_for_growth_is_free_the_first_waits_for_an_end() -> None:
    waits = []
    for steps in (8, 10, 12, 14, 16):
        line, random = Line(ReplicaConfig(COST, 16, BLOCK, BUDGET)), Random(1)
        for _ in range(4):
            line.ask(asks(20)(random), foreign=False)
            for _ in range(3):
                line.step()
        for _ in range(steps):
            line.step()
        load = line.replica.load()
        assert load.waiting == 0
        assert load.free >= 2, "a prompt of 20 tokens would fit, but for the growth of four"
        line.ask(asks(20)(random), foreign=False)
        while line.replica.scheduler.has_work():
            line.step()
        waits.append(line.waits()[-1])
    expected, real = (sum(wait) / len(waits) for wait in zip(*waits, strict=True))
    assert real > 0.1
    assert 1 / FACTOR < expected / real < FACTOR


def together(*begin: tuple[int, int], output: int = 60, before: int = 0) -> list[Wait]:
    """The waits of one request in each of some rounds, at another moment of the first streams' life each time.

    ``begin`` says how many begin after how many steps, which take all slots; ``before`` more wait then.
    """
    seqs = sum(count for _, count in begin)
    line, random = Line(ReplicaConfig(COST, 4096, BLOCK, BUDGET, max_num_seqs=seqs)), Random(1)
    waits: list[Wait] = []
    make = asks(20, output=output)
    for moment in range(0, output - 4 - max(step for step, _ in begin), 2):
        for step in range(1 + max(step for step, _ in begin) + moment):
            for _ in range(sum(count for when, count in begin if when == step)):
                line.ask(make(random), foreign=False)
            line.step()
        for _ in range(before):
            line.ask(make(random), foreign=False)
        line.ask(make(random), foreign=False)
        while line.replica.scheduler.has_work():
            line.step()
        waits.append(line.waits()[-1])
    return waits[2:]  # the first ones are before enough outputs are known


TOGETHER = {
    "all": partial(together, (0, 8)),
    "halves": partial(together, (0, 4), (30, 4)),
    "all-and-some-wait": partial(together, (0, 8), before=4),
    "all-and-more-wait-than-run": partial(together, (0, 8), before=12),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_the_expected_wait_is_the_real_one_where_streams_began_together(case: str) -> None:
    waits = TOGETHER[case]()
    expected, real = means(waits)
    logger.info("began together, %s: expected %.2g s, real %.2g s", case, expected, real)
    assert real > 0.1, "nobody waits"
    for wait in waits:
        assert wait.expected == pytest.approx(wait.real, rel=0.15, abs=0.15)


def test_the_expected_wait_is_the_real_one_once_requests_may_make_more_tokens() -> None:
    clients, made = 20, itertools.count()

    def ask(random: Random) -> Ask:
        return asks(20, output=32 if next(made) < 2 * clients else 320)(random)

    waits = flood(clients, ask, seqs=6)
    for part in (waits[:clients], waits[clients:]):
        real = sum(wait.real for wait in part) / clients
        assert real > 5.0, "nobody waits for the longer ones"
        assert 1 / FACTOR < sum(wait.expected for wait in part) / clients / real < FACTOR


LENGTHS: dict[str, Callable[[Random, int], int]] = {
    "alike": lambda random, mean: max(1, int(random.gauss(mean, mean / 5))),
    "exponential": lambda random, mean: 1 + int(random.expovariate(1 / mean)),
    "heavy": lambda random, mean: min(1 + int(random.lognormvariate(math.log(mean) - 0.72, 1.2)), 4_000),
}
SHORT, LONG = 50, 500
"""Tokens of an output, which ends by itself, on average before the change and after it."""


@pytest.mark.parametrize("law", LENGTHS)
@pytest.mark.parametrize(("clients", "seqs"), [(24, 8), (40, 32)])
def test_the_expected_wait_follows_outputs_that_become_longer(law: str, clients: int, seqs: int) -> None:
    """At each moment of the time of some long outputs: few have ended, and ``max_tokens`` says nothing."""
    line, random = Line(ReplicaConfig(COST, 4096, BLOCK, BUDGET, max_num_seqs=seqs)), Random(1)
    due, left, changed = [line.now] * clients, 4 * clients, math.inf
    moments: list[tuple[float, float, int]] = []  # when, the expected wait, and how many wait
    length = SHORT
    longest = LONG * COST.step(0, seqs, 0)
    while line.now < changed + 3.0 * longest:
        due.sort()
        while due and due[0] <= line.now:
            due.pop(0)
            left -= 1
            if left == 0:
                length, changed = LONG, line.now
            prompt = asks(20)(random).prompt
            line.ask(Ask(prompt, LENGTHS[law](random, length), limit=4_096), foreign=False)
        due += [line.now + LATER_S * random.random() for _ in range(line.step())]
        if line.now > changed and (not moments or line.now > moments[-1][0] + 0.5):
            wait = line.ledger.expected_wait([line.replica.name])
            assert wait is not None
            moments.append((line.now, wait.seconds, len(line.replica.scheduler.state.waiting)))
    while line.replica.scheduler.has_work():
        line.step()
    starts = sorted(one.began for one in line.coming.values() if one.began is not None)
    waits: list[list[Wait]] = [[], [], []]  # in the time of each long output
    for when, expected, waiting in moments:
        place = bisect_right(starts, when) + waiting  # of one that comes now: after all that wait
        if place < len(starts):
            waits[int((when - changed) / longest)].append(Wait(expected, starts[place] - when))
    ratios = []
    for part in waits:
        expected, real = means(part)
        logger.info("longer, %s, %d slots: expected %.2g s, real %.2g s", law, seqs, expected, real)
        ratios.append(expected / real)
    assert all(ratio < 2.0 for ratio in ratios)
    assert ratios[2] > 0.5
