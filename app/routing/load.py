"""What an engine says of its load, as it stands in the header of each flush of its channel."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGEST = float(2**53)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Engine truth at one flush (every 50 ms at most while anything changes).

    ``waiting_tokens`` are uncached prompt tokens of waiting requests and what is left of running prefills; a
    prefix that several of them miss counts once.
    ``kv_tokens`` are those that the ``running`` sequences read each step. ``referenced``, ``free`` and
    ``evictable`` count blocks of ``block_size`` tokens out of ``num_blocks``. ``prefill_rate`` is in tokens/s,
    calibrated: not the average under load. ``step_seconds`` is a decode step's time now. ``acknowledged`` is
    the highest attempt of this channel that the engine has seen; later ones are not in ``waiting_tokens`` yet.
    ``waiting`` sequences do not run; ``held_up`` of them a newcomer cannot pass, for want of seats or blocks.
    ``max_running`` sequences can run: 0 if nobody knows.
    """

    waiting_tokens: int
    running: int
    kv_tokens: int
    referenced: int
    free: int
    evictable: int
    num_blocks: int
    block_size: int
    prefill_rate: float
    step_seconds: float
    acknowledged: int
    waiting: int = 0
    held_up: int = 0
    max_running: int = 0


def sane(load: LoadReport) -> LoadReport:
    """The report with what cannot be true made 0 (unknown): a broken header must not break placement."""
    return LoadReport(
        waiting_tokens=int(_known(load.waiting_tokens)),
        running=int(_known(load.running)),
        kv_tokens=int(_known(load.kv_tokens)),
        referenced=int(_known(load.referenced)),
        free=int(_known(load.free)),
        evictable=int(_known(load.evictable)),
        num_blocks=int(_known(load.num_blocks)),
        block_size=int(_known(load.block_size)),
        prefill_rate=_between(load.prefill_rate, 1e-3, 1e12),
        step_seconds=_between(load.step_seconds, 1e-9, 1e4),
        acknowledged=int(_known(load.acknowledged)),
        waiting=int(_known(load.waiting)),
        held_up=int(_known(load.held_up)),
        max_running=int(_known(load.max_running)),
    )


def _known(value: float) -> float:
    return value if 0 <= value <= _LARGEST else 0


def _between(value: float, least: float, most: float) -> float:
    return float(value) if math.isfinite(value) and least <= value <= most else 0.0
