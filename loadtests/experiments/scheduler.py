"""What the scheduler itself costs: processor time of ``schedule`` and ``commit``, without a model.

``python -m loadtests.scheduler`` drives the real scheduler. Each pool is first filled with cached text of ended
requests, so that every new block evicts an old one. Loads:

- *decode*: every request needs one token in each step; their lengths differ, so that in each step 1 in 16
  crosses the end of a block;
- *queue*: the same, with 1,000 requests waiting that do not fit, all with one long cached prefix;
- *mix*: requests of 128 tokens in, 128 out, each replaced by a new one as it ends;
- *families*: 4 sequences of each prompt.

A figure is the median over windows of 16 steps, of each window's mean: what the end of a block costs counts
for its share, and what neighbors on the machine do falls out.
"""

from __future__ import annotations

import random
import time

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
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import median, window_means

BLOCK_SIZE = 16
LOADS = ("decode", "queue", "mix", "families")
POOLS = (8_192, 1_000_000)  # blocks
RUNNING = 256
WAITING = 1_000
WAITING_PROMPT = 4_096  # tokens, of which all but those of the last block are common
WINDOW = 16  # steps, as many as tokens in a block
WARMING = 2 * WINDOW  # steps
STEP_BAR_US = 500.0  # in the smallest pool
FLAT_BAR = 1.25  # of the largest pool's step over the smallest pool's: nothing looks at all blocks
TOKENS = range(100, 40_000)  # ordinary tokens
STEP_TIMING = StepTiming(0.01)


def microseconds(seconds: list[float]) -> float:
    return median(window_means(seconds, WINDOW)) * 1e6


class Bench:
    """A pool and its scheduler, for one load of ``running`` requests after the other."""

    def __init__(self, num_blocks: int, running: int = RUNNING) -> None:
        self._running = running
        self._draw = random.Random(0)
        self._live: set[str] = set()
        self._made = 0
        self._held: list[int] = []
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        # One object for each number: a million blocks of objects of their own take half a gigabyte more.
        self._vocabulary = list(TOKENS)
        self.scheduler = Scheduler(
            self.pool,
            PrefixIndex(self.pool),
            max_num_seqs=2 * RUNNING,  # a queue waits for blocks, not for sequence slots
            token_budget=8_192,
            prefix_caching=True,
            eos_token_ids=(2,),
            model_key=("model", "bfloat16"),
            limits=ModelLimits(TOKENS.stop, 1 << 20, num_blocks, BLOCK_SIZE),
            recovery=RecoveryPolicy(RecoveryMode.RECOMPUTE, BLOCK_SIZE, Rates()),
        )

    def measure(self, load: str, steps: int) -> list[float]:
        """Bring a load about, and end it after ``steps`` steps; the processor time of each in s."""
        seconds: list[float] = []
        self.start(load, steps)
        self.run(load, steps, seconds)
        self.end(load)
        return seconds

    def start(self, load: str, steps: int) -> None:
        """Bring about a load that can go on for ``steps`` steps."""
        self._fill()
        self._start(load, WARMING + steps)
        for _ in range(WARMING):
            self.step()
        if load == "queue":
            common = self._text(WAITING_PROMPT - BLOCK_SIZE)
            self._run_alone(common)
            for _ in range(WAITING):
                self.add(common + self._text(BLOCK_SIZE), 16)

    def run(self, load: str, steps: int, seconds: list[float]) -> None:
        for _ in range(steps):
            if load == "queue":
                # What one that waits needs, and half of what will be kept back for those that run.
                self._leave_available(self.pool.blocks_for(WAITING_PROMPT + 1) + self._running // 2)
            for _ in range(self.step(seconds)):
                self.add(self._text(128), 128)

    def end(self, load: str) -> None:
        if load != "mix" and (ran := self.scheduler.stats().running) != self._running:
            raise RuntimeError(f"{load}: {ran} ran at the end")
        for request_id in list(self._live):
            self._end(self.scheduler.abort(request_id))
        self._leave_available(self.pool.num_blocks)

    def _fill(self) -> None:
        """Leave no block free: all hold the text of requests that have ended."""
        while self.pool.num_free:
            self._run_alone(self._text(BLOCK_SIZE * min(self.pool.num_free, 256)))

    def _run_alone(self, prompt: list[int]) -> None:
        """Compute a prompt, so that it is cached."""
        running = self.scheduler.stats().running
        self.add(prompt, 1)
        self.step()
        if self.scheduler.stats().running != running:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens did not end in one step")

    def _start(self, load: str, steps: int) -> None:
        if load == "mix":
            for place in range(self._running):  # of all ages, so that they end one by one
                self.add(self._text(128), 1 + place * 128 // self._running)
            return
        n = 4 if load == "families" else 1
        for place in range(self._running // n):
            self.add(self._text(32 + place % 64), steps + 16, n)

    def _text(self, length: int) -> list[int]:
        return self._draw.choices(self._vocabulary, k=length)

    def add(self, prompt: list[int], output: int, n: int = 1) -> None:
        """Queue a request that makes exactly ``output`` tokens."""
        self._made += 1
        request_id = f"request-{self._made}"
        self._live.add(request_id)
        params = SamplingParams(max_tokens=output, ignore_eos=True, n=n)
        self.scheduler.add(Request(request_id, prompt, params, arrival=float(self._made)))

    def step(self, seconds: list[float] | None = None) -> int:
        """One step; returns how many requests ended."""
        scheduler = self.scheduler
        began = time.process_time()
        plan = scheduler.schedule()
        planned = time.process_time()
        outcomes = [outcome(chunk) for chunk in plan.chunks if chunk.samples]
        ran = time.process_time()
        deltas = scheduler.commit(plan, outcomes, STEP_TIMING)
        committed = time.process_time()
        if seconds is not None:
            seconds.append(planned - began + committed - ran)
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


def measure_steps(steps: int) -> list[Figure]:
    """Every load on the smallest pool, then the largest pool's steps over its own."""
    figures: list[Figure] = []
    benches = [Bench(blocks) for blocks in POOLS]
    for load in tqdm(LOADS, unit="load"):
        step = microseconds(benches[0].measure(load, steps))
        name = f"{load}, {RUNNING} running, {POOLS[0]:,} blocks"
        figures.append(most(name, step, STEP_BAR_US, " us a step"))
        name = f"{load}: a step with {POOLS[-1]:,} blocks over one with {POOLS[0]:,}, by turns"
        figures.append(most(name, growth(benches, load, steps), FLAT_BAR, "x"))
    return figures


def growth(benches: list[Bench], load: str, steps: int) -> float:
    """A step of the second bench over one of the first, by turns: the same noise for both."""
    costs: list[list[float]] = [[], []]
    for bench in benches:
        bench.start(load, steps)
    for _ in range(steps // WINDOW):
        for bench, cost in zip(benches, costs, strict=True):
            bench.run(load, WINDOW, cost)
    for bench in benches:
        bench.end(load)
    small, large = (window_means(cost, WINDOW) for cost in costs)
    return median([more / less for more, less in zip(large, small, strict=True)])


def main() -> None:
    arguments = parse("scheduler", __doc__, {"--steps": (320, "measured, of each load")})
    figures = measure_steps(arguments.steps)
    finish("loadtests.scheduler", figures, arguments, "the scheduler's processor time")
