"""What the simulated fleet is asked: requests with arrival times, prompts, block keys, true output lengths."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv.block_keys import block_keys
from engine.request import CacheNamespace
from loadtests.arrivals import poisson
from loadtests.experiments.routing import constants as given
from loadtests.experiments.routing.constants import Shape
from loadtests.experiments.simulated_replica import key_scheme

ROOT = key_scheme(given.BLOCK_SIZE).root(CacheNamespace())
"""Key of the only root: one model, one tenant."""


class Prompt(NamedTuple):
    """Token ids and the keys of their full blocks; shared by all requests that ask the same."""

    tokens: list[int]
    keys: list[int]


@dataclass(slots=True, eq=False)
class Job:
    """One request. ``output`` is its true length in tokens, which nobody may look at beforehand; ``max_tokens``
    is what its sender allows.

    ``turn`` counts from 0 within the conversation ``session``; a request without one has session -1.
    """

    number: int
    arrival: float
    prompt: Prompt
    output: int
    max_tokens: int
    kind: str = ""
    session: int = -1
    turn: int = 0


class Source:
    """Tokens that nobody has used before, and prompts made of them; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._next = 1

    def fresh(self, count: int) -> range:
        """``count`` token ids of their own."""
        start = self._next
        self._next += count
        return range(start, self._next)

    def prompt(self, count: int, after: Prompt | None = None) -> Prompt:
        """``count`` new tokens, behind those of another prompt where given."""
        if after is None:
            return self.extend([], [], self.fresh(count))
        return self.extend(after.tokens, after.keys, self.fresh(count))

    @staticmethod
    def extend(tokens: list[int], keys: list[int], new: Iterable[int]) -> Prompt:
        """``tokens`` and ``new``; ``keys`` are those of full blocks of ``tokens``, perhaps not of all."""
        whole = [*tokens, *new]
        done = len(keys)
        more = block_keys(keys[-1] if keys else ROOT, whole[done * given.BLOCK_SIZE :], given.BLOCK_SIZE)
        return Prompt(whole, keys + more)


def rising(rate: float, until: float, rng: random.Random) -> list[float]:
    """A Poisson process whose rate rises evenly from ``RAMP_FROM`` to ``RAMP_TO`` times ``rate``."""
    low, high = given.RAMP_FROM * rate, given.RAMP_TO * rate
    slope = (high - low) / until
    times = []
    for expected in poisson(1.0, (low + high) / 2 * until, rng):
        # Where the integral of the rate is ``expected``.
        times.append((math.sqrt(low * low + 2 * slope * expected) - low) / slope)
    return times


class Workload:
    """Requests that arrive by themselves, and those that follow when another one has ended."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs

    def follow(self, job: Job, now: float, generated: Sequence[int]) -> Job | None:
        """What a user asks after ``job`` has ended at ``now`` with the tokens ``generated``."""
        return None


def _longest(mean: int) -> int:
    return round(given.LENGTH_SPREAD[1] * mean)


def _spread(mean: int, rng: random.Random) -> int:
    low, high = given.LENGTH_SPREAD
    return rng.randint(round(low * mean), round(high * mean))


def shared(shape: Shape, times: Sequence[float], seed: int, *, vary: bool) -> Workload:
    """Requests of ``shape`` at ``times``; ``vary`` draws output lengths, which are fixed otherwise."""
    source = Source(seed)
    rng = source.random
    systems = [source.prompt(shape.system) for _ in range(shape.groups)]
    asked = [[source.prompt(shape.question, one) for _ in range(shape.questions)] for one in systems]
    weights = list(itertools.accumulate((rank + 1) ** -shape.zipf for rank in range(shape.groups)))
    jobs = []
    for number, arrival in enumerate(times):
        group = bisect.bisect(weights, rng.random() * weights[-1])
        system = systems[group]
        prompt = rng.choice(asked[group]) if shape.questions else source.prompt(shape.question, system)
        output = _spread(shape.output, rng) if vary else shape.output
        jobs.append(Job(number, arrival, prompt, output, _longest(shape.output) if vary else output))
    return Workload(jobs)


def unshared(shape: Shape, times: Sequence[float], seed: int, cold_share: float = 0.0) -> Workload:
    """Prompts that have nothing in common; ``cold_share`` of them are of ``COLD_LENGTHS``, of kind ``cold``."""
    source = Source(seed)
    rng = source.random
    jobs = []
    for number, arrival in enumerate(times):
        cold = rng.random() < cold_share
        length = rng.randint(*given.COLD_LENGTHS) if cold else _spread(shape.prompt, rng)
        prompt, output = source.prompt(length), _spread(shape.output, rng)
        kind = "cold" if cold else "short"
        jobs.append(Job(number, arrival, prompt, output, _longest(shape.output), kind))
    return Workload(jobs)


def burst(shape: Shape, _times: Sequence[float], seed: int, *, distinct: bool) -> Workload:
    """``BURST`` requests within ``BURST_SECONDS``, each behind a prefix of its own or all behind a cold one."""
    source = Source(seed)
    systems = [source.prompt(shape.system) for _ in range(given.BURST if distinct else 1)]
    times = sorted(source.random.uniform(0.0, given.BURST_SECONDS) for _ in range(given.BURST))
    prompts = [source.prompt(shape.question, systems[i % len(systems)]) for i in range(given.BURST)]
    return Workload([Job(i, at, prompts[i], shape.output, shape.output) for i, at in enumerate(times)])


class Conversations(Workload):
    """Each ends after ``TURNS`` turns; a turn's prompt is all that was said before and some new tokens."""

    def __init__(self, shape: Shape, times: Sequence[float], seed: int) -> None:
        self._source = Source(seed)
        rng = self._source.random
        systems = [self._source.prompt(shape.system) for _ in range(shape.groups)]
        self._output = shape.output
        self._seed = seed
        jobs = []
        for number, arrival in enumerate(times):
            prompt = self._source.prompt(shape.question, rng.choice(systems))
            output = _spread(shape.output, rng)
            jobs.append(Job(number, arrival, prompt, output, _longest(shape.output), session=number))
        super().__init__(jobs)
        self._numbers = itertools.count(len(jobs))

    def follow(self, job: Job, now: float, generated: Sequence[int]) -> Job | None:
        if job.turn + 1 == given.TURNS:
            return None
        source = self._source
        # The same in whatever order answers end.
        rng = random.Random(f"{self._seed} {job.session} {job.turn}")
        prompt = source.extend(job.prompt.tokens, job.prompt.keys, [*generated, *source.fresh(given.CHAT_TURN)])
        arrival = now + rng.uniform(*given.CHAT_THINK)
        output = _spread(self._output, rng)
        number = next(self._numbers)
        return Job(number, arrival, prompt, output, job.max_tokens, "", job.session, job.turn + 1)
