"""How fast this machine prefills, and the token budget that follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

STEP_SECONDS = 0.1
"""Aim for the longest step on a CPU: it bounds how long an abort or another request's first token waits."""

MIN_BUDGET, MAX_BUDGET = 32, 2048
GPU_BUDGET = 2048
OFFLINE_CPU_BUDGET = 512
"""Offline nobody waits for a single step; larger chunks prefill faster."""

DECODE_SHARE = 0.75
"""Most of a calibrated budget that decoding requests may take, so that prompts always get on."""

_TRIAL_TOKENS = (16, 64, 256)
_REPEAT_BELOW = 0.1  # seconds
_LONGEST_TRIAL = 0.4  # seconds expected; a longer trial is not begun


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured at start."""

    prefill_rate: float  # tokens per second
    token_budget: int  # tokens per step that take about STEP_SECONDS


def calibrate(
    prefill: Callable[[int], None], most_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """Time ``prefill(tokens)`` for growing numbers of tokens up to ``most_tokens``; about half a second.

    The best of a few calls counts: the very first one touches every weight for the first time, and threads
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


def processor_clock(num_threads: int) -> Callable[[], float]:
    """Seconds that ``num_threads`` busy threads would have taken on idle cores.

    Replicas start together and load their models on the same cores: by the wall, each would find a machine
    several times slower than the one it serves on.
    """
    return lambda: time.process_time() / num_threads


def budget_for(rate: float) -> int:
    """The multiple of 16 tokens, bounded, that takes nearest to ``STEP_SECONDS`` at ``rate`` a second."""
    return max(MIN_BUDGET, min(MAX_BUDGET, int(rate * STEP_SECONDS + 8) // 16 * 16))


def _timed(prefill: Callable[[int], None], tokens: int, clock: Callable[[], float]) -> float:
    start = clock()
    prefill(tokens)
    return max(clock() - start, 1e-6)
