"""Everything that the autoscaling experiment assumes. Fixed before any result was looked at."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16
TICK_S = 0.25
"""Within a tick rates are constant; ends within it are interpolated."""

REPORT_EVERY_S = 1.0
REPORT_DELAY_S = 1.0
"""Reports are sampled and pushed once a second, so a decision sees what was a second ago."""

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
