"""Swaps beside the computation: nothing overtakes what it must wait for, and nothing waits for the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_engines import GPU, delay, gpu_config, gpu_engine
from logit_bits import PROMPT, assert_plain, run_preempting
from numbered_cache import contents, numbered
from tiny_engines import TINY_MODELS, make_request

import engine.execution.model_runner as model_runner
import engine.kv.kv_cache as kv_cache
from engine.engine_thread import EngineThread, StepOutputs
from engine.errors import ConfigError
from engine.kv.kv_cache import KVCache
from engine.kv.transfers import Transfers

pytestmark = [*GPU]

SLOW = 0.05  # seconds that a copy takes at least: far longer than anything else here


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every swap dawdles before it copies."""
    delay(0.0)  # the first call loads it, which waits for the device
    copy = kv_cache._copy_runs

    def dawdle(*arguments: object) -> None:
        delay(SLOW)
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_cache, "_copy_runs", dawdle)
    yield
    torch.cuda.synchronize()


def cache_of(blocks: int = 8, host_blocks: int = 8) -> KVCache:
    cache = numbered(blocks, host_blocks, "cuda")
    torch.cuda.synchronize()
    return cache


def write(cache: KVCache, blocks: list[int], value: float) -> torch.cuda.Event:
    """As a step does; the event comes once it is done."""
    cache.before_writing(blocks)
    for block in blocks:
        cache.pool[block].fill_(value)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done


@pytest.mark.usefixtures("slow_copies")
def test_a_block_on_its_way_out_is_not_written_before_it_has_left() -> None:
    cache = cache_of()
    cache.transfer(Transfers(swap_out=[(1, 0), (2, 1), (5, 2)]))
    write(cache, [2, 7], 99.0)
    assert contents(cache.host)[:3] == [2, 3, 6]
    assert contents(cache.pool) == [1, 2, 99, 4, 5, 6, 7, 99]


@pytest.mark.usefixtures("slow_copies")
def test_a_step_that_writes_other_blocks_does_not_wait() -> None:
    cache = cache_of()
    cache.transfer(Transfers(swap_out=[(1, 0), (2, 1)]))
    write(cache, [3], 99.0).synchronize()
    assert contents_now(cache.host) == [-1, -2]
    write(cache, [1], 99.0).synchronize()
    assert contents_now(cache.host) == [2, 3]


def contents_now(host: torch.Tensor) -> list[int]:
    """What the first two host blocks begin with, without waiting for any copy."""
    return [int(block.flatten()[0]) for block in host[:2]]


@pytest.mark.usefixtures("slow_copies")
def test_blocks_that_are_wanted_soonest_leave_first() -> None:
    cache = cache_of()
    cache.transfer(Transfers(swap_out=[(1, 0), (2, 1)]), written=[2])
    write(cache, [2], 99.0).synchronize()
    assert contents_now(cache.host) == [-1, 3]
    write(cache, [1], 99.0).synchronize()
    assert contents_now(cache.host) == [2, 3]


@pytest.mark.usefixtures("slow_copies")
def test_transfers_keep_their_order_among_slow_copies() -> None:
    """Out, over, in, and the same blocks again at once."""
    cache = cache_of()
    cache.transfer(Transfers(swap_out=[(1, 0)], copies=[(2, 1)], swap_in=[(1, 2), (0, 3)]))
    cache.transfer(Transfers(swap_out=[(3, 1), (1, 0)], swap_in=[(2, 3)]))
    cache.transfer(Transfers(copies=[(3, 1)]))
    assert contents(cache.pool)[:4] == [1, -3, -2, -3]
    assert contents(cache.host)[:3] == [3, 2, -3]


