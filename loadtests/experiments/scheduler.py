"""What the scheduler itself costs: processor time of ``schedule`` and ``commit``, without a model.

``python -m loadtests.scheduler`` drives the real scheduler with a runner that only returns tokens. Before a
measurement each pool is filled with cached text of ended requests, as it is in a server that has been running
for a while, so that every new block evicts an old one. Loads:

- *decode*: every request needs one token in each step; their lengths differ, so that in each step 1 in 16
  crosses the end of a block;
- *queue*: the same, with 1,000 requests waiting that do not fit, all with one long cached prefix. Blocks held
  from outside keep as many available as one of them needs, but not what the running requests are about to need,
  too: the dearest case;
- *mix*: requests of 128 tokens in, 128 out, each replaced by a new one as it ends;
- *families*: 4 sequences of each prompt.

A figure is the median over windows of 16 steps, of each window's mean: what the end of a block costs counts
for its share, and what neighbours on the machine do falls out, as far as it does not slow the processor down.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field

from tqdm import tqdm

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import PrefixIndex
from engine.request import ModelLimits, Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import ScheduledChunk
from engine.scheduling.step import StepTiming
from loadtests.report import Figure, add_arguments, finish, most, print_table
from loadtests.stats import median, window_means

BLOCK_SIZE = 16
POOLS = (8_192, 65_536, 1_000_000)  # blocks
RUNNING = (1, 16, 64, 256)
WAITING = 1_000
WAITING_PROMPT = 4_096  # tokens, of which all but those of the last block are common
WINDOW = 16  # steps, as many as tokens in a block
WARMING = 2 * WINDOW  # steps
STEP_BAR_US = 500.0  # at 256 running requests
FLAT_BAR = 1.25  # of the largest pool's step over the smallest pool's: nothing looks at all blocks
TOKENS = range(100, 40_000)  # ordinary tokens
STEP_TIMING = StepTiming(0.01)


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one pool."""

    load: str  # decode, queue, mix or families
    running: int
    num_blocks: int
    prefix_caching: bool = True

    @property
    def title(self) -> str:
        """A name for tables and figures."""
        caching = "" if self.prefix_caching else ", no prefix caching"
        return f"{self.load}, {self.running} running, {self.num_blocks:,} blocks{caching}"

    @property
    def is_bounded(self) -> bool:
        """Whether the bar holds for it."""
        return self.running == 256 and self.num_blocks == POOLS[0]


def all_cases() -> list[Case]:
    """Every load and pool that is measured, the small ones first."""
    cases = []
    for num_blocks in POOLS:
        cases += [Case(load, RUNNING[-1], num_blocks, False) for load in ("decode", "queue", "mix")]
        cases += [Case("decode", running, num_blocks) for running in RUNNING]
        cases += [Case(load, RUNNING[-1], num_blocks) for load in ("queue", "mix", "families")]
    return cases


@dataclass(slots=True)
class Cost:
    """Seconds of processor time, by step."""

    schedule: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    @property
    def step(self) -> list[float]:
        """``schedule`` and ``commit`` together."""
        return [sum(both) for both in zip(self.schedule, self.commit, strict=True)]


def microseconds(seconds: list[float]) -> float:
    """The median window."""
    return median(window_means(seconds, WINDOW)) * 1e6


