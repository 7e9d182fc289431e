"""Blocks keep their contents wherever they are copied, bit for bit."""

from __future__ import annotations

import platform
import random
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from numbered_cache import MODEL, contents, numbered

from engine.execution.calibration import CopyCost, steady_prefill_rate, swap_costs
from engine.kv import kv_cache
from engine.kv.block_pool import NO_BLOCK, InvariantError
from engine.kv.kv_cache import KVCache
from engine.kv.prefaulter import SLICE, Prefaulter
from engine.kv.swap_stream import CopyClock
from engine.kv.transfers import Transfers

CPU = torch.device("cpu")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def test_pool_and_host_blocks_are_alike_and_begin_as_zeros() -> None:
    cache = KVCache(MODEL, 5, 3, torch.bfloat16, CPU, host_blocks=2)
    assert cache.pool.shape == (5, 2, 2, 3, 1, 4)
    assert cache.host.shape == (2, 2, 2, 3, 1, 4)
    for tensor in (cache.pool, cache.host):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.bfloat16
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()


def test_host_blocks_have_their_pages_from_the_start() -> None:
    """The first swap to a page that does not exist yet takes ten times as long as the copy."""
    cache = KVCache(MODEL, 1, 16, torch.float32, torch.device("cpu"), host_blocks=32_768)
    pages = cache.host.numel() * cache.host.element_size() // resource.getpagesize()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache.host.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 10


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux has the call, from 5.14 on",
)
def test_pages_are_prefaulted_ahead_of_the_blocks_in_use_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each prompt waits until the system has found the memory for its keys and values."""
    cache = KVCache(MODEL, 32_768, 16, torch.float32, CPU)
    block_bytes = cache.pool.numel() * cache.pool.element_size() // 32_768
    monkeypatch.setattr(kv_cache, "PREFAULT_AHEAD", 4096 * block_bytes)
    cache.pool[5] = 5.0
    for mark, prefaulted in ((0, 4096), (100, 4196), (30_000, 32_768)):
        calls = 1
        while cache.prefault(mark):
            calls += 1
        assert cache._prefaulter is not None
        assert calls <= 32_768 * block_bytes // SLICE + 1
        assert cache._prefaulter.prefaulted == prefaulted * block_bytes
    assert (cache.pool[5] == 5.0).all()
    pages = 32_768 * block_bytes // resource.getpagesize()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache.pool.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 10


def test_on_a_system_without_that_call_first_writes_map_pages() -> None:
    memory = torch.zeros(8)
    prefaulter = Prefaulter(memory.data_ptr(), memory.nbytes)
    prefaulter._advise = lambda start, length, advice: -1
    assert not prefaulter.extend(32)
    assert not prefaulter.extend(32)
    assert prefaulter.prefaulted == 0


def test_nothing_to_transfer_takes_no_time() -> None:
    cache = numbered(2)
    assert cache.host.shape[0] == 0
    assert cache.transfer(Transfers()) == (0.0, 0.0)
    assert cache.transfer(Transfers(copies=[(0, 1)])) == (0.0, 0.0)
    assert contents(cache.pool) == [1, 1]


def test_a_block_comes_back_as_it_went() -> None:
    cache = KVCache(MODEL, 4, 3, torch.bfloat16, CPU, host_blocks=4)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.pool.clone()
    out, back = cache.transfer(Transfers(swap_out=[(0, 2), (1, 3), (3, 0)]))
    assert out > 0.0
    assert back == 0.0
    cache.pool.zero_()
    out, back = cache.transfer(Transfers(swap_in=[(0, 0), (3, 2), (2, 1)]))
    assert out == 0.0
    assert back > 0.0
    assert torch.equal(cache.pool[:3], before[[3, 0, 1]])


def test_a_step_swaps_out_then_copies_then_swaps_in() -> None:
    """Block 1 leaves before a copy overwrites it, and block 2 is copied before it is filled from the host."""
    cache = numbered(4, 2)
    cache.transfer(Transfers(swap_out=[(1, 0)], copies=[(2, 1)], swap_in=[(1, 2), (0, 3)]))
    assert contents(cache.pool) == [1, 3, -2, 2]
    assert contents(cache.host) == [2, -2]


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (1, 2), (2, 3)],
        [(2, 3), (1, 2), (0, 1)],
        [(0, 1), (1, 0)],
        [(3, 0), (0, 3), (5, 4)],
        [(0, 4), (0, 5), (0, 2)],
    ],
    ids=str,
)
def test_every_source_is_read_before_a_destination_is_written(pairs: list[tuple[int, int]]) -> None:
    cache = numbered(6)
    expected = list(range(1, 7))
    for source, destination in pairs:
        expected[destination] = source + 1
    cache.transfer(Transfers(copies=pairs))
    assert contents(cache.pool) == expected


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("seed", range(20))
def test_any_transfers_move_what_they_name(seed: int, device_type: str) -> None:
    """Against plain lists, with runs of all lengths in any order."""
    chance = random.Random(seed)
    blocks, host_blocks = 24, 16
    cache = numbered(blocks, host_blocks, device_type)
    device, host = contents(cache.pool), contents(cache.host)
    for _ in range(5):
        moves = []
        for sources, destinations in ((blocks, host_blocks), (blocks, blocks), (host_blocks, blocks)):
            count = chance.randint(0, host_blocks)
            pairs = {destination: chance.randrange(sources) for destination in range(destinations)}
            start = chance.randrange(sources)
            for place in range(chance.randint(0, sources - start)):  # a run
                if place < destinations:
                    pairs[place] = start + place
            chosen = [(source, destination) for destination, source in pairs.items()][:count]
            chance.shuffle(chosen)
            moves.append(chosen)
        cache.transfer(Transfers(*moves))
        for pairs_moved, source, destination in zip(
            moves, (device, device, host), (host, device, device), strict=True
        ):
            read = [source[block] for block, _ in pairs_moved]
            for (_, block), value in zip(pairs_moved, read, strict=True):
                destination[block] = value
    assert contents(cache.pool) == device
    assert contents(cache.host) == host


@dataclass
class Event:
    """A moment on a device that has come to ``Event.now``."""

    at: float  # milliseconds
    now: ClassVar[float] = 0.0

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_a_copy_is_timed_by_those_that_are_done() -> None:
    clock = CopyClock()
    assert clock.seconds(Event(10.0), Event(30.0), 4) == 0.0  # nothing is known yet
    assert clock.seconds(Event(30.0), Event(40.0), 5) == 0.0
    Event.now = 35.0
    assert clock.seconds(Event(40.0), Event(70.0), 10) == pytest.approx(10 * 0.005)
    Event.now = 100.0
    assert clock.seconds(Event(80.0), Event(90.0), 3) == pytest.approx(3 * 10.0 / 1000 / 3)


@pytest.mark.parametrize(
    "transfers",
    [
        Transfers(swap_out=[(0, 0), (1, 1), (2, 2)]),
        Transfers(swap_in=[(1, 3), (2, 4)]),
        Transfers(copies=[(3, 4)]),
        Transfers(swap_out=[(NO_BLOCK, 0)]),
        Transfers(copies=[(0, NO_BLOCK)]),
    ],
    ids=str,
)
def test_a_block_that_does_not_exist_is_an_error(transfers: Transfers) -> None:
    cache = numbered(4, 2)
    with pytest.raises(InvariantError, match="a transfer from block"):
        cache.transfer(transfers)
    assert contents(cache.pool) == [1, 2, 3, 4]
    assert contents(cache.host) == [-1, -2]


def clocked(cache: KVCache, call: float, block: float, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock by which each transfer of ``cache`` takes so long, and half of it on the way back."""
    now, transfer = [0.0], cache.transfer

    def timed(transfers: Transfers) -> tuple[float, float]:
        out, back = len(transfers.swap_out), len(transfers.swap_in)
        now[0] += (call + block * out) if out else (call + block * back) / 2
        return transfer(transfers)

    monkeypatch.setattr(cache, "transfer", timed)
    return lambda: now[0]


