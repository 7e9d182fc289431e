"""``python -m loadtests.routing --live``: how well requests are routed on real Ray Serve, on this machine.

Two replicas of the bundled model, one thread each, with pools that hold 60% of 8 system prompts of 400 tokens
beside their running requests. Each run starts cold: every process of the application anew, then each system
prompt once, then Poisson arrivals at one rate for all: a share of what the fleet serves when all is cached.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from tqdm import tqdm

from app.api.chat_messages import ChatMessage
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.config import ROUTERS
from app.launch import serving
from app.launch.model_store import resolve
from loadtests.arrivals import closed_loop, open_loop, poisson
from loadtests.client import MODEL, Client, Outcome
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import started
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import mean, quantile, ratio
from loadtests.workloads import question, sentences, system_prompt

REPLICAS = 2
BLOCK_SIZE = 16
MAX_NUM_SEQS = 8
TOKEN_BUDGET = 64  # of a step, the same on every machine: a quarter of a second or so on one core of a desktop
HELD = 0.6  # of the system prompts, what one pool holds beside its running requests
LOAD = 0.65  # of the calibrated capacity: above what is served without prefixes, below what is with them
SETTLE = 20  # arrivals before those that count, on average
ROUNDS = 5  # of the calibration: requests for each sequence slot
REQUEST_LIMIT_S = 600.0
OURS, COMPARED = "prefix", ("power_of_two", "prefix_affinity")  # Ray's default, and its own router by prefixes
CACHED_BAR, ASKED_BAR, TTFT_BAR = 0.95, 0.9, 0.6  # an oracle serves all that is asked, so no ratio has a bar
GROUPS = 8
SYSTEM_WORDS = 315  # some 400 tokens
ANSWER = (8, 24)  # tokens, bounds included


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be sent ``t`` seconds after the open loop began, for ``output`` tokens."""

    t: float
    group: int
    question: str
    output: int


class Traffic:
    """``GROUPS`` system prompts, and requests about them, all equally popular; the same for the same seed.

    ``systems`` are the tokens that prompts of each group share, template included; ``longest_question`` those
    that a question and the opening of its answer add, at most.
    """

    def __init__(self, systems: Sequence[int], longest_question: int) -> None:
        self.systems = systems
        self.longest_question = longest_question

    @classmethod
    async def make(cls, tokenizer: PromptTokenizer) -> Traffic:
        systems = []
        for group in range(GROUPS):
            one, other = [await _encode(tokenizer, group, user) for user in ("A", "0")]
            systems.append(next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b))
        probes = [await _encode(tokenizer, 0, _question(random.Random(seed))) for seed in range(256)]
        # A few more than the longest of many.
        return cls(systems, max(map(len, probes)) - systems[0] + 8)

    @staticmethod
    def lap(seed: int) -> list[Ask]:
        """One request for each system prompt, in random order."""
        rng = random.Random(f"lap {seed}")
        return [_ask(rng, 0.0, group) for group in rng.sample(range(GROUPS), GROUPS)]

    @staticmethod
    def poisson(rate: float, seconds: float, seed: int) -> list[Ask]:
        """Requests of a Poisson process of ``rate`` per second."""
        rng = random.Random(f"arrivals {seed}")
        return [_ask(rng, t, rng.randrange(GROUPS)) for t in poisson(rate, seconds, rng)]


def _ask(rng: random.Random, t: float, group: int) -> Ask:
    return Ask(t, group, _question(rng), rng.randint(*ANSWER))


def _question(rng: random.Random) -> str:
    # A number, so that hardly two questions begin alike.
    return f"{rng.randrange(10**4)}: {sentences(rng, 1)} {question(rng)}"


def messages_of(group: int, user: str) -> list[dict[str, str]]:
    """What ``POST /v1/chat/completions`` takes."""
    system = system_prompt(group, SYSTEM_WORDS)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


