"""What a simulated run is measured by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from loadtests.experiments.memory.constants import POOL_SLOTS


class Split(NamedTuple):
    """Slots of the KV memory."""

    tokens: float  # hold a token's K and V
    reserved: float  # will hold one of the request that they belong to
    internal: float  # belong to a request that will never use them
    external: float  # belong to nobody who could use them: rounding, and free runs that are too short

    def percent(self) -> tuple[float, ...]:
        """The four parts, in percent of their sum."""
        return tuple(100 * part / sum(self) for part in self)


@dataclass(frozen=True, slots=True)
class Result:
    """Averages over a run; those of memory and batch are over the time in which requests waited.

    ``token_share`` is tokens over allocated slots, in percent.
    """

    split: Split
    batch: float
    token_share: float
    throughput: float  # requests per second while requests waited
    seconds: float  # simulated, until the last request ended
    steps: int
    preemptions: int = 0


@dataclass(slots=True)
class Meter:
    """Collects a :class:`Result` step by step.

    Averages of memory and batch begin when ``warm_up`` requests have ended and cover the steps in which
    requests wait (the system is saturated), or all steps if ``saturated`` is false.
    """

    warm_up: int = 0
    saturated: bool = False
    slots: int = POOL_SLOTS
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # seconds, then seconds times each part
    _ended: int = 0
    _ended_in_window: int = 0
    _open: bool = False
    _steps: int = 0

    def step(
        self, seconds: float, *, tokens: int, reserved: int, internal: int, batch: int, waiting: bool
    ) -> None:
        """Account for one step in which ``batch`` requests ran; memory in slots."""
        self._steps += 1
        self._open = self._ended >= self.warm_up and (waiting or not self.saturated)
        if self._open:
            parts = (1, tokens, reserved, internal, batch)
            self._sums = [total + seconds * part for total, part in zip(self._sums, parts, strict=True)]

    def end(self) -> None:
        self._ended += 1
        self._ended_in_window += self._open

    def result(self, now: float, preemptions: int = 0) -> Result:
        """The averages of a run that took ``now`` seconds.

        Raises:
            ValueError: no step was measured.
        """
        time = self._sums[0]
        if not time:
            raise ValueError(f"no request ever waited after the first {self.warm_up} had ended")
        tokens, reserved, internal, batch = (total / time for total in self._sums[1:])
        allocated = tokens + reserved + internal
        return Result(
            Split(tokens, reserved, internal, self.slots - allocated),
            batch=batch,
            token_share=100 * tokens / allocated,
            throughput=self._ended_in_window / time,
            seconds=now,
            steps=self._steps,
            preemptions=preemptions,
        )
