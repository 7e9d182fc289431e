"""How long one routing decision takes, and how fast KV events are taken in.

Prompts are hashed anew for each round, as in service: their keys are not the objects that the index has, and
the processor's caches have not seen them. The index has 30,000 blocks for each replica.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from app.channel.kv_feed import PIECE_KEYS
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from app.routing.load import LoadReport
from engine.kv.block_keys import block_keys, root_key
from engine.request import CacheNamespace

pytest.importorskip("pytest_benchmark", reason="the benchmarks need pytest-benchmark: pip install -e '.[dev]'")

BLOCK_SIZE = 16
BLOCKS_PER_REPLICA = 30_000
GROUPS = 150
"""System prompts, each on some of the replicas."""
ROUNDS = 3000
ROOT = root_key("benchmark", "float32", BLOCK_SIZE, CacheNamespace())

Goals = Callable[[dict[str, float]], None]
SMALL = pytest.param((16, 512), id="16-replicas-512-blocks")
LARGE = pytest.param((64, 2048), id="64-replicas-2048-blocks")


class Fleet:
    """An index of full replicas, and prompts of ``blocks`` blocks.

    Five sixths of a prompt are a system prompt that some replicas have, the rest nobody has.
    """

    def __init__(self, replicas: int, blocks: int) -> None:
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

    def _keys(self, root: int, blocks: int) -> list[int]:
        return block_keys(root, [self.draw.getrandbits(32) for _ in range(blocks * BLOCK_SIZE)], BLOCK_SIZE)


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """One of a size for all benchmarks that take it."""
    return Fleet(*request.param)


small_and_large = pytest.mark.parametrize("fleet", [SMALL, LARGE], indirect=True, scope="module")
small = pytest.mark.parametrize("fleet", [SMALL], indirect=True, scope="module")


class Desk:
    """A ledger over the fleet's index, at a load where bookings and speculation come and go."""

    def __init__(self, fleet: Fleet) -> None:
        self.now = 0.0
        self.attempt = 0
        self.open: list[int] = []
        self.ledger = Ledger(index=fleet.index, clock=lambda: self.now)
        for name in fleet.names:
            route = Route(name, 0)
            self.ledger.open(route)
            self.ledger.report(
                route,
                LoadReport(
                    waiting_tokens=4000,
                    running=16,
                    kv_tokens=100_000,
                    referenced=10_000,
                    free=100,
                    evictable=BLOCKS_PER_REPLICA - 10_100,
                    num_blocks=BLOCKS_PER_REPLICA,
                    block_size=BLOCK_SIZE,
                    prefill_rate=20_000.0,
                    step_seconds=0.02,
                    waiting=0,
                    held_up=0,
                    max_running=0,
                    acknowledged=0,
                ),
            )

    def next(self) -> int:
        """Another attempt, 5 ms later; the oldest of a hundred ends."""
        self.now += 0.005
        while len(self.open) >= 100:
            done = self.open.pop(0)
            self.ledger.first_token(done)
            self.ledger.release(done)
        return self.another()

    def another(self) -> int:
        """Another attempt, at once; none ends."""
        self.attempt += 1
        self.open.append(self.attempt)
        self.ledger.expect(self.attempt)
        return self.attempt


