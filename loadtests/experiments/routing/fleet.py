"""A fleet in simulated time: ingresses choose, replicas serve, news travels back with a delay."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from random import Random

from engine.request import Request
from engine.sampling_params import SamplingParams
from loadtests.experiments.routing.arms import Arm, make_routers
from loadtests.experiments.routing.channels import Channel, Feed
from loadtests.experiments.routing.constants import FLUSH_INTERVAL, SEND_DELAY
from loadtests.experiments.routing.workloads import Job, Workload
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica

_FIRST_GENERATED = 2**31
"""Generated token ids begin here: those of prompts stay below."""


class _Order(IntEnum):
    """What happens at one moment happens in this order."""

    STEP_END = 0
    DELIVERY = 1
    FLUSH = 2
    MARK = 3
    JOIN = 4
    ARRIVAL = 5


@dataclass(slots=True)
class _Flight:
    """A request between its routing and its end."""

    job: Job
    channel: int
    attempt: int
    first: float = 0.0
    generated: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Record:
    """A request that has ended; times in seconds, lengths in tokens."""

    job: Job
    replica: int
    first: float
    last: float
    cached: int
    output: int

    @property
    def ttft(self) -> float:
        return self.first - self.job.arrival

    @property
    def itl(self) -> float:
        """Mean seconds between its tokens; 0 for a single one."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Sums over all replicas up to one moment, in tokens."""

    at: float  # seconds
    generated: int
    queried: int  # prompt tokens of requests that have started
    hit: int  # of those, cached


@dataclass(slots=True)
class Outcome:
    records: list[Record] = field(default_factory=list)
    choices: list[tuple[float, int]] = field(default_factory=list)
    """When a request was routed, and where."""
    marks: list[Mark] = field(default_factory=list)
    unfinished: int = 0
    filled: bool = False
    """Whether it ended because more requests waited than ran."""


