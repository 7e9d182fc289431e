"""A fleet of the bundled model with small pools on real Ray Serve, started cold for each run."""

from __future__ import annotations

import asyncio
import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ray import serve

from app.config import ROUTERS
from app.launch import serving
from loadtests.arrivals import closed_loop, open_loop
from loadtests.client import OK, Client, Outcome
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.routing_live.traffic import Ask, Traffic, blocks_of
from loadtests.stats import mean

BLOCK_SIZE = 16
MAX_NUM_SEQS = 8
TOKEN_BUDGET = 64
"""Tokens of a step, the same on every machine: a quarter of a second or so on one core of a desktop."""

HELD = 0.6
"""Of the system prompts, what one pool holds beside its running requests."""

REQUEST_LIMIT_S = 600.0


class LiveArm(StrEnum):
    """The ways to choose a replica, by the value of the application's option ``routing``."""

    PREFIX = "prefix"
    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AFFINITY = "prefix_affinity"


def missing(arm: LiveArm) -> str | None:
    """Why an arm cannot run in this environment; ``None`` if it can."""
    try:
        importlib.import_module(ROUTERS[arm].partition(":")[0])
    except ImportError as error:
        return f"its router cannot be imported: {error}"
    return None


@dataclass(frozen=True, slots=True)
class Reply:
    """A request, when it should have been sent, and what came of it."""

    ask: Ask
    due: float  # of ``time.perf_counter``
    outcome: Outcome

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token; infinite where none came."""
        return self.outcome.first - self.due if self.outcome.first else math.inf

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt; 0 if unknown."""
        return int(self.outcome.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that the engine found cached."""
        return int(self.outcome.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))


@dataclass(frozen=True, slots=True)
class Run:
    """One arm and seed. Figures are of the ``window``: from one moment to another of ``time.perf_counter``."""

    arm: LiveArm
    seed: int
    replies: Sequence[Reply]  # of the warm-up, too
    window: tuple[float, float]
    made: Sequence[int]  # tokens of each replica

    @property
    def counted(self) -> list[Reply]:
        """Those that were due in the window."""
        return [reply for reply in self.replies if self._within(reply.due)]

    @property
    def refused(self) -> int:
        """Replies, those of the warm-up too, whose status was not 200."""
        return sum(reply.outcome.status != OK for reply in self.replies)

    @property
    def broken(self) -> int:
        """Replies that began well and did not bring all that was asked for."""
        return sum(reply.outcome.status == OK and not reply.outcome.whole for reply in self.replies)

    @property
    def throughput(self) -> float:
        """Output tokens per second, of the requests that ended well within the window."""
        ended = [reply.outcome for reply in self.replies if self._within(reply.outcome.ended)]
        return sum(one.tokens for one in ended if one.whole) / (self.window[1] - self.window[0])

    @property
    def balance(self) -> float:
        """Output tokens of the busiest replica over the mean."""
        return max(self.made) / mean(self.made) if any(self.made) else math.nan

    def _within(self, moment: float) -> bool:
        return self.window[0] <= moment < self.window[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run is, in arrivals on average: those that do not count, then those that do."""

    settle: int = 20
    counted: int = 100


def pool_blocks(traffic: Traffic, held: float = HELD, max_num_seqs: int = MAX_NUM_SEQS) -> int:
    """Blocks of one pool: ``held`` of all system prompts, and what each running request needs of its own.

    Its own are question, opening of the answer and answer, at their longest; with all sequence slots taken by
    requests of whatever groups, these fit beside ``held`` of the system prompts and no more.
    """
    shape = traffic.shape
    shared = shape.groups * blocks_of(shape.system, BLOCK_SIZE)
    own = blocks_of(traffic.longest_question + shape.output[1], BLOCK_SIZE)
    return round(held * shared) + max_num_seqs * own


class Stage:
    """Runs arms on one cluster. ``say`` is told what happens, ``on_end`` called as each request has ended."""

    def __init__(
        self,
        cluster: LocalCluster,
        traffic: Traffic,
        replicas: int,
        say: Callable[[str], object],
        on_end: Callable[[], object],
        dtype: str = "auto",
    ) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._replicas = replicas
        self._dtype = dtype
        self._say = say
        self._on_end = on_end
        self._deployed = False
        self.blocks = pool_blocks(traffic)

    def cold(self, arm: LiveArm) -> None:
        """End every process of the application, and start it with another way to choose."""
        self._say(f"{arm}: cold start")
        if self._deployed:
            serve.delete(serving.APP_NAME)
        self._deployed = True
        self._cluster.deploy(
            routing=arm.value,
            engine_replicas=self._replicas,
            engine_cpus=1,
            threads=1,
            dtype=self._dtype,
            block_size=BLOCK_SIZE,
            num_blocks=self.blocks,
            max_num_seqs=MAX_NUM_SEQS,
            token_budget=TOKEN_BUDGET,
        )

    def capacity(self, rounds: int = 5) -> float:
        """Requests per second that the fleet serves when it always has enough to do and finds prompts cached.

        Every sequence slot is taken, by requests about so few system prompts that none is ever evicted: with
        all of them, the running requests of a full fleet would push prompts out. Of ``rounds`` requests for
        each slot the first and the last do not count.

        Raises:
            RuntimeError: it answered with errors, or not at all.
        """
        self.cold(LiveArm.PREFIX)
        self._say("calibration")
        slots = self._replicas * MAX_NUM_SEQS

        async def measure() -> list[Reply]:
            async with self._client() as client:
                await self._in_turn(client, self._traffic.lap(0), self._replicas)
                asks = self._traffic.any((rounds + 1) * slots, self._replicas)
                return await self._in_turn(client, asks, slots)

        replies = asyncio.run(measure())
        faults = [reply.outcome.fault for reply in replies if reply.outcome.fault]
        if faults:
            raise RuntimeError(f"{len(faults)} requests of the calibration failed; the first: {faults[0]}")
        counted = replies[slots : rounds * slots]
        return (len(counted) - 1) / (counted[-1].outcome.ended - counted[0].outcome.ended)

    def run(self, arm: LiveArm, seed: int, rate: float, plan: Plan) -> Run:
        """One run from a cold start: each system prompt once, then Poisson arrivals until all have ended."""
        self.cold(arm)
        self._say(f"{arm}, seed {seed}")
        settle, counted = plan.settle / rate, plan.counted / rate
        asks = [(ask.t, ask) for ask in self._traffic.poisson(rate, settle + counted, seed)]

        async def everything() -> tuple[list[Reply], float]:
            async with self._client() as client:
                lap = await self._in_turn(client, self._traffic.lap(seed), self._replicas)
                began = time.perf_counter()
                replies = await open_loop(asks, lambda ask, due: self._ask(client, ask, due), began)
                return [*lap, *replies], began + settle

        replies, start = asyncio.run(everything())
        wait_for(self._cluster.idle, 30.0, "requests or blocks are left after a run")
        made = [state["generated_tokens"] for state in self._cluster.inspect()]
        return Run(arm, seed, replies, (start, start + counted), made)

    def _client(self) -> Client:
        return Client(self._cluster.url, self._cluster.model, REQUEST_LIMIT_S)

    async def _in_turn(self, client: Client, asks: Sequence[Ask], at_once: int) -> list[Reply]:
        return await closed_loop(at_once, asks, lambda ask: self._ask(client, ask, time.perf_counter()))

    async def _ask(self, client: Client, ask: Ask, due: float) -> Reply:
        outcome = await client.chat(self._traffic.messages(ask), ask.output)
        self._on_end()
        return Reply(ask, due, outcome)
