"""How fast this machine prefills, decodes and swaps, and the token budget that follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.kv.kv_cache import KVCache
from engine.kv.transfers import Transfers

STEP_SECONDS = 0.1
"""Aim for the longest step on a CPU: it bounds how long an abort or another request's first token waits."""

MIN_BUDGET, MAX_BUDGET = 32, 2048
GPU_BUDGET = 2048
OFFLINE_CPU_BUDGET = 512
"""Offline, no client waits for a single step; larger chunks prefill faster."""

LONE_STEP = 1.75
"""Token budgets that a prompt may take in one step while it is alone: each step that it saves is worth a few
milliseconds. A newcomer waits for that step, and with its own has a first token within three budgets."""

DECODE_SHARE = 0.75
"""Maximum share of a calibrated budget for decoding sequences, so that prompts always advance."""

CPU_TRIAL_TOKENS = 256
"""Of a prompt that is as long as any that a CPU's rate depends on."""

_TRIAL_TOKENS = (16, 64, CPU_TRIAL_TOKENS)
_REPEAT_BELOW = 0.1  # seconds
_LONGEST_TRIAL = 0.4  # seconds expected; a longer trial is not begun
_REPEATS = 3

_TRIAL_ROWS = 8
"""Of the larger decode step: about what a sequence has with its drafts."""

_SWAP_BYTES = 32 << 20  # of the larger trial, on each side
_CACHE_BYTES = 64 << 20  # more than caches hold
_SWAP_SECONDS = 0.15  # after which no trial is begun


@dataclass(frozen=True, slots=True)
class Calibration:
    """Figures measured at startup."""

    prefill_rate: float  # tokens per second
    token_budget: int  # tokens per step that take about STEP_SECONDS


@dataclass(frozen=True, slots=True)
class CopyCost:
    """The cost of copying blocks to the host or back."""

    rate: float  # blocks a second, once a call has begun
    call_seconds: float  # of a call, in addition to those of its blocks


def calibrate(
    prefill: Callable[[int], None], most_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """Time ``prefill(tokens)`` for growing numbers of tokens up to ``most_tokens``; about half a second.

    The best of a few calls counts, because the first one touches every weight for the first time, and threads
    that spin while they wait for a processor count as busy.
    """
    prefill(min(_TRIAL_TOKENS[0], most_tokens))
    rate = 0.0
    for tokens in _TRIAL_TOKENS:
        tokens = min(tokens, most_tokens)
        seconds = _timed(prefill, tokens, clock)
        for _ in range(2):
            if seconds < _REPEAT_BELOW or tokens == _TRIAL_TOKENS[0]:
                seconds = min(seconds, _timed(prefill, tokens, clock))
        rate = max(rate, tokens / seconds)
        if seconds * 4 > _LONGEST_TRIAL or tokens == most_tokens:
            break
    return Calibration(rate, budget_for(rate))


def steady_prefill_rate(
    prefill: Callable[[int], None], tokens: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Tokens per second of ``prefill(tokens)``, which must wait for the end; for devices that want full steps.

    The first call does not count: it may compile kernels.
    """
    prefill(tokens)
    return tokens / min(_timed(prefill, tokens, clock) for _ in range(_REPEATS))


def decode_row_cost(decode: Callable[[int], None], clock: Callable[[], float] = time.perf_counter) -> float:
    """What one row adds to a decode step, as a share of the step's fixed cost; ``decode(rows)`` runs one step.

    The best of a few trials; the first calls, which may record or compile, do not count.
    """
    least = dict.fromkeys((1, _TRIAL_ROWS), math.inf)
    for rows in least:
        decode(rows)
    for _ in range(_REPEATS):
        for rows in least:
            least[rows] = min(least[rows], _timed(decode, rows, clock))
    row = max(least[_TRIAL_ROWS] - least[1], 0.0) / (_TRIAL_ROWS - 1)
    return row / max(least[1] - row, row / _TRIAL_ROWS, 1e-6)


def swap_costs(cache: KVCache, clock: Callable[[], float] = time.perf_counter) -> tuple[CopyCost, CopyCost]:
    """What ``cache`` takes to copy to the host and back: of one block and of many, the best of a few trials.

    On a CPU, the data is not in the caches, as after a step, which reads all weights. No two blocks are
    adjacent on both sides, as in a pool that has been used for a while. Takes at most 0.3 s.

    To be called before any block is in use: it zeroes the first ones.

    Raises:
        ValueError: the cache has no host blocks.
    """
    block_bytes = cache.pool[0].numel() * cache.pool.element_size()
    many = min(cache.num_blocks, cache.host_blocks, max(_SWAP_BYTES // block_bytes, 2))
    if not many:
        raise ValueError("a cache without host blocks cannot swap")
    cache.pool[:many].zero_()  # so that the pages exist
    cpu = cache.pool.device.type == "cpu"
    elsewhere = np.ones(_CACHE_BYTES if cpu else 1, dtype=np.uint8)

    def swap(transfers: Transfers) -> None:
        cache.transfer(transfers)
        if not cpu:
            torch.cuda.synchronize(cache.pool.device)

    def both_ways(blocks: int) -> tuple[Transfers, Transfers]:
        pairs = [(block, blocks - 1 - block) for block in range(blocks)]
        return Transfers(swap_out=pairs), Transfers(swap_in=pairs)

    trials = [transfers for blocks in (1, many) for transfers in both_ways(blocks)]
    swap(trials[2])  # the first one makes the host's pages
    least = [math.inf] * len(trials)
    start = clock()
    for _ in range(_REPEATS):
        for number, transfers in enumerate(trials):
            elsewhere.max()
            least[number] = min(least[number], _timed(swap, transfers, clock))
        if clock() - start > _SWAP_SECONDS:
            break
    return _copy_cost(many, least[0], least[2]), _copy_cost(many, least[1], least[3])


def _copy_cost(blocks: int, one: float, all_of_them: float) -> CopyCost:
    """The line through two trials, or through the larger one where that makes no sense."""
    if blocks > 1:
        each = (all_of_them - one) / (blocks - 1)
        if 0.0 < each <= one:
            return CopyCost(1.0 / each, one - each)
    return CopyCost(blocks / all_of_them, 0.0)


def processor_clock(num_threads: int) -> Callable[[], float]:
    """Seconds that ``num_threads`` busy threads would have taken on idle cores.

    Replicas start together and load their models on the same cores. In wall-clock time, each would measure a
    machine several times slower than the one on which it will serve.
    """
    return lambda: time.process_time() / num_threads


def budget_for(rate: float) -> int:
    """The multiple of 16 tokens, bounded, that takes nearest to ``STEP_SECONDS`` at ``rate`` a second."""
    return max(MIN_BUDGET, min(MAX_BUDGET, int(rate * STEP_SECONDS + 8) // 16 * 16))


def _timed(call: Callable[[Any], None], argument: Any, clock: Callable[[], float]) -> float:
    start = clock()
    call(argument)
    return max(clock() - start, 1e-6)