class Fleet:
    """Replicas and ingresses, driven by one queue of events."""

    def __init__(
        self,
        arm: Arm,
        workload: Workload,
        config: ReplicaConfig,
        *,
        replicas: int,
        ingresses: int = 1,
        seed: int = 0,
        joins: Mapping[float, int] | None = None,
    ) -> None:
        """``joins`` says how many further replicas join at which times."""
        self.replicas: list[SimulatedReplica] = []
        self.outcome = Outcome()
        self._config = config
        self._workload = workload
        self._places: dict[str, int] = {}
        self._flights: dict[str, _Flight] = {}
        self._random = Random(seed)
        routers = make_routers(arm, ingresses, config.num_blocks, seed)
        distinct = list({id(router): router for router in routers}.values())
        self._channels = [Channel(number, router) for number, router in enumerate(distinct)]
        self._hearing = [channel for channel in self._channels if channel.router.hears]
        self._feeds: list[Feed] = []
        self._flushes: set[int] = set()  # places of replicas that have news left to send
        self._events: list[tuple[float, int, int, Callable[[float], object]]] = []
        self._counter = itertools.count()
        self._generated = itertools.count(_FIRST_GENERATED)
        self._join(replicas, 0.0)
        for job in workload.jobs:
            self._push(job.arrival, _Order.ARRIVAL, partial(self._arrive, job))
        for at, count in (joins or {}).items():
            self._push(at, _Order.JOIN, partial(self._join, count))

    def run(self, until: float | None = None, marks: Sequence[float] = (), *, full: int = 0) -> Outcome:
        """Simulate ``until`` a time, or until every request has ended.

        Sums are taken at each of ``marks``. With ``full`` it ends after so many in a row at which more requests
        wait than run.
        """
        outcome, events, seen_full = self.outcome, self._events, 0
        for at in marks:
            self._push(at, _Order.MARK, self._mark)
        while events and (until is None or events[0][0] <= until):
            now, order, _, happen = heapq.heappop(events)
            happen(now)
            if full and order == _Order.MARK:
                seen_full = seen_full + 1 if self._is_full() else 0
                if seen_full == full:
                    outcome.filled = True
                    break
        outcome.unfinished = len(self._flights)
        return outcome

    def _push(self, at: float, order: _Order, happen: Callable[[float], object]) -> None:
        heapq.heappush(self._events, (at, order, next(self._counter), happen))

    def _join(self, count: int, now: float) -> None:
        for place in range(len(self.replicas), len(self.replicas) + count):
            replica = SimulatedReplica(self._config, f"replica-{place}")
            self._places[replica.name] = place
            self.replicas.append(replica)
            self._feeds.append(Feed(replica, self._hearing))
            for channel in self._channels:
                channel.router.add(replica)
            self._tell(place, now, {channel.number for channel in self._channels})

    def _arrive(self, job: Job, now: float) -> None:
        channel = self._random.choice(self._channels)
        channel.receive(now)
        attempt = next(channel.attempts)
        place = self._places[channel.router.choose(job, attempt, now)]
        self.outcome.choices.append((now, place))
        flight = self._flights[str(job.number)] = _Flight(job, channel.number, attempt)
        self._push(now + SEND_DELAY, _Order.DELIVERY, partial(self._deliver, place, flight))

    def _deliver(self, place: int, flight: _Flight, now: float) -> None:
        replica, job = self.replicas[place], flight.job
        params = SamplingParams(max_tokens=job.output, ignore_eos=True)
        # The engine stamps an arrival of 0 itself.
        request = Request(str(job.number), list(job.prompt.tokens), params, arrival=job.arrival + 1e-9)
        replica.add(request, flight.channel, flight.attempt)
        if replica.plan is None:
            self._begin_step(place, now)

    def _begin_step(self, place: int, now: float) -> None:
        seconds = self.replicas[place].begin_step()
        if seconds is not None:
            self._push(now + seconds, _Order.STEP_END, partial(self._end_step, place))

    def _end_step(self, place: int, now: float) -> None:
        replica, flights = self.replicas[place], self._flights
        assert replica.plan is not None
        told = set()
        for delta in replica.end_step(list(itertools.islice(self._generated, replica.plan.num_samples))):
            flight = flights[delta.request_id]
            told.add(flight.channel)
            if not flight.generated:
                flight.first = now
                channel = self._channels[flight.channel]
                channel.send(now, partial(channel.router.first_token, flight.attempt))
            flight.generated += delta.token_ids
            if delta.finish_reason is not None:
                self._finish(flights.pop(delta.request_id), place, delta.cached_tokens, now)
        self._tell(place, now, told)
        self._begin_step(place, now)

    def _tell(self, place: int, now: float, told: Collection[int]) -> None:
        if self._feeds[place].step(now, told) and place not in self._flushes:
            self._flushes.add(place)
            self._push(now + FLUSH_INTERVAL, _Order.FLUSH, partial(self._flush, place))

    def _flush(self, place: int, now: float) -> None:
        self._flushes.remove(place)
        self._feeds[place].flush(now)

    def _finish(self, flight: _Flight, place: int, cached: int, now: float) -> None:
        job, channel = flight.job, self._channels[flight.channel]
        made = len(flight.generated)
        channel.send(now, partial(channel.router.end, flight.attempt, made))
        self.outcome.records.append(Record(job, place, flight.first, now, cached, made))
        follower = self._workload.follow(job, now, flight.generated)
        if follower is not None:
            self._push(follower.arrival, _Order.ARRIVAL, partial(self._arrive, follower))

    def _is_full(self) -> bool:
        stats = [replica.scheduler.stats() for replica in self.replicas]
        return sum(one.waiting + one.preempted - one.running for one in stats) > 0

    def _mark(self, now: float) -> None:
        stats = [replica.scheduler.stats() for replica in self.replicas]
        generated, queried, hit = (
            sum(getattr(one, name) for one in stats)
            for name in ("generated_tokens", "prefix_query_tokens", "prefix_hit_tokens")
        )
        self.outcome.marks.append(Mark(now, generated, queried, hit))