def test_swap_costs_tell_the_call_from_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = numbered(6, 4)
    out, back = swap_costs(cache, clocked(cache, 0.5, 0.25, monkeypatch))
    assert [out.rate, out.call_seconds] == pytest.approx([4.0, 0.5])
    assert [back.rate, back.call_seconds] == pytest.approx([8.0, 0.25])
    assert contents(cache.pool) == [0, 0, 0, 0, 5, 6]
    assert contents(cache.host) == [0, 0, 0, 0]
    for cost in swap_costs(numbered(6, 4)):
        assert cost.rate > 0.0
        assert cost.call_seconds >= 0.0
    with pytest.raises(ValueError, match="host blocks"):
        swap_costs(numbered(6))


def test_swap_costs_make_no_negative_part_of_odd_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = numbered(6, 4)
    ticks = iter(range(100))
    assert swap_costs(cache, lambda: next(ticks)) == (CopyCost(4.0, 0.0), CopyCost(4.0, 0.0))  # all take a tick
    cache = numbered(6, 1)
    assert swap_costs(cache, clocked(cache, 0.5, 0.5, monkeypatch)) == (CopyCost(1.0, 0.0), CopyCost(2.0, 0.0))
    cache = numbered(6, 4)
    out, _ = swap_costs(cache, clocked(cache, -0.5, 1.0, monkeypatch))  # four take longer than four times one
    assert [out.rate, out.call_seconds] == pytest.approx([4 / 3.5, 0.0])


def test_a_steady_rate_leaves_out_the_first_call() -> None:
    clock, calls = [0.0], []

    def prefill(tokens: int) -> None:
        calls.append(tokens)
        clock[0] += {1: 100.0, 2: 3.0, 3: 2.0, 4: 4.0}[len(calls)]

    assert steady_prefill_rate(prefill, 50, lambda: clock[0]) == 25.0
    assert calls == [50] * 4
