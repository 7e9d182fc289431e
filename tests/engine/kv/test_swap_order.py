"""Swaps beside the computation, on a simulated GPU: late or not, results are those of doing all in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from logit_bits import assert_plain, run_preempting
from numbered_cache import contents, numbered
from stream_simulation import Device, simulate
from tiny_engines import TINY_MODELS

from engine.engine import Engine
from engine.kv.kv_cache import KVCache
from engine.kv.transfers import Transfers
from kernels.cpu.build import BuildError, find_compilers

try:
    find_compilers()
except BuildError as error:
    pytest.skip(f"only the CPU kernels promise equal bits: {error}", allow_module_level=True)

BLOCKS, HOST_BLOCKS = 12, 9


def random_pairs(chance: random.Random, sources: int, destinations: int, most: int) -> list[tuple[int, int]]:
    """Distinct destinations, any sources."""
    targets = chance.sample(range(destinations), chance.randint(0, most))
    return [(chance.randrange(sources), target) for target in targets]


class Steps:
    """Random steps on a simulated device, beside plain lists that hold what should come of them."""

    def __init__(self, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = chance
        self.cache = numbered(BLOCKS, HOST_BLOCKS)
        self.device = simulate(self.cache, monkeypatch)
        self.pool, self.host = contents(self.cache.pool), contents(self.cache.host)
        self.wrong: list[str] = []

    def step(self, number: int) -> None:
        chance = self.chance
        written = chance.sample(range(BLOCKS), chance.randint(0, 4))
        transfers = Transfers(
            swap_out=random_pairs(chance, BLOCKS, HOST_BLOCKS, 4),
            copies=random_pairs(chance, BLOCKS, BLOCKS, 2),
            swap_in=random_pairs(chance, HOST_BLOCKS, BLOCKS, 4),
        )
        self.cache.transfer(transfers, written if chance.random() < 0.7 else ())
        for pairs, source, destination in (
            (transfers.swap_out, self.pool, self.host),
            (transfers.copies, self.pool, self.pool),
            (transfers.swap_in, self.host, self.pool),
        ):
            values = [source[begin] for begin, _ in pairs]
            for (_, end), value in zip(pairs, values, strict=True):
                destination[end] = value
        self.loiter()
        self.cache.before_writing(written)
        expected = list(self.pool)
        self.device.compute.add(lambda: self.compute(number, expected, written))
        for block in written:
            self.pool[block] = 100 + number
        self.loiter()

    def compute(self, number: int, expected: list[int], written: list[int]) -> None:
        """As a step does: it sees all blocks, then writes some."""
        seen = contents(self.cache.pool)
        if seen != expected:
            self.wrong.append(f"step {number} saw {seen}, not {expected}")
        for block in written:
            self.cache.pool[block] = 100 + number

    def loiter(self) -> None:
        for _ in range(self.chance.choice([0, 0, 1, 3, 20])):
            self.device.advance(self.chance)

    def run(self, count: int) -> None:
        for number in range(count):
            self.step(number)
        self.device.finish()
        if contents(self.cache.pool) != self.pool or contents(self.cache.host) != self.host:
            self.wrong.append("the contents at the end")


@pytest.mark.parametrize("seed", range(60))
def test_any_steps_in_any_order_that_the_fences_allow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(random.Random(seed), monkeypatch)
    steps.run(25)
    assert steps.wrong == []


@pytest.mark.parametrize("fence", ["before_writing", "wait_event", "wait_stream"])
def test_a_fence_that_is_missing_shows(fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = KVCache if fence == "before_writing" else type(Device().compute)
    monkeypatch.setattr(owner, fence, lambda self, other: None)
    wrong = []
    for seed in range(10):
        steps = Steps(random.Random(seed), monkeypatch)
        steps.run(25)
        wrong += steps.wrong
    assert wrong


def test_a_step_waits_only_for_blocks_that_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that the step with the swap writes leave first."""
    cache = numbered(6, 4)
    device = simulate(cache, monkeypatch)
    cache.transfer(Transfers(swap_out=[(1, 0), (2, 1), (3, 2)]), written=[2])

    def write(block: int) -> list[int]:
        cache.before_writing([block])
        device.compute.reach(device.compute.queued)
        return contents(cache.host)

    assert write(5) == [-1, -2, -3, -4]
    assert write(2) == [-1, 3, -3, -4]
    assert write(2) == [-1, 3, -3, -4]
    assert write(3) == [2, 3, 4, -4]


def late_engine(make_engine: Callable[..., Engine], model: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its copies are made when a step needs them, and no sooner."""
    engine = make_engine(model, num_blocks=17, token_budget=48, recovery="swap", swap_space=1 << 20)
    device = simulate(engine.runner.kv_cache, monkeypatch)
    forward = engine.runner.decoder.forward

    def after_what_it_waits_for(*arguments: Any) -> Any:
        device.compute.reach(device.compute.queued)
        return forward(*arguments)

    monkeypatch.setattr(engine.runner.decoder, "forward", after_what_it_waits_for)
    return engine


@pytest.mark.parametrize("model", TINY_MODELS)
def test_an_engine_whose_copies_are_late(
    model: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = late_engine(make_engine, model, monkeypatch)
    seen = run_preempting(engine)
    assert engine.stats().scheduler.preemptions >= 4
    assert_plain(engine, seen)


def test_an_engine_without_the_fence_goes_wrong(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "before_writing", lambda self, blocks: None)
    engine = late_engine(make_engine, "Llama", monkeypatch)
    seen = run_preempting(engine)
    with pytest.raises(AssertionError):
        assert_plain(engine, seen)
