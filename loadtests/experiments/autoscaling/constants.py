"""Everything that the autoscaling experiment assumes. Fixed before any result was looked at."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16
TICK_S = 0.25
"""Within a tick rates are constant; ends within it are interpolated."""

REPORT_EVERY_S = 1.0
REPORT_DELAY_S = 1.0
"""A decision each second sees what was a second ago; production's are half as old at most times."""
QUICK_REPORT_EVERY_S = 0.5
QUICK_REPORT_DELAY_S = 1.0
"""Production's cadence at its worst: sampled each half second, and up to half a second later each for the push
and for the decision. The reaction is measured with it.
"""

TTFT_TARGET_S = 2.0
TPOT_TARGET_S = 0.05


@dataclass(frozen=True, slots=True)
class Service:
    """One replica: about an H100 with a dense model of 8 billion parameters in 16 bits."""

    pool_tokens: int = 400_000
    prefill_rate: float = 20_000.0  # tokens/s
    shared_prefill: float = 0.7  # of the time that prompts may take where others decode
    step_base: float = 7e-3  # seconds
    step_row: float = 30e-6
    step_token: float = 1.5e-8  # for each token of K and V that is read
    max_rows: int = 256


SERVICE = Service()
STARTUP_S = 60.0
MAX_REPLICAS = 40
FLEET = 1_000
"""Replicas among which a decision is timed."""
RATE_OF_ONE = 7.5
"""Chat requests per second for each replica that there will be, about."""
TRACE_TIMES = 30
MOST_REQUESTS = 5_000_000
"""Of one run; more would not fit the memory of a small machine."""
LONGEST_TRACE_S = 7 * 86_400.0