@small_and_large
def test_walk(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """The longest prefix on every replica."""
    benchmark.pedantic(
        fleet.index.longest, setup=lambda: ((fleet.prompt(),), {}), rounds=ROUNDS, warmup_rounds=50
    )
    goals({"p50_us": 25 if fleet.blocks == 512 else 110})


@small_and_large
def test_decision(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """``Ledger.book`` of one request in steady state: all that a request waits for, under one lock.

    The longest prefix on every replica is found, what the request would cost on each is summed, one is chosen,
    the work is booked there and its claim is noted. A hundred requests are under way. Not in it: what a choice
    leaves to the next call (to learn, to claim its blocks, to make its replica's terms anew, to end claims that
    are over), which here is a first token or an end (``test_release``), but in a burst the next decision
    (``test_burst``); hashing (``test_hash_and_decide``); what Serve does around it.
    """
    desk = Desk(fleet)

    def setup() -> tuple[tuple[str, int, int, int], dict[str, list[int]]]:
        attempt = desk.next()
        return (str(attempt), attempt, fleet.blocks * BLOCK_SIZE, 1000), {"keys": fleet.prompt()}

    benchmark.pedantic(desk.ledger.book, setup=setup, rounds=ROUNDS, warmup_rounds=200)
    assert desk.ledger.faults == 0
    goals({"p50_us": 40, "p99_us": 150} if fleet.blocks == 512 else {"p50_us": 150, "p99_us": 400})


@small_and_large
def test_burst(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """A decision right after another one: it does first what that one has left to the next call."""
    desk = Desk(fleet)

    def setup() -> tuple[tuple[str, int, int, int], dict[str, list[int]]]:
        attempt = desk.next()
        # Two at a time, so that the last call before the timed one is a decision, not an end.
        desk.ledger.book(str(attempt), attempt, fleet.blocks * BLOCK_SIZE, 1000, keys=fleet.prompt())
        attempt = desk.another()
        return (str(attempt), attempt, fleet.blocks * BLOCK_SIZE, 1000), {"keys": fleet.prompt()}

    benchmark.pedantic(desk.ledger.book, setup=setup, rounds=ROUNDS // 3, warmup_rounds=100)
    assert desk.ledger.faults == 0
    goals({})


@small_and_large
def test_release(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """First token and end of one request, of a hundred, and what its decision has left to be done."""
    desk = Desk(fleet)

    def setup() -> tuple[tuple[int], dict[str, Any]]:
        attempt = desk.next()
        desk.ledger.book(str(attempt), attempt, fleet.blocks * BLOCK_SIZE, 1000, keys=fleet.prompt())
        return (attempt,), {}

    def release(attempt: int) -> None:
        desk.ledger.first_token(attempt)
        desk.ledger.release(attempt, made=200)

    benchmark.pedantic(release, setup=setup, rounds=ROUNDS // 3, warmup_rounds=50)
    goals({})


@small
def test_hash_and_decide(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """Hashing a prompt of 8,192 tokens, deciding and booking."""
    desk = Desk(fleet)

    def route(attempt: int, tokens: list[int]) -> None:
        keys = block_keys(ROOT, tokens, BLOCK_SIZE)
        desk.ledger.book(str(attempt), attempt, len(tokens), 1000, keys=keys)

    def setup() -> tuple[tuple[int, list[int]], dict[str, Any]]:
        return (desk.next(), [fleet.draw.getrandbits(17) for _ in range(8192)]), {}

    benchmark.pedantic(route, setup=setup, rounds=ROUNDS // 3, warmup_rounds=50)
    assert desk.ledger.faults == 0
    goals({"p99_us": 1000})


@small
def test_apply(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """Batches of 256 stored and 256 removed keys into full replicas."""

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = fleet.draw.choice(fleet.names)
        fleet.sequences[name] += 1
        held = fleet.held[name]
        removed = held[-256:].tolist()
        del held[-256:]
        stored = [fleet.draw.getrandbits(64) for _ in range(256)]
        held[:0] = array("Q", stored)
        return (name, 0, fleet.sequences[name], stored, removed), {}

    benchmark.pedantic(fleet.index.apply, setup=setup, rounds=ROUNDS // 3, warmup_rounds=20)
    benchmark.extra_info["records"] = 512
    assert fleet.index.counters.gaps == fleet.index.counters.unknown == 0
    goals({"records_per_s": 2e6})


@small
def test_piece_of_a_snapshot(benchmark: Any, goals: Goals, fleet: Fleet) -> None:
    """What is taken in at once of a new replica's blocks, while a decision has to wait."""
    fleet.index.add("newcomer")

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        keys = [fleet.draw.getrandbits(64) for _ in range(PIECE_KEYS)]
        return ("newcomer", 0, 7, keys, False), {}

    benchmark.pedantic(fleet.index.snapshot, setup=setup, rounds=60)
    fleet.index.remove("newcomer")
    goals({"p50_us": 300})


def test_snapshot(benchmark: Any, goals: Goals) -> None:
    """A whole replica of 30,000 blocks in one call; the channel hands it over in pieces."""
    draw = random.Random(0)
    index = KvIndex()
    epochs = itertools.count()

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        epoch = next(epochs)
        index.add("replica", epoch)
        while index.sweep():
            pass
        return ("replica", epoch, 0, [draw.getrandbits(64) for _ in range(BLOCKS_PER_REPLICA)]), {}

    benchmark.pedantic(index.snapshot, setup=setup, rounds=30)
    goals({"p50_us": 50_000})
