"""A fleet in simulated time: ingresses choose, replicas serve, news travels back with a delay."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from typing import NamedTuple

from loadtests.experiments.routing.arms import Arm, make_routers
from loadtests.experiments.routing.constants import CHANNEL_DELAY, FLUSH_INTERVAL, SEND_DELAY
from loadtests.experiments.routing.news import Channel, Feed
from loadtests.experiments.routing.replica import Replica
from loadtests.experiments.routing.row import Row
from loadtests.experiments.routing.workloads import Job, Workload


class _Event(IntEnum):
    """What happens at one moment happens in this order."""

    STEP_END = 0
    DELIVERY = 1
    FLUSH = 2
    MARK = 3
    JOIN = 4
    ARRIVAL = 5


class _Delivery(NamedTuple):
    place: int
    row: Row


class _StepEnd(NamedTuple):
    place: int
    at: float


class _Flush(NamedTuple):
    place: int


@dataclass(frozen=True, slots=True)
class Record:
    """A request that has ended; times in seconds, lengths in tokens."""

    number: int
    kind: str
    session: int
    turn: int
    replica: int
    arrival: float
    first: float
    last: float
    prompt: int
    cached: int
    output: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrival

    @property
    def itl(self) -> float:
        """Mean seconds between its tokens; 0 for a single one."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Sums over each replica up to one moment, in tokens."""

    at: float  # seconds
    generated: tuple[int, ...]
    prefilled: tuple[int, ...]
    queried: tuple[int, ...]
    hit: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """All that a run has shown."""

    records: list[Record] = field(default_factory=list)
    choices: list[tuple[float, int]] = field(default_factory=list)
    """When a request was routed, and where."""
    marks: list[Mark] = field(default_factory=list)
    offered: int = 0
    unfinished: int = 0
    filled: bool = False
    """Whether it ended because more requests waited than ran."""
    preemptions: int = 0


