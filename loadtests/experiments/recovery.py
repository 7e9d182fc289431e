"""A pool too small for its load: what recovering preempted requests costs, and whether the engine foresaw it.

``python -m loadtests.recovery`` runs one load on the real engine with an ample pool and then, in each recovery
mode, with a pool that forces preemptions all the time. All modes must make the tokens of the ample pool
(float32, drawn with seeds), and the estimates of the decisions must be near what they cost: a swap the time of
its copies, a recompute its token share of the time of each step that it takes part in.

``python -m loadtests.recovery --http`` runs many streams over the whole HTTP path, on a pool that holds a
quarter of what they need: with host memory to swap to, then without. In float32 and greedy, every stream must
say the same to the letter as with an ample pool.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from app.launch.model_store import resolve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.recovery import Recovery, RecoveryMode
from engine.scheduling.scheduler_stats import SchedulerStats
from loadtests.client import MODEL, Outcome, complete_all
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import OPTIONS, started
from loadtests.report import Figure, finish, most, parse, print_figures
from loadtests.workloads import prompts

BLOCK_SIZE = 16
TOKEN_RANGE = (100, 40_000)  # ordinary tokens: neither special nor the rare tail
AMPLE_BLOCKS, SMALL_BLOCKS = 1024, 16
REQUESTS, EVERY = 300, 3  # and steps from one arrival to the next
THREADS = 2
LARGEST_ERROR = 0.3  # of an estimate against its outcome, at the median
LEAST_DECISIONS = 200  # of each run, so that the median says something

PROMPT_TOKENS = 16  # the most of any prompt
STREAMS, TOKENS = 64, 256
SHARE = 4  # the pool holds one part in so many of what all streams need at once


def requests_of(seed: int, count: int = REQUESTS) -> list[Request]:
    """The same for the same seed, in order of arrival; each draws with a seed of its own.

    The newest is the most urgent: it takes older ones' blocks. With equal priorities the scheduler admits so
    carefully that preemptions are rare.
    """
    draw = random.Random(f"recovery/{seed}")
    return [
        Request(
            f"request{number:04d}",
            [draw.randint(*TOKEN_RANGE) for _ in range(draw.randint(8, 40))],
            SamplingParams(max_tokens=draw.randint(8, 32), temperature=0.8, seed=number, ignore_eos=True),
            priority=-number,
            arrival=1.0 + number,
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one engine."""

    tokens: dict[str, list[int]]  # by request, the output
    seconds: float
    scheduler: SchedulerStats

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def run(engine: Engine, requests: list[Request], title: str) -> Run:
    """Run all requests to their ends; each must make all its tokens.

    Raises:
        RuntimeError: a request ended early.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    gc.collect()
    began = time.perf_counter()
    coming = deque(requests)
    step = 0
    with tqdm(total=len(requests), desc=title, unit="request") as bar:
        while coming or engine.has_work():
            if coming and step % EVERY == 0:
                engine.add(coming.popleft())
                bar.update()
            step += 1
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
    seconds = time.perf_counter() - began
    for request in requests:
        if len(tokens[request.request_id]) != request.params.max_tokens:
            raise RuntimeError(f"{request.request_id} ended before all its tokens")
    engine.scheduler.check()
    return Run(tokens, seconds, engine.stats().scheduler)


def compare(arguments: argparse.Namespace) -> None:
    """Run every mode and report."""
    folder = str(resolve(MODEL))

    def once(title: str, blocks: int, **options: Any) -> Run:
        config = EngineConfig(
            model=folder,
            dtype="float32",
            num_blocks=blocks,
            num_threads=THREADS,
            block_size=BLOCK_SIZE,
            **options,
        )
        return run(Engine(config), requests_of(arguments.seed, arguments.requests), title)

    ample = once("ample", AMPLE_BLOCKS, swap_space=0)
    figures = [Figure("output, ample pool", ample.rate, " tokens/s")]
    for mode in RecoveryMode:
        space = 0 if mode == RecoveryMode.RECOMPUTE else 1 << 30
        one = once(mode, SMALL_BLOCKS, swap_space=space, recovery=mode)
        figures += bars(mode, one, one.tokens == ample.tokens)
    print_figures(f"{arguments.requests} requests in {SMALL_BLOCKS} blocks of {BLOCK_SIZE} tokens", figures)
    finish("loadtests.recovery", figures, arguments, threads=THREADS)


def bars(mode: str, one: Run, same: bool) -> list[Figure]:
    """What must hold of a run in a small pool."""
    recovery = one.scheduler.recovery
    figures = [
        Figure(f"{mode}: output", one.rate, " tokens/s"),
        Figure(f"{mode}: all tokens as with an ample pool", float(same), "", 1.0),
        Figure(f"{mode}: preemptions", one.scheduler.preemptions),
        Figure(f"{mode}: decisions", sum(recovery.decisions.values()), "", LEAST_DECISIONS),
    ]
    for kind in Recovery:
        error = recovery.median_error[kind]
        # In auto mode one kind may be all but unused: a few trials make no median.
        few = mode == RecoveryMode.AUTO and recovery.finished[kind] < LEAST_DECISIONS // 4
        if error is not None:
            bar = None if few or (mode != RecoveryMode.AUTO and mode != kind.value) else LARGEST_ERROR
            name = f"{mode}: median error of {recovery.finished[kind]} {kind} estimates"
            figures.append(Figure(name, error, "", bar, at_most=True))
    return figures


@dataclass(frozen=True, slots=True)
class Pressed:
    """What the streams brought, and what their engine did for it."""

    outcomes: list[Outcome]
    preemptions: int
    recoveries: dict[str, int]  # complete ones, by kind

    @property
    def texts(self) -> list[str]:
        """What each stream said."""
        return [outcome.text for outcome in self.outcomes]


def blocks_needed(streams: int, tokens: int) -> int:
    """KV blocks that all streams hold when each is at its end, at most."""
    return streams * -(-(PROMPT_TOKENS + tokens) // BLOCK_SIZE)


def redeploy(cluster: LocalCluster, options: dict[str, Any]) -> None:
    """Deploy, and wait until nothing but one replica with the pool of ``options`` is left."""
    cluster.deploy(**options)
    pool = ("referenced_blocks", "cached_blocks", "free_blocks")

    def replaced() -> bool:
        return [sum(state[part] for part in pool) for state in cluster.inspect()] == [options["num_blocks"]]

    wait_for(replaced, 120.0, "the replica with the new pool is not alone")
    cluster.wait_routable(1)


def press(cluster: LocalCluster, texts: Sequence[str], tokens: int) -> Pressed:
    """Run all streams at once, and look at the engine afterwards."""
    outcomes = asyncio.run(complete_all(cluster.url, texts, tokens, cluster.instance))
    wait_for(cluster.idle, 30.0, "requests or blocks are left")
    states = cluster.inspect()
    recoveries = {kind: sum(state["recoveries"][kind] for state in states) for kind in map(str, Recovery)}
    return Pressed(outcomes, sum(state["preemptions"] for state in states), recoveries)


def pressed_figures(name: str, pressed: Pressed, said: Sequence[str]) -> list[Figure]:
    """What must hold of the streams in a small pool."""
    count = len(said)
    same = sum(one.complete and one.text == text for one, text in zip(pressed.outcomes, said, strict=True))
    return [
        Figure(f"{name}: whole streams with the tokens of the ample pool, of {count}", same, "", count),
        Figure(f"{name}: preemptions", pressed.preemptions, "", 1),
        *(Figure(f"{name}: recoveries by {kind}", count) for kind, count in pressed.recoveries.items()),
    ]


def compare_http(arguments: argparse.Namespace) -> None:
    """Run the streams with an ample pool and with small ones, and report."""
    needed, texts = blocks_needed(STREAMS, TOKENS), prompts(STREAMS, arguments.seed)
    common = {**OPTIONS, "engine_replicas": 1, "engine_cpus": 2, "threads": 2, "block_size": BLOCK_SIZE}
    del common["kv_memory"]
    figures: list[Figure] = []
    with started() as cluster:

        def pressed(blocks: int, swap_space: int | str) -> Pressed:
            redeploy(cluster, {**common, "num_blocks": blocks, "swap_space": swap_space, "check_at_idle": True})
            return press(cluster, texts, TOKENS)

        ample = pressed(needed, 0)
        figures.append(most("ample: preemptions", ample.preemptions))
        for name, space in (("with swap space", "1GiB"), ("without", 0)):
            figures += pressed_figures(name, pressed(needed // SHARE, space), ample.texts)
    print_figures(f"{STREAMS} streams of {TOKENS} tokens in {needed // SHARE} of {needed} blocks", figures)
    finish("loadtests.recovery --http", figures, arguments)


def main() -> None:
    """Parse the command line and measure."""
    options = {
        "--http": (False, "concurrent streams over HTTP instead"),
        "--seed": (0, "of the requests"),
        "--requests": (REQUESTS, "in each mode"),
    }
    arguments = parse("recovery", __doc__, options)
    (compare_http if arguments.http else compare)(arguments)
