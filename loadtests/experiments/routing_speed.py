"""``python -m loadtests.routing_speed``: the time of one routing decision, and of taking KV events in.

Prompts are hashed anew for each round, as in service: their keys are not the objects that the index has, and
the processor's caches have not seen them. The index has 30,000 blocks for each replica. No garbage is collected
while calls are timed.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

from tqdm import tqdm

from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from app.routing.load import LoadReport
from app.routing.routing_meta import RoutingMeta
from engine.kv.block_keys import block_keys, root_key
from engine.request import CacheNamespace
from loadtests.report import Figure, finish, parse
from loadtests.stats import quantile

BLOCK_SIZE = 16
BLOCKS_PER_REPLICA = 30_000
GROUPS = 150
"""System prompts, each on some of the replicas."""
ROUNDS = 3000
ROOT = root_key("benchmark", "float32", BLOCK_SIZE, CacheNamespace())
SMALL, LARGE = (16, 512), (64, 2048)
"""Replicas, and blocks of a prompt."""
BUSY = {"waiting_tokens": 4000, "running": 16, "kv_tokens": 100_000, "referenced": 10_000, "free": 100}
NONE = dict.fromkeys(("waiting", "num_blocked", "num_lacking", "max_running", "acknowledged"), 0)
ENDS = dict.fromkeys(("first_end", "half_ended", "all_ended"), 0)
POOL = {"evictable": BLOCKS_PER_REPLICA - 10_100, "num_blocks": BLOCKS_PER_REPLICA, "block_size": BLOCK_SIZE}
LOAD = LoadReport(prefill_rate=20_000.0, step_seconds=0.02, **BUSY, **NONE, **ENDS, **POOL)

Setup = Callable[[], Callable[[], object]]
"""Makes the next call; only the call is timed."""


def timed(name: str, setup: Setup, rounds: int, warmup: int, records: int = 0, **bars: float) -> list[Figure]:
    """The time of a call that takes in so many records; bars of ``p50`` and ``p99`` in us, or of ``per_s``."""
    times = []
    gc.collect()
    gc.disable()
    for _ in range(warmup + rounds):
        call = setup()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    gc.enable()
    del times[:warmup]
    figures = [
        Figure(f"{name} {quoted}", quantile(times, share) * 1e6, " µs", bars.get(quoted), True)
        for quoted, share in (("p50", 0.5), ("p99", 0.99))
    ]
    if records:
        figures.append(Figure(f"{name} records", records * len(times) / sum(times), "/s", bars.get("per_s")))
    return figures


class Fleet:
    """An index of full replicas, and prompts of ``blocks`` blocks.

    Five sixths of a prompt are a system prompt that some replicas have, the rest nobody has.
    """

    def __init__(self, replicas: int, blocks: int) -> None:
        self.title = f"[{replicas}-replicas-{blocks}-blocks]"
        self.draw = random.Random(0)
        self.index = KvIndex()
        self.blocks = blocks
        self.names = [f"replica-{number}" for number in range(replicas)]
        shared = blocks * 5 // 6
        self.own_tokens = (blocks - shared) * BLOCK_SIZE
        self.systems = [self._keys(ROOT, shared) for _ in range(GROUPS)]
        self.sequences = dict.fromkeys(self.names, 0)
        self.held: dict[str, array[int]] = {}  # not lists, which Python's garbage collector would walk over
        for number, name in enumerate(self.names):
            held: list[int] = []
            for group, keys in enumerate(self.systems):
                # The first is everywhere, the last on one replica; some replicas have only its beginning.
                if (number + group) % (1 + group * replicas // GROUPS) == 0:
                    held += keys[: len(keys) if number % 4 else len(keys) // 2]
                if len(held) > BLOCKS_PER_REPLICA * 3 // 4:
                    break
            held += [self.draw.getrandbits(64) for _ in range(BLOCKS_PER_REPLICA - len(held))]
            self.held[name] = array("Q", held)
            self.index.add(name)
            self.index.snapshot(name, 0, 0, held)

    def prompt(self) -> list[int]:
        """Keys of the next prompt, new objects."""
        system = self.systems[self.draw.randrange(GROUPS)]
        own = [self.draw.getrandbits(32) for _ in range(self.own_tokens)]
        return [key ^ 0 for key in system] + block_keys(system[-1], own, BLOCK_SIZE)

    def apply(self) -> Callable[[], object]:
        """A batch of 256 stored and 256 removed keys into a full replica."""
        name = self.draw.choice(self.names)
        self.sequences[name] += 1
        held = self.held[name]
        removed = held[-256:].tolist()
        del held[-256:]
        stored = [self.draw.getrandbits(64) for _ in range(256)]
        held[:0] = array("Q", stored)
        return partial(self.index.apply, name, 0, self.sequences[name], stored, removed)

    def _keys(self, root: int, blocks: int) -> list[int]:
        return block_keys(root, [self.draw.getrandbits(32) for _ in range(blocks * BLOCK_SIZE)], BLOCK_SIZE)


class Desk:
    """A ledger over the fleet's index, at a load where bookings and claims come and go."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.now = 0.0
        self.attempt = 0
        self.open: list[int] = []
        self.ledger = Ledger(index=fleet.index, clock=lambda: self.now)
        for name in fleet.names:
            self.ledger.open(Route(name, 0))
            self.ledger.report(Route(name, 0), LOAD)

    def decision(self) -> Callable[[], object]:
        """``Ledger.book`` of one request in steady state: all that a request waits for, under one lock.

        A hundred requests are under way. Not in it: what a choice leaves to the next call, which here is a
        first token or an end; hashing; what Serve does around it.
        """
        attempt, tokens = self._next(), self.fleet.blocks * BLOCK_SIZE
        return partial(
            self.ledger.book, RoutingMeta(str(attempt), attempt, tokens, 1000, keys=self.fleet.prompt())
        )

    def _next(self) -> int:
        """Another attempt, 5 ms later; the oldest of a hundred ends."""
        self.now += 0.005
        while len(self.open) >= 100:
            done = self.open.pop(0)
            self.ledger.first_token(done)
            self.ledger.release(done)
        self.attempt += 1
        self.open.append(self.attempt)
        self.ledger.expect(self.attempt)
        return self.attempt


def measure() -> Iterator[list[Figure]]:
    """All calls, those of a size together: they share a fleet."""
    for size, p50, p99 in ((SMALL, 40.0, 150.0), (LARGE, 150.0, 400.0)):
        fleet = Fleet(*size)
        title, desk = fleet.title, Desk(fleet)
        yield timed(f"decision{title}", desk.decision, ROUNDS, 200, p50=p50, p99=p99)
        if size == SMALL:
            yield timed(f"apply{title}", fleet.apply, 1000, 20, 512, per_s=2e6)
        if desk.ledger.faults or fleet.index.counters.gaps or fleet.index.counters.unknown:
            raise RuntimeError(f"the ledger or the index of {title} has counted faults")


def main() -> None:
    arguments = parse("routing_speed", __doc__)
    figures = [figure for found in tqdm(measure(), unit="call") for figure in found]
    finish("loadtests.routing_speed", figures, arguments, "call")