class Bench:
    """A pool and its scheduler, for one case after the other."""

    def __init__(self, num_blocks: int, prefix_caching: bool, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._live: set[str] = set()
        self._made = 0
        self._held: list[int] = []
        self._prefix_caching = prefix_caching
        began = time.process_time()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.seconds = time.process_time() - began
        # One object for each number: a million blocks of objects of their own take half a gigabyte more.
        self._vocabulary = list(TOKENS)
        self.scheduler = Scheduler(
            self.pool,
            PrefixIndex(self.pool),
            max_num_seqs=2 * max(RUNNING),  # a queue waits for blocks, not for sequence slots
            token_budget=8_192,
            prefix_caching=prefix_caching,
            eos_token_ids=(2,),
            model_key=("model", "bfloat16"),
            limits=ModelLimits(TOKENS.stop, 1 << 20, num_blocks, BLOCK_SIZE),
            recovery=RecoveryPolicy(RecoveryMode.RECOMPUTE, BLOCK_SIZE, Rates()),
        )

    def suits(self, case: Case) -> bool:
        """Whether a case is one of this pool."""
        return (case.num_blocks, case.prefix_caching) == (self.pool.num_blocks, self._prefix_caching)

    def measure(self, case: Case, steps: int) -> Cost:
        """Bring a case about, measure ``steps`` steps of it, and end it."""
        cost = Cost()
        self.start(case, steps)
        self.run(case, steps, cost)
        self.end(case)
        return cost

    def start(self, case: Case, steps: int) -> None:
        """Bring about a case that can go on for ``steps`` steps."""
        self._fill()
        self._start(case, WARMING + steps)
        for _ in range(WARMING):
            self.step()
        if case.load == "queue":
            common = self._text(WAITING_PROMPT - BLOCK_SIZE)
            self._run_alone(common)
            for _ in range(WAITING):
                self.add(common + self._text(BLOCK_SIZE), 16)

    def run(self, case: Case, steps: int, cost: Cost) -> None:
        """Measure some steps."""
        for _ in range(steps):
            if case.load == "queue":
                # What one that waits needs, and half of what will be kept back for those that run.
                self._leave_available(self.pool.blocks_for(WAITING_PROMPT + 1) + case.running // 2)
            for _ in range(self.step(cost)):
                self.add(self._text(128), 128)

    def end(self, case: Case) -> None:
        """End all requests."""
        if case.load != "mix" and self.scheduler.stats().running != case.running:
            raise RuntimeError(f"{case.title}: {self.scheduler.stats().running} ran at the end")
        for request_id in list(self._live):
            self._end(self.scheduler.abort(request_id))
        self._leave_available(self.pool.num_blocks)

    def _fill(self) -> None:
        """Leave no block free: all hold the text of requests that have ended."""
        while self._prefix_caching and self.pool.num_free:
            self._run_alone(self._text(BLOCK_SIZE * min(self.pool.num_free, 256)))

    def _run_alone(self, prompt: list[int]) -> None:
        """Compute a prompt, so that it is cached."""
        running = self.scheduler.stats().running
        self.add(prompt, 1)
        self.step()
        if self.scheduler.stats().running != running:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens did not end in one step")

    def _start(self, case: Case, steps: int) -> None:
        match case.load:
            case "mix":
                for place in range(case.running):  # of all ages, so that they end one by one
                    self.add(self._text(128), 1 + place * 128 // case.running)
            case "families":
                for place in range(case.running // 4):
                    self.add(self._text(32 + place % 64), steps + 16, n=4)
            case _:
                for place in range(case.running):
                    self.add(self._text(32 + place % 64), steps + 16)

    def _text(self, length: int) -> list[int]:
        return self._draw.choices(self._vocabulary, k=length)

    def add(self, prompt: list[int], output: int, n: int = 1) -> None:
        """Queue a request that makes exactly ``output`` tokens."""
        self._made += 1
        request_id = f"request-{self._made}"
        self._live.add(request_id)
        self.scheduler.add(
            Request(
                request_id,
                prompt,
                SamplingParams(max_tokens=output, ignore_eos=True, n=n),
                arrival=float(self._made),
            )
        )

    def step(self, cost: Cost | None = None) -> int:
        """One step; returns how many requests ended."""
        scheduler = self.scheduler
        began = time.process_time()
        plan = scheduler.schedule()
        planned = time.process_time()
        outcomes = [outcome(chunk) for chunk in plan.chunks if chunk.samples]
        ran = time.process_time()
        deltas = scheduler.commit(plan, outcomes, STEP_TIMING)
        committed = time.process_time()
        if cost is not None:
            cost.schedule.append(planned - began)
            cost.commit.append(committed - ran)
        return self._end(deltas)

    def _end(self, deltas: list[TokenDelta]) -> int:
        ended = [delta.request_id for delta in deltas if delta.final]
        self._live.difference_update(ended)
        return len(ended)

    def _leave_available(self, blocks: int) -> None:
        """Hold or let go blocks from outside."""
        surplus = self.pool.num_available - blocks
        if surplus > 0:
            self._held += self.pool.allocate(surplus) or []
        elif surplus < 0:
            back = max(0, len(self._held) + surplus)
            self.pool.release(self._held[back:])
            del self._held[back:]


def outcome(chunk: ScheduledChunk) -> int | Candidates:
    """What a model would make of a chunk's last row."""
    group = chunk.sequence.group
    if group is None or group.forked:
        return 7
    width = group.params.width
    return Candidates((7,) * width, (-1.0,) * width)


def measure_steps(steps: int, only: str) -> tuple[list[Figure], dict[str, dict[str, float]]]:
    """Run all cases whose titles contain ``only``; print a table."""
    figures: list[Figure] = []
    rows = []
    raw: dict[str, dict[str, float]] = {}
    bench: Bench | None = None
    for case in tqdm([case for case in all_cases() if only in case.title], unit="case"):
        if bench is None or not bench.suits(case):
            bench = None  # before the next one takes its memory
            bench = Bench(case.num_blocks, case.prefix_caching)
            figures.append(Figure(f"a pool of {case.num_blocks:,} blocks, made", bench.seconds, " s"))
        cost = bench.measure(case, steps)
        step = microseconds(cost.step)
        raw[case.title] = {
            "step": step,
            "request": step / case.running,
            "schedule": microseconds(cost.schedule),
            "commit": microseconds(cost.commit),
            "largest": max(cost.step) * 1e6,
        }
        rows.append([case.title, *(f"{value:.1f}" for value in raw[case.title].values())])
        bar = STEP_BAR_US if case.is_bounded else None
        figures.append(Figure(case.title, step, " us a step", bar, at_most=True))
    header = ["step", "a request", "schedule", "commit", "largest step"]
    print_table(["processor time in us", *header], rows)
    if bench is not None and not only:  # the last case's pool is the largest
        benches = [Bench(POOLS[0], True), bench]
        for load in ("decode", "queue", "mix", "families"):
            name = f"{load}: a step with {POOLS[-1]:,} blocks over one with {POOLS[0]:,}, by turns"
            figures.append(most(name, growth(benches, load, steps), FLAT_BAR, "x"))
    return figures, raw


def growth(benches: list[Bench], load: str, steps: int) -> float:
    """A step of the second bench over one of the first, by turns: the same noise for both."""
    cases = [Case(load, RUNNING[-1], bench.pool.num_blocks) for bench in benches]
    costs = [Cost(), Cost()]
    for bench, case in zip(benches, cases, strict=True):
        bench.start(case, steps)
    for _ in range(steps // WINDOW):
        for bench, case, cost in zip(benches, cases, costs, strict=True):
            bench.run(case, WINDOW, cost)
    for bench, case in zip(benches, cases, strict=True):
        bench.end(case)
    small, large = (window_means(cost.step, WINDOW) for cost in costs)
    return median([more / less for more, less in zip(large, small, strict=True)])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.scheduler", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=320, help="measured steps of each case")
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    arguments = parser.parse_args()
    figures, raw = measure_steps(arguments.steps, arguments.only)
    busy = os.getloadavg()[0]
    if busy > 1.5:
        print(f"\n{busy:.1f} threads ran on this machine in the last minute: figures are of a busy machine")
    finish("loadtests.scheduler", figures, arguments, microseconds=raw, load_average=busy)


if __name__ == "__main__":
    main()