class Fleet:
    """Replicas and ingresses, driven by one queue of events."""

    def __init__(
        self,
        arm: Arm,
        workload: Workload,
        *,
        replicas: int,
        blocks: int,
        ingresses: int = 1,
        seed: int = 0,
        joins: Mapping[float, int] | None = None,
        make: Callable[[str, int], Replica] = Replica,
    ) -> None:
        """``joins`` says how many further replicas join at which times; ``make`` takes name and ``blocks``."""
        self.replicas: list[Replica] = []
        self.outcome = Outcome()
        self._places: dict[str, int] = {}
        self._workload = workload
        self._blocks = blocks
        self._make = make
        self._random = Random(seed)
        routers = make_routers(arm, ingresses, blocks, seed)
        distinct = list({id(router): router for router in routers}.values())
        self._channels = [Channel(number, router) for number, router in enumerate(distinct)]
        self._hearing = [channel for channel in self._channels if channel.router.hears]
        self._feeds: list[Feed] = []
        self._flushes: set[int] = set()  # places of replicas of which news is left to send
        self._events: list[tuple[float, int, int, object]] = []
        self._counter = itertools.count()
        self._generated = 0
        self._live = 0
        for _ in range(replicas):
            self._join(0.0)
        for job in workload.jobs:
            self._push(job.arrival, _Event.ARRIVAL, job)
        for at, count in (joins or {}).items():
            self._push(at, _Event.JOIN, count)

    def run(self, until: float | None = None, marks: Sequence[float] = (), *, full: int = 0) -> Outcome:
        """Simulate ``until`` a time, or until every request has ended.

        Sums are taken at each of ``marks``. With ``full`` it ends after so many in a row at which more requests
        wait than run.
        """
        seen_full = 0
        for at in marks:
            self._push(at, _Event.MARK, None)
        events = self._events
        while events and (until is None or events[0][0] <= until):
            now, _, _, payload = heapq.heappop(events)
            if isinstance(payload, Job):
                self._arrive(payload, now)
            elif isinstance(payload, _Delivery):
                self._deliver(payload.place, payload.row, now)
            elif isinstance(payload, _StepEnd):
                self._step_end(payload.place, payload.at, now)
            elif isinstance(payload, _Flush):
                self._flushes.remove(payload.place)
                self._feeds[payload.place].flush(now)
            elif isinstance(payload, int):
                for _ in range(payload):
                    self._join(now)
            else:
                self._mark(now)
                seen_full = seen_full + 1 if self._is_full() else 0
                if seen_full == full > 0:
                    self.outcome.filled = True
                    break
        self.outcome.unfinished = self._live
        self.outcome.preemptions = sum(replica.preemptions for replica in self.replicas)
        return self.outcome

    def _push(self, at: float, kind: _Event, payload: object) -> None:
        heapq.heappush(self._events, (at, kind, next(self._counter), payload))

    def _join(self, now: float) -> None:
        replica = self._make(f"replica-{len(self.replicas)}", self._blocks)
        self._places[replica.name] = len(self.replicas)
        self.replicas.append(replica)
        self._feeds.append(Feed(replica, self._hearing))
        for channel in self._channels:
            channel.router.add(replica)
        self._tell(len(self.replicas) - 1, now, {channel.number for channel in self._channels})

    def _arrive(self, job: Job, now: float) -> None:
        channel = self._random.choice(self._channels)
        channel.receive(now)
        attempt = next(channel.attempts)
        place = self._places[channel.router.choose(job, attempt, now)]
        self.outcome.choices.append((now, place))
        self.outcome.offered += 1
        self._live += 1
        row = Row(job, channel.number, attempt, self._generated)
        self._generated += job.output
        self._push(now + SEND_DELAY, _Event.DELIVERY, _Delivery(place, row))

    def _deliver(self, place: int, row: Row, now: float) -> None:
        replica = self.replicas[place]
        idle = replica.current is None
        sooner = replica.deliver(row, now)
        if idle:
            self._plan(place, now)
        elif sooner is not None:
            self._push(sooner, _Event.STEP_END, _StepEnd(place, sooner))

    def _step_end(self, place: int, end: float, now: float) -> None:
        replica = self.replicas[place]
        plan = replica.current
        if plan is None or plan.end != end:
            return  # it was cut off before
        replica.settle(now)
        for row in replica.started:
            self._channels[row.channel].send((row.attempt, 0), now + CHANNEL_DELAY)
        for row in replica.finished:
            self._finish(row, place, now)
        told = {row.channel for row in plan.decoding}
        told.update(row.channel for row in replica.started)
        self._tell(place, now, told)
        self._plan(place, now)

    def _tell(self, place: int, now: float, told: Collection[int]) -> None:
        if self._feeds[place].step(now, told) and place not in self._flushes:
            self._flushes.add(place)
            self._push(now + FLUSH_INTERVAL, _Event.FLUSH, _Flush(place))

    def _plan(self, place: int, now: float) -> None:
        plan = self.replicas[place].plan(now)
        if plan is not None:
            self._push(plan.end, _Event.STEP_END, _StepEnd(place, plan.end))

    def _finish(self, row: Row, place: int, now: float) -> None:
        job = row.job
        self._live -= 1
        self._channels[row.channel].send((row.attempt, job.output), now + CHANNEL_DELAY)
        self.outcome.records.append(
            Record(
                job.number,
                job.kind,
                job.session,
                job.turn,
                place,
                job.arrival,
                row.first,
                row.last,
                row.prompt_length,
                row.cached or 0,
                job.output,
            )
        )
        follower = self._workload.follow(job, now, row.tokens[row.prompt_length :])
        if follower is not None:
            self._push(follower.arrival, _Event.ARRIVAL, follower)

    def _is_full(self) -> bool:
        return sum(len(one.waiting) - len(one.running) for one in self.replicas) > 0

    def _mark(self, now: float) -> None:
        replicas = self.replicas
        self.outcome.marks.append(
            Mark(
                now,
                tuple(replica.generated for replica in replicas),
                tuple(replica.prefilled for replica in replicas),
                tuple(replica.query_tokens for replica in replicas),
                tuple(replica.hit_tokens for replica in replicas),
            )
        )
