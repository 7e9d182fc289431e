"""What an engine reports of its load: one section of a frame.

``LoadReport`` lists the fields once: their layout on the wire, their plausible values and their averages follow
from their names and types. Adding a field to ``EngineLoad`` adds it everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from struct import Struct
from typing import Any, Final, get_type_hints

from engine.scheduling.load_report import EngineLoad

MUCH_TOKENS = 512

PREFILL_RATE = 5000.0
"""Tokens/s of a replica of which nothing is known, in a fleet of which nothing is known."""


@dataclass(frozen=True, slots=True)
class LoadReport(EngineLoad):
    """Engine truth at one flush (every 50 ms at most while anything changes).

    Beside the engine's own figures: its pool has ``num_blocks`` blocks of ``block_size`` tokens, and
    ``acknowledged`` is the highest attempt of this channel that the engine has seen; later ones are not in
    ``waiting_tokens`` yet. ``stalled_s`` is for how long the engine has had work and made no progress.
    ``suspects``, 0 or 1, are requests there that may have killed another engine, of any ingress. 0 is
    unknown in ``num_blocks``, ``block_size``, ``max_running`` and the engine's own floats.
    """

    num_blocks: int
    block_size: int
    acknowledged: int
    stalled_s: float = 0.0
    suspects: int = 0

    def differs_much(self, other: LoadReport) -> bool:
        """Whether routing should know at once that ``other`` is out of date."""
        return (
            self.acknowledged != other.acknowledged
            or self.suspects != other.suspects
            or (self.waiting == 0) is not (other.waiting == 0)
            or (self.running == 0) is not (other.running == 0)
            or abs(self.waiting_tokens - other.waiting_tokens) > max(MUCH_TOKENS, other.waiting_tokens // 4)
            or abs(self.free + self.evictable - other.free - other.evictable) > other.num_blocks // 16
        )


_NAMES: Final = tuple(field.name for field in fields(LoadReport))
_FLOATS: Final = frozenset(name for name, kind in get_type_hints(LoadReport).items() if kind is float)
_values = attrgetter(*_NAMES)
_LARGEST: Final = float(2**53)
_PLAUSIBLE: Final = {"prefill_rate": (1e-3, 1e12), "step_seconds": (1e-9, 1e4)}
"""Least and greatest value; of other fields 0 and 2**53."""

WIRE: Final = Struct("<" + "".join("d" if name in _FLOATS else "Q" for name in _NAMES))
"""The fields in their order: f64 where they are floats, else u64."""


def pack(load: LoadReport) -> bytes:
    """The report as it travels."""
    return WIRE.pack(*_values(load))


def unpack_from(data: bytes, offset: int) -> LoadReport:
    """The report that was packed at ``offset``.

    Raises:
        struct.error: it is truncated.
    """
    return LoadReport(*WIRE.unpack_from(data, offset))


def sane(load: LoadReport) -> LoadReport:
    """The report with what cannot be true made 0 (unknown): a broken report must not break routing."""
    known: dict[str, Any] = {name: _plausible(name, getattr(load, name)) for name in _NAMES}
    return LoadReport(**known)


def average(loads: Sequence[LoadReport]) -> LoadReport:
    """What to expect of a replica that has not said; of an unknown fleet, an empty one without limits.

    The prefill rate is the median of those that are known.
    """
    rates = sorted(load.prefill_rate for load in loads if load.prefill_rate)
    rate = rates[len(rates) // 2] if rates else PREFILL_RATE
    means: dict[str, Any] = {name: _mean(name, (getattr(load, name) for load in loads)) for name in _NAMES}
    return replace(LoadReport(**means), prefill_rate=rate)


def _mean(name: str, values: Iterable[float]) -> float:
    known = list(values)
    mean = math.fsum(known) / len(known) if known else 0.0
    return mean if name in _FLOATS else int(mean)


def _plausible(name: str, value: float) -> float:
    least, most = _PLAUSIBLE.get(name, (0.0, _LARGEST))
    if not least <= value <= most:
        return 0.0 if name in _FLOATS else 0
    return float(value) if name in _FLOATS else int(value)