async def _encode(tokenizer: PromptTokenizer, group: int, user: str) -> list[int]:
    return await tokenizer.encode_chat(
        [ChatMessage(one["role"], one["content"]) for one in messages_of(group, user)], 1 << 20
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """A request, when it should have been sent (``time.perf_counter``), and what came of it."""

    ask: Ask
    due: float
    outcome: Outcome

    @property
    def ttft(self) -> float:
        """Seconds from when it was due; infinite where no token came."""
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

    replies: Sequence[Reply]  # of the warm-up, too
    window: tuple[float, float]

    @property
    def counted(self) -> list[Reply]:
        return [reply for reply in self.replies if self.window[0] <= reply.due < self.window[1]]

    @property
    def throughput(self) -> float:
        """Output tokens per second, of the requests that ended well within the window."""
        began, ended = self.window
        whole = [reply.outcome for reply in self.replies if reply.outcome.whole]
        return sum(one.tokens for one in whole if began <= one.ended < ended) / (ended - began)

    @property
    def asked(self) -> float:
        """Output tokens per second that the counted requests ask for."""
        return sum(one.ask.output for one in self.counted) / (self.window[1] - self.window[0])


Runs = Mapping[str, Sequence[Run]]
"""Of each arm, by the value of the option ``routing``, one run for each seed."""


def throughput(runs: Sequence[Run]) -> float:
    """Output tokens per second, mean over the seeds."""
    return mean([run.throughput for run in runs])


def ttfts(runs: Sequence[Run]) -> list[float]:
    """Seconds to the first token of the counted requests of all seeds."""
    return [reply.ttft for run in runs for reply in run.counted]


def failed(runs: Sequence[Run]) -> int:
    """Requests that did not bring all that was asked for, those of the warm-up too."""
    return sum(not reply.outcome.whole for run in runs for reply in run.replies)


def cached_share(runs: Sequence[Run], systems: Sequence[int] = ()) -> float:
    """Of the counted requests' prompt tokens, what engines found cached.

    With the tokens of all system prompts: what an oracle's requests find, all of their own, in whole blocks.
    """
    replies = [reply for run in runs for reply in run.counted if reply.prompt_tokens]
    prompt = sum(reply.prompt_tokens for reply in replies)
    cached = (
        systems[one.ask.group] // BLOCK_SIZE * BLOCK_SIZE if systems else one.cached_tokens for one in replies
    )
    return sum(cached) / prompt if prompt else 0.0


def shown(arm: str, runs: Sequence[Run]) -> list[Figure]:
    """Figures without bars."""
    return [
        Figure(f"{arm}: output", throughput(runs), " tokens/s"),
        Figure(f"{arm}: cached share of prompt tokens", cached_share(runs)),
        *(Figure(f"{arm}: TTFT, {share:.0%}", quantile(ttfts(runs), share), " s") for share in (0.5, 0.99)),
    ]


def figures_of(runs: Runs, systems: Sequence[int]) -> list[Figure]:
    """Bars stand where what they compare was run: over Ray's default, not over its prefix router."""
    made = [most(f"{arm}: requests that failed", failed(found)) for arm, found in runs.items()]
    ours = runs.get(OURS)
    if not ours:
        return made
    served = throughput(ours) / max(mean([run.asked for run in ours]), 1e-9)
    share = cached_share(ours) / max(cached_share(ours, systems), 1e-9)
    made.append(Figure("prefix: cached share of prompt tokens, of an oracle's", share, "", CACHED_BAR))
    made.append(Figure("prefix: output, of what was asked for", served, "", ASKED_BAR))
    for arm in COMPARED:
        if other := runs.get(arm):
            name = arm.replace("_", " ")
            rate, wait = throughput(ours) / max(throughput(other), 1e-9), ratio(ttfts(ours), ttfts(other))
            bar = TTFT_BAR if arm == COMPARED[0] else None
            made.append(Figure(f"prefix: throughput over {name}", rate, "x"))
            made.append(Figure(f"prefix: median TTFT, of {name}'s", wait, "x", bar, at_most=True))
    return made


def pool_blocks(traffic: Traffic) -> int:
    """Blocks of one pool: ``HELD`` of all system prompts, and what each running request needs of its own.

    Its own are question, opening of the answer and answer, at their longest.
    """
    own = -(-(traffic.longest_question + ANSWER[1]) // BLOCK_SIZE)
    return round(HELD * sum(-(-tokens // BLOCK_SIZE) for tokens in traffic.systems)) + MAX_NUM_SEQS * own


class Stage:
    """Runs arms on one cluster; ``bar`` counts the requests."""

    def __init__(self, cluster: LocalCluster, traffic: Traffic, bar: tqdm[Any], dtype: str) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._bar = bar
        self._options = {"engine_replicas": REPLICAS, "engine_cpus": 1, "threads": 1, "dtype": dtype}
        self._options |= {"block_size": BLOCK_SIZE, "num_blocks": pool_blocks(traffic)}
        self._options |= {"max_num_seqs": MAX_NUM_SEQS, "token_budget": TOKEN_BUDGET}

    def cold(self, arm: str) -> None:
        """End every process of the application, and start it with another way to choose."""
        self._bar.set_description(arm)
        if self._cluster.options:
            serve.delete(serving.APP_NAME)
        self._cluster.deploy(routing=arm, **self._options)

    def capacity(self) -> float:
        """Requests per second that the fleet serves when it always has enough to do and finds prompts cached.

        Requests about few system prompts, of which none is evicted, take every sequence slot. The first and
        last request of each slot do not count. ``RuntimeError``: it answered with errors, or not at all.
        """
        self.cold(OURS)
        slots = REPLICAS * MAX_NUM_SEQS

        async def measure() -> list[Reply]:
            async with self._client() as client:
                await self._in_turn(client, self._traffic.lap(0), REPLICAS)
                rng = random.Random("any")
                asks = [_ask(rng, 0.0, rng.randrange(REPLICAS)) for _ in range((ROUNDS + 1) * slots)]
                return await self._in_turn(client, asks, slots)

        replies = asyncio.run(measure())
        faults = [reply.outcome.fault for reply in replies if reply.outcome.fault]
        if faults:
            raise RuntimeError(f"{len(faults)} requests of the calibration failed; the first: {faults[0]}")
        counted = replies[slots : ROUNDS * slots]
        return (len(counted) - 1) / (counted[-1].outcome.ended - counted[0].outcome.ended)

    def run(self, arm: str, seed: int, rate: float, requests: int) -> Run:
        """One run from a cold start: each system prompt once, then Poisson arrivals until all have ended."""
        self.cold(arm)
        settle, counted = SETTLE / rate, requests / rate
        asks = [(ask.t, ask) for ask in self._traffic.poisson(rate, settle + counted, seed)]

        async def everything() -> Run:
            async with self._client() as client:
                lap = await self._in_turn(client, self._traffic.lap(seed), REPLICAS)
                began = time.perf_counter()
                replies = await open_loop(asks, lambda ask, due: self._ask(client, ask, due), began)
                return Run([*lap, *replies], (began + settle, began + settle + counted))

        run = asyncio.run(everything())
        wait_for(self._cluster.idle, 30.0, "requests or blocks are left after a run")
        return run

    def _client(self) -> Client:
        return Client(self._cluster.url, self._cluster.instance, REQUEST_LIMIT_S)

    async def _in_turn(self, client: Client, asks: Sequence[Ask], at_once: int) -> list[Reply]:
        return await closed_loop(at_once, asks, lambda ask: self._ask(client, ask, time.perf_counter()))

    async def _ask(self, client: Client, ask: Ask, due: float) -> Reply:
        outcome = await client.chat(messages_of(ask.group, ask.question), ask.output)
        self._bar.update()
        return Reply(ask, due, outcome)


def main(argv: Sequence[str]) -> None:
    options = {
        "--seeds": (3, "runs of each arm"),
        "--arms": ([OURS, *COMPARED], f"of {', '.join(ROUTERS)}"),
        "--dtype": ("auto", "of the engines: float32 where bf16 has instructions"),
        "--requests": (200, "of each run that count, on average"),
        "--load": (LOAD, "of the capacity with everything cached; its bars are for the default"),
    }
    arguments = parse("routing --live", __doc__, options, argv)
    traffic = asyncio.run(Traffic.make(PromptTokenizer(TokenizerParts.read(resolve(MODEL)))))
    runs: dict[str, list[Run]] = {arm: [] for arm in arguments.arms}
    with tqdm(unit="request", disable=None) as bar, started() as cluster:
        stage = Stage(cluster, traffic, bar, arguments.dtype)
        capacity = stage.capacity()
        for seed in range(1, arguments.seeds + 1):
            for arm, found in runs.items():
                found.append(stage.run(arm, seed, arguments.load * capacity, arguments.requests))
    what = f"capacity when all is cached, of which the load is {arguments.load:.0%}"
    figures = [Figure(what, capacity, " requests/s")]
    for arm, found in runs.items():
        figures += shown(arm, found)
    figures += figures_of(runs, traffic.systems)
    finish("loadtests.routing --live", figures, arguments, "routing")
