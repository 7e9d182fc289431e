"""The engine's scheduler behind the real ledger, in simulated time: when requests start and should."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from app.routing.ledger import Ledger, Route
from app.routing.routing_meta import RoutingMeta
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.scheduling.step import StepPlan
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica, StepCost

COST = StepCost(base=0.02, prefill_token=0.0002, decode_row=0.001, context_token=1e-6)
BLOCK, BUDGET = 16, 256
END = 1
"""The token that ends an output."""


class Ask(NamedTuple):
    """A request: its prompt, and how many tokens each of its sequences makes."""

    prompt: list[int]
    output: int
    sequences: int = 1
    limit: int | None = None
    """Its ``max_tokens``, if it ends by itself before."""
    client: str = ""


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
    ended: float | None = None


class Line:
    """One replica, and the ledger of an ingress that hears of each step; another sends ``foreign`` requests."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.now = 1000.0
        self.replica = SimulatedReplica(config)
        self.ledger = Ledger(clock=lambda: self.now)
        self._route = Route(self.replica.name, 1)
        self._tokens = itertools.count(2**31)
        self.coming: dict[str, Coming] = {}
        self.ledger.open(self._route)
        self._report()

    def ask(self, ask: Ask, foreign: bool) -> str:
        """Send a request; the name that it goes by in ``coming``."""
        number = len(self.coming) + 1
        name, wait = str(number), self.ledger.expected_wait([self.replica.name])
        assert wait is not None
        if not foreign:
            most = (ask.limit or ask.output) * ask.sequences
            meta = RoutingMeta(name, number, len(ask.prompt), most, sequences=ask.sequences)
            self.ledger.expect(number)
            self.ledger.book(meta)
        self.coming[name] = Coming(ask, self.now, wait.seconds, ask.sequences)
        params = SamplingParams(
            max_tokens=ask.limit or ask.output, stop_token_ids=(END,), ignore_eos=True, n=ask.sequences
        )
        request = Request(name, ask.prompt, params, arrival=self.now, client=ask.client)
        self.replica.add(request, attempt=number)
        return name

    def step(self) -> int:
        """Run a step; the number of requests that end with it."""
        seconds = self.replica.begin_step()
        assert seconds is not None
        assert self.replica.plan is not None
        for chunk in self.replica.plan.chunks:
            one = self.coming[chunk.sequence.request_id]
            if one.began is None:
                one.began = self.now
        self.now += seconds
        ended = 0
        for delta in self.replica.end_step(self._sampled(self.replica.plan)):
            number, one = int(delta.request_id), self.coming[delta.request_id]
            self.ledger.first_token(number)
            if delta.finish_reason is not None:
                one.left -= 1
                if not one.left:
                    one.ended = self.now
                    self.ledger.release(number, one.ask.output)
                    ended += 1
        self._report()
        return ended

    def waits(self) -> list[Wait]:
        return [Wait(one.expected, (one.began or self.now) - one.arrived) for one in self.coming.values()]

    def _sampled(self, plan: StepPlan) -> list[int | Candidates]:
        made: list[int | Candidates] = []
        for chunk in plan.chunks:
            if chunk.samples:
                group = chunk.sequence.group
                draws = 1 if group is None or group.forked else group.params.n
                tokens = tuple(itertools.islice(self._tokens, draws))
                ask = self.coming[chunk.sequence.request_id].ask
                if ask.limit is not None and chunk.sequence.num_generated + 1 == ask.output:
                    tokens = (END,) * draws
                made.append(tokens[0] if draws == 1 else Candidates(tokens, (-1.0,) * draws))
        return made

    def _report(self) -> None:
        assert self.ledger.report(self._route, self.replica.load())
