"""A pool too small for its load: what recovering preempted requests costs, and whether the engine foresaw it.

``python -m loadtests.recovery`` runs one load on the real engine with an ample pool and then, in each recovery
mode, with a small one. All modes must make the same tokens (float32, drawn with seeds), and estimates must be
near what the decisions cost: a swap the time of its copies, a recompute its token share of its steps' time.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
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
from loadtests.client import MODEL
from loadtests.experiments.rivals import TOKEN_RANGE
from loadtests.report import Figure, finish, parse

BLOCK_SIZE = 16
AMPLE_BLOCKS, SMALL_BLOCKS = 1024, 16
REQUESTS, EVERY = 500, 3  # and steps from one arrival to the next
THREADS = 2
LARGEST_ERROR = 0.3  # of an estimate against its outcome, at the median
LEAST_DECISIONS = 200  # of each run, so that the median says something


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
    tokens: dict[str, list[int]]  # by request, the output
    seconds: float
    scheduler: SchedulerStats

    @property
    def rate(self) -> float:
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


def main() -> None:
    options = {"--seed": (0, "of the requests"), "--requests": (REQUESTS, "in each mode")}
    arguments = parse("recovery", __doc__, options)
    folder = str(resolve(MODEL))

    def once(title: str, blocks: int, **options: Any) -> Run:
        options |= {"dtype": "float32", "num_threads": THREADS, "block_size": BLOCK_SIZE}
        config = EngineConfig(model=folder, num_blocks=blocks, **options)
        return run(Engine(config), requests_of(arguments.seed, arguments.requests), title)

    ample = once("ample", AMPLE_BLOCKS, swap_space=0)
    figures = [Figure("output, ample pool", ample.rate, " tokens/s")]
    for mode in RecoveryMode:
        space = 0 if mode == RecoveryMode.RECOMPUTE else 1 << 30
        one = once(mode, SMALL_BLOCKS, swap_space=space, recovery=mode)
        figures += bars(mode, one, one.tokens == ample.tokens)
    title = f"{arguments.requests} requests in {SMALL_BLOCKS} blocks of {BLOCK_SIZE} tokens"
    finish("loadtests.recovery", figures, arguments, title, threads=THREADS)


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