@pytest.mark.usefixtures("slow_copies")
def test_a_step_waits_for_what_it_swaps_in_and_a_swap_for_the_step_before_it() -> None:
    cache = cache_of()
    cache.transfer(Transfers(swap_in=[(4, 6)]))
    copied = cache.pool[6].clone()
    assert contents(copied[None]) == [-5]
    delay(SLOW)
    write(cache, [0], 42.0)
    cache.transfer(Transfers(swap_out=[(0, 0)]))
    assert contents(cache.host)[0] == 42


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("model", TINY_MODELS)
def test_many_swaps_among_others(model: str, tiny_models: dict[str, Path]) -> None:
    """Each request is preempted by the next, and their blocks are handed on while they are being copied."""
    engine = gpu_engine(tiny_models[model], num_blocks=17, token_budget=48, recovery="swap", swap_space=1 << 20)
    seen = run_preempting(engine)
    assert engine.stats().scheduler.preemptions >= 4
    assert_plain(engine, seen)
    stats = engine.stats().scheduler
    assert (stats.referenced_blocks, stats.host_blocks_used) == (0, 0)


def test_a_fence_that_is_missing_shows(
    tiny_models: dict[str, Path], slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without :meth:`before_writing` it does."""
    monkeypatch.setattr(KVCache, "before_writing", lambda self, blocks: None)
    engine = gpu_engine(
        tiny_models["Llama"], num_blocks=17, token_budget=48, recovery="swap", swap_space=1 << 20
    )
    seen = run_preempting(engine)
    with pytest.raises(AssertionError):
        assert_plain(engine, seen)


def test_the_host_pool_is_pinned(tiny_models: dict[str, Path]) -> None:
    engine = gpu_engine(tiny_models["Llama"], recovery="swap", swap_space=1 << 20)
    assert engine.runner.kv_cache.host.is_pinned()


def test_several_threads(tiny_models: dict[str, Path]) -> None:
    """Two engines of one GPU, each in a thread, swapping; callers submit from others."""
    outputs: list[list[StepOutputs]] = [[], []]
    ended = [threading.Event(), threading.Event()]
    deaths: list[BaseException] = []

    def keep(number: int) -> object:
        def on_outputs(out: StepOutputs) -> None:
            outputs[number].append(out)
            final = sum(delta.final for each in outputs[number] for delta in each.deltas)
            if final == 24:
                ended[number].set()

        return on_outputs

    options = {"num_blocks": 40, "recovery": "swap", "swap_space": 1 << 20, "token_budget": 48}
    threads = [
        EngineThread(gpu_config(tiny_models["Llama"], **options), keep(number), deaths.append)  # type: ignore[arg-type]
        for number in range(2)
    ]
    for thread in threads:
        thread.start()

    def submit(part: int) -> None:
        for number in range(part, 24, 3):
            for thread in threads:
                prompt = PROMPT[number:] + PROMPT[:number]
                thread.submit(make_request(f"r{number:02d}", prompt, max_tokens=16, ignore_eos=True))

    callers = [threading.Thread(target=submit, args=(part,)) for part in range(3)]
    for caller in callers:
        caller.start()
    assert all(event.wait(60) for event in ended)
    for caller in callers:
        caller.join()
    for thread in threads:
        thread.stop()
    assert not deaths
    tokens = []
    for kept in outputs:
        made: dict[str, list[int]] = {}
        for delta in (delta for out in kept for delta in out.deltas):
            made.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert all(len(each) == 16 for each in made.values())
        tokens.append(made)
    assert tokens[0] == tokens[1]


def hungry(*_: object) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def test_too_little_memory_is_told(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models["Llama"]
    with pytest.raises(ConfigError, match=r"kv_memory asks for .* lower kv_memory"):
        gpu_engine(folder, num_blocks=None, kv_memory=1 << 50)
    monkeypatch.setattr(model_runner, "load_model", hungry)
    with pytest.raises(ConfigError, match=r"does not fit the memory of cuda"):
        gpu_engine(folder)


def test_a_step_without_memory_ends_the_engine(tiny_models: dict[str, Path]) -> None:
    engine = gpu_engine(tiny_models["Llama"])
    engine.runner.decoder.forward = hungry  # type: ignore[assignment, method-assign]
    engine.add(make_request("r", PROMPT, max_tokens=4))
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
