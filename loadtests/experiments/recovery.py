"""A pool too small for its load: what recovering preempted requests costs, and whether the engine foresaw it.

``python -m loadtests.recovery`` runs one load on the real engine with an ample pool and then, in each recovery
mode, with a pool that forces preemptions all the time. All modes must make the tokens of the ample pool
(float32, drawn with seeds), and the estimates of the decisions must be near what they cost: a swap the time of
its copies, a recompute its token share of the time of each step that it takes part in.

``python -m loadtests.recovery --http`` does the same over the whole HTTP path (see ``pressure.py``).
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from app.launch.model_store import resolve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.recovery import Recovery, RecoveryMode
from engine.scheduling.scheduler_stats import SchedulerStats
from engine.sizes import parse_bytes
from loadtests.report import Figure, add_arguments, finish, print_figures

BLOCK_SIZE = 16
TOKEN_RANGE = (100, 40_000)  # ordinary tokens: neither special nor the rare tail
AMPLE_BLOCKS = 1024
LARGEST_ERROR = 0.3  # of an estimate against its outcome, at the median
LEAST_DECISIONS = 200  # of each run, so that the median says something


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come faster than they are served, the newest the most urgent: it takes older ones' blocks.

    With equal priorities the scheduler admits so carefully that preemptions are rare. Lengths in tokens, bounds
    included.
    """

    requests: int
    every: int  # steps from one arrival to the next
    prompt: tuple[int, int] = (8, 40)
    output: tuple[int, int] = (8, 32)

    def make(self, seed: int) -> list[Request]:
        """The same requests for the same seed, in order of arrival; each draws with a seed of its own."""
        draw = random.Random(f"recovery/{seed}")
        return [
            Request(
                f"request{number:04d}",
                [draw.randint(*TOKEN_RANGE) for _ in range(draw.randint(*self.prompt))],
                SamplingParams(
                    max_tokens=draw.randint(*self.output), temperature=0.8, seed=number, ignore_eos=True
                ),
                priority=-number,
                arrival=1.0 + number,
            )
            for number in range(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one engine."""

    tokens: dict[str, list[int]]  # by request, the output
    seconds: float
    scheduler: SchedulerStats
    steps: int

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def run(engine: Engine, load: Load, seed: int, title: str) -> Run:
    """Run all requests to their ends; each must make all its tokens.

    Raises:
        RuntimeError: a request ended early.
    """
    requests = load.make(seed)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    gc.collect()
    began = time.perf_counter()
    coming = deque(requests)
    total = sum(request.params.max_tokens or 0 for request in requests)
    step = 0
    with tqdm(total=total, desc=title, unit="tok", mininterval=1.0) as bar:
        while coming or engine.has_work():
            if coming and step % load.every == 0:
                engine.add(coming.popleft())
            step += 1
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
                bar.update(len(delta.token_ids))
    seconds = time.perf_counter() - began
    for request in requests:
        if len(tokens[request.request_id]) != request.params.max_tokens:
            raise RuntimeError(f"{request.request_id} ended before all its tokens")
    stats = engine.stats()
    engine.scheduler.check()
    return Run(tokens, seconds, stats.scheduler, stats.steps)


def compare(arguments: argparse.Namespace) -> None:
    """Run every mode and report."""
    load = Load(arguments.requests, arguments.every)
    folder = str(resolve(arguments.model))

    def once(title: str, blocks: int, **options: Any) -> Run:
        config = EngineConfig(
            model=folder,
            dtype="float32",
            num_blocks=blocks,
            num_threads=arguments.threads,
            block_size=BLOCK_SIZE,
            **options,
        )
        return run(Engine(config), load, arguments.seed, title)

    ample = once("ample", AMPLE_BLOCKS, swap_space=0)
    figures = [Figure("output, ample pool", ample.rate, " tokens/s")]
    raw: dict[str, Any] = {"ample": summary(ample)}
    for mode in arguments.modes:
        space = 0 if mode == "recompute" else parse_bytes(arguments.swap_space)
        one = once(mode, arguments.blocks, swap_space=space, recovery=mode)
        same = one.tokens == ample.tokens
        raw[mode] = {**summary(one), "same_tokens": same}
        figures += bars(mode, one, same)
    print_figures(f"{load.requests} requests in {arguments.blocks} blocks of {BLOCK_SIZE} tokens", figures)
    finish("loadtests.recovery", figures, arguments, runs=raw, threads=arguments.threads)


def bars(mode: str, one: Run, same: bool) -> list[Figure]:
    """What must hold of a run in a small pool."""
    recovery = one.scheduler.recovery
    figures = [
        Figure(f"{mode}: output", one.rate, " tokens/s"),
        Figure(f"{mode}: all tokens as with an ample pool", float(same), "", 1.0),
        Figure(f"{mode}: preemptions", one.scheduler.preemptions),
        Figure(f"{mode}: decisions", sum(recovery.decisions.values()), "", LEAST_DECISIONS),
        Figure(f"{mode}: fallbacks to recompute", recovery.fallbacks),
    ]
    for kind in Recovery:
        error = recovery.median_error[kind]
        # In auto mode one kind may be all but unused: a few trials make no median.
        few = mode == RecoveryMode.AUTO and recovery.finished[kind] < LEAST_DECISIONS // 4
        if error is not None:
            bar = None if few or (mode != RecoveryMode.AUTO and mode != kind.value) else LARGEST_ERROR
            name = f"{mode}: median error of {recovery.finished[kind]} {kind} estimates"
            figures.append(Figure(name, error, "", bar, at_most=True))
            ratio = recovery.median_ratio[kind] or 0.0
            figures.append(Figure(f"{mode}: median outcome of these, of the estimate", ratio, "x"))
    return figures


def summary(one: Run) -> dict[str, Any]:
    """Everything about a run but its tokens, for the JSON file."""
    recovery = asdict(one.scheduler.recovery)
    return {
        "tokens_per_second": one.rate,
        "seconds": one.seconds,
        "steps": one.steps,
        "preemptions": one.scheduler.preemptions,
        "copied_blocks": one.scheduler.copied_blocks,
        **recovery,
    }


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.recovery", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--http", action="store_true", help="concurrent streams over HTTP instead")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--every", type=int, default=3, help="steps from one arrival to the next")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of the small pool")
    parser.add_argument("--swap-space", default="1GiB")
    parser.add_argument("--modes", nargs="*", default=["swap", "recompute", "auto"], choices=list(RecoveryMode))
    arguments = parser.parse_args()
    if arguments.http:
        from loadtests.experiments.pressure import compare_http

        compare_http(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
