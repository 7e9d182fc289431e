"""A fleet of the bundled model with small pools on real Ray Serve, started cold for each run."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ray import serve

from app.config import ROUTERS
from app.launch import serving
from loadtests.arrivals import closed_loop, open_loop
from loadtests.client import Client, Outcome
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.routing_live.recording import Arrival, LiveFleet, Recording
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
    def fault(self) -> str:
        """What is wrong with it; empty if all its tokens came."""
        asked, came = self.ask.output, self.outcome.tokens
        return self.outcome.fault or (f"{came} tokens instead of {asked}" if asked != came else "")


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
        faults = [reply.fault for reply in replies if reply.fault]
        if faults:
            raise RuntimeError(f"{len(faults)} requests of the calibration failed; the first: {faults[0]}")
        counted = replies[slots : rounds * slots]
        return (len(counted) - 1) / (counted[-1].outcome.ended - counted[0].outcome.ended)

    def run(self, arm: LiveArm, seed: int, rate: float, plan: Plan) -> Recording:
        """One run from a cold start: each system prompt once, then Poisson arrivals until all have ended."""
        self.cold(arm)
        self._say(f"{arm}, seed {seed}")
        settle, window = plan.settle / rate, plan.counted / rate

        async def everything() -> tuple[list[Reply], float, float]:
            async with self._client() as client:
                began = time.perf_counter()
                lap = await self._in_turn(client, self._traffic.lap(seed), self._replicas)
                after = time.perf_counter() - began
                asks = [(ask.t, ask) for ask in self._traffic.poisson(rate, settle + window, seed, after)]
                replies = await open_loop(asks, lambda ask, due: self._ask(client, ask, due), began)
                return [*lap, *replies], began, after + settle

        replies, began, warm_up = asyncio.run(everything())
        states = wait_for(self._idle_states, 30.0, "requests or blocks are left after a run")
        fleet = self._fleet(arm, seed, states, warm_up, warm_up + window)
        return Recording(fleet, arrivals(replies, states, began))

    def _client(self) -> Client:
        return Client(self._cluster.url, self._cluster.model, REQUEST_LIMIT_S)

    async def _in_turn(self, client: Client, asks: Sequence[Ask], at_once: int) -> list[Reply]:
        return await closed_loop(at_once, asks, lambda ask: self._ask(client, ask, time.perf_counter()))

    async def _ask(self, client: Client, ask: Ask, due: float) -> Reply:
        outcome = await client.chat(self._traffic.messages(ask), ask.output)
        self._on_end()
        return Reply(ask, due, outcome)

    def _idle_states(self) -> list[dict[str, Any]]:
        return self._cluster.inspect() if self._cluster.idle() else []

    def _fleet(
        self, arm: LiveArm, seed: int, states: Sequence[dict[str, Any]], warm_up: float, until: float
    ) -> LiveFleet:
        base, per_row, per_kv_token = (
            mean([state["step_model"][part] for state in states]) for part in range(3)
        )
        return LiveFleet(
            arm=arm.value,
            seed=seed,
            replicas=self._replicas,
            num_blocks=self.blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            token_budget=TOKEN_BUDGET,
            system_tokens=self._traffic.shape.system,
            prefill_rate=mean([state["prefill_rate"] for state in states]),
            step_base=base,
            step_per_row=per_row,
            step_per_kv_token=per_kv_token,
            warm_up=warm_up,
            until=until,
        )


def arrivals(replies: Sequence[Reply], states: Sequence[dict[str, Any]], began: float) -> tuple[Arrival, ...]:
    """Each reply as it is recorded; ``states`` say which replica began which request, the last one counts."""
    places = {name.rpartition("-")[0]: state["replica"] for state in states for name in state["begun"]}
    made = []
    for reply in replies:
        outcome, usage = reply.outcome, reply.outcome.usage
        name = next((event["id"] for event in outcome.events if "id" in event), "")
        arrival = Arrival(
            t=reply.due - began,
            prompt_group=reply.ask.group,
            prompt_tokens=usage.get("prompt_tokens", 0),
            output_tokens=outcome.tokens,
            replica=places.get(name, ""),
            cached=usage["prompt_tokens_details"]["cached_tokens"] if usage else 0,
            ttft=outcome.first - reply.due if outcome.first else None,
            status=outcome.status,
            ended=None if reply.fault else outcome.ended - began,
        )
        made.append(arrival)
    return tuple(sorted(made, key=lambda one: one.t))
