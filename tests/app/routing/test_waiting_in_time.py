"""The expected wait against the real one, in simulated time: the engine's scheduler behind the real ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

import pytest

from app.routing.ledger import Ledger, Route
from app.routing.routing_meta import RoutingMeta
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.scheduling.step import StepPlan
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica, StepCost

COST = StepCost(base=0.02, prefill_token=0.0002, decode_row=0.001, context_token=1e-6)
BLOCK, BUDGET = 16, 256
FACTOR = 1.5
"""By which the expected wait may differ from the real one, on average in each regime."""
LATER_S = 0.05
"""From an answer to the next request of the same client, at most."""


class Ask(NamedTuple):
    """A request: its prompt, and how many tokens each of its sequences makes."""

    prompt: list[int]
    output: int
    sequences: int = 1


class Wait(NamedTuple):
    """In seconds, as expected when a request came, and as it was until something was computed for it."""

    expected: float
    real: float


@dataclass
class Coming:
    ask: Ask
    arrived: float
    expected: float
    left: int
    began: float | None = None


class Line:
    """One replica, and the ledger of an ingress that hears of each step; another sends ``foreign`` requests."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.now = 1000.0
        self.replica = SimulatedReplica(config)
        self.ledger = Ledger(clock=lambda: self.now)
        self._route = Route(self.replica.name, 1)
        self._tokens = itertools.count(2**31)
        self._coming: dict[str, Coming] = {}
        self.ledger.open(self._route)
        self._report()

    def ask(self, ask: Ask, foreign: bool) -> None:
        number = len(self._coming) + 1
        name, wait = str(number), self.ledger.expected_wait([self.replica.name])
        assert wait is not None
        if not foreign:
            most = ask.output * ask.sequences
            meta = RoutingMeta(name, number, len(ask.prompt), most, sequences=ask.sequences)
            self.ledger.expect(number)
            self.ledger.book(meta)
        self._coming[name] = Coming(ask, self.now, wait.seconds, ask.sequences)
        params = SamplingParams(max_tokens=ask.output, ignore_eos=True, n=ask.sequences)
        self.replica.add(Request(name, ask.prompt, params, arrival=self.now), attempt=number)

    def step(self) -> int:
        """Run a step; the number of requests that end with it."""
        seconds = self.replica.begin_step()
        assert seconds is not None
        assert self.replica.plan is not None
        for chunk in self.replica.plan.chunks:
            one = self._coming[chunk.sequence.request_id]
            if one.began is None:
                one.began = self.now
        self.now += seconds
        ended = 0
        for delta in self.replica.end_step(self._sampled(self.replica.plan)):
            number, one = int(delta.request_id), self._coming[delta.request_id]
            self.ledger.first_token(number)
            if delta.finish_reason is not None:
                one.left -= 1
                if not one.left:
                    self.ledger.release(number, one.ask.output)
                    ended += 1
        self._report()
        return ended

    def waits(self) -> list[Wait]:
        return [Wait(one.expected, (one.began or self.now) - one.arrived) for one in self._coming.values()]

    def _sampled(self, plan: StepPlan) -> list[int | Candidates]:
        made: list[int | Candidates] = []
        for chunk in plan.chunks:
            if chunk.samples:
                group = chunk.sequence.group
                draws = 1 if group is None or group.forked else group.params.n
                tokens = tuple(itertools.islice(self._tokens, draws))
                made.append(tokens[0] if draws == 1 else Candidates(tokens, (-1.0,) * draws))
        return made

    def _report(self) -> None:
        assert self.ledger.report(self._route, self.replica.load())


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
    waits = REGIMES[regime]()
    real = sum(wait.real for wait in waits) / len(waits)
    assert real > 0.5, "nobody waits"
    assert 1 / FACTOR < sum(wait.expected for wait in waits) / len(waits) / real < FACTOR


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
    assert sum(wait.real for wait in waits) / len(waits) > 0.1, "nobody waits"
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
