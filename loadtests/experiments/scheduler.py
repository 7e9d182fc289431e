"""``python -m loadtests.scheduler``: processor time of ``schedule`` and ``commit``, without a model.

The pool is full of cached text, so that every new block evicts an old one. Loads: *decode*, a token for each
request in each step; *queue*, the same beside 1,000 requests with one cached prefix that wait because they do
not fit; *mix*, 128 tokens in and 128 out, each request replaced as it ends.
"""

from __future__ import annotations

import random
import time

from tqdm import tqdm

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import PrefixIndex
from engine.request import ModelLimits, Request
from engine.sampling_params import SamplingParams
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import mean, median

BLOCK_SIZE = WINDOW = 16  # tokens; steps, in which each request needs one new block
POOLS = (8_192, 1_000_000)  # blocks
RUNNING, WAITING = 256, 1_000
LOADS = ("decode", "queue", "mix")
STEP_BAR_US = 500.0  # in the smaller pool
FLAT_BAR = 1.25  # a step in the larger pool over one in the smaller: nothing looks at all blocks
VOCABULARY = list(range(100, 40_000))


class Bench:
    """A full pool and its scheduler, under a load that can go on for ``steps`` steps."""

    def __init__(self, num_blocks: int, load: str, steps: int, running: int = RUNNING) -> None:
        self.seconds: list[float] = []
        self._draw, self._made = random.Random(0), 0
        self._available: int | None = None  # blocks that are kept so: the others are held from outside
        self.held: list[int] = []
        self._replaces = False  # requests that end
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            PrefixIndex(self.pool),
            RecoveryPolicy(RecoveryMode.RECOMPUTE, BLOCK_SIZE, Rates()),
            ModelTraits(
                ModelLimits(VOCABULARY[-1] + 1, 1 << 20, num_blocks, BLOCK_SIZE), ("model", "bfloat16"), (2,)
            ),
            # A queue waits for blocks, not for sequence slots.
            SchedulerConfig(max_num_seqs=2 * RUNNING, token_budget=8_192),
        )
        while self.pool.num_free:
            self._add(self._text(BLOCK_SIZE * min(self.pool.num_free, 256)), 1)
            self.run(1)
        self._replaces = load == "mix"
        for place in range(running):  # in the mix of all ages, so that they end one by one
            length = 128 if self._replaces else 32 + place % 64
            self._add(self._text(length), 1 + place * 128 // running if self._replaces else steps + 64)
        self.run(2 * WINDOW)
        if load == "queue":
            common = self._text(255 * BLOCK_SIZE)
            self._add(common, 1)
            self.run(1)
            for _ in range(WAITING):
                self._add(common + self._text(BLOCK_SIZE), 16)
            # One would fit, but for half of what is kept for those that run.
            self._available = 257 + running // 2

    def run(self, steps: int) -> None:
        """Append the processor time of each step to ``seconds``."""
        for _ in range(steps):
            if self._available is not None:
                surplus = self.pool.num_available - self._available
                self.held += self.pool.allocate(max(surplus, 0)) or []
                self.pool.release(self.held[len(self.held) + min(surplus, 0) :])
                del self.held[len(self.held) + min(surplus, 0) :]
            began = time.process_time()
            plan = self.scheduler.schedule()
            planned = time.process_time()
            outcomes = [7] * plan.num_samples
            ran = time.process_time()
            deltas = self.scheduler.commit(plan, outcomes)
            self.seconds.append(time.process_time() - ran + planned - began)
            for _ in range(sum(delta.final for delta in deltas) if self._replaces else 0):
                self._add(self._text(128), 128)

    def _add(self, prompt: list[int], output: int) -> None:
        self._made += 1
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.scheduler.add(Request(f"request-{self._made}", prompt, params, arrival=float(self._made)))

    def _text(self, length: int) -> list[int]:
        return self._draw.choices(VOCABULARY, k=length)


def measure(load: str, steps: int) -> list[Figure]:
    """A step in the smaller pool, in us, and one in the larger over it. The pools take turns by windows."""
    benches = [Bench(blocks, load, steps) for blocks in POOLS]
    windows: list[list[float]] = [[], []]
    for _ in range(steps // WINDOW):
        for bench, means in zip(benches, windows, strict=True):
            bench.seconds.clear()
            bench.run(WINDOW)
            means.append(mean(bench.seconds))
    growth = median([more / less for less, more in zip(*windows, strict=True)])
    name = f"{load}, {RUNNING} running"
    return [
        most(f"{name}, {POOLS[0]:,} blocks", median(windows[0]) * 1e6, STEP_BAR_US, " us a step"),
        most(f"{name}, {POOLS[1]:,} blocks over {POOLS[0]:,}, by turns", growth, FLAT_BAR, "x"),
    ]


def main() -> None:
    arguments = parse("scheduler", __doc__, {"--steps": (320, "measured, of each load")})
    figures = [figure for load in tqdm(LOADS, unit="load") for figure in measure(load, arguments.steps)]
    finish("loadtests.scheduler", figures, arguments, "the scheduler's processor time")
