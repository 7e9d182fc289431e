"""The limits for requests: those of all replicas, which may differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.errors import InvalidRequestError
from engine.request import ModelLimits, validate
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Different limits, at least one, those of the largest pool first."""

    each: tuple[ModelLimits, ...]

    @property
    def max_model_len(self) -> int:
        """The longest context of any replica, in tokens."""
        return max(limits.max_model_len for limits in self.each)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that some replica can run, in tokens."""
        return max(limits.max_tokens for limits in self.each)

    @property
    def pool_tokens(self) -> list[int]:
        """The different sizes of the replicas' KV pools in tokens, the largest first."""
        return sorted({limits.pool_tokens for limits in self.each}, reverse=True)

    def longest_prompt(self, output: int) -> int:
        """The longest prompt that some replica can run with ``output`` more tokens."""
        return max(limits.longest_prompt(output) for limits in self.each)

    def validate(self, token_ids: list[int], params: SamplingParams) -> int:
        """Check that some replica can run a request; return the longest length it may reach, in tokens.

        Raises:
            InvalidRequestError: none can; it names the limits of the replica with the largest pool.
        """
        first: InvalidRequestError | None = None
        for limits in self.each:
            try:
                return validate(token_ids, params, limits)
            except InvalidRequestError as error:
                first = first or error
        assert first is not None, "there are limits"
        raise first


class LimitsRecord:
    """The limits of known replicas, and for ``expected_s`` of those that died: others will replace them.

    When no replica is left, the last limits stay. ``clock`` is in monotonic seconds.
    """

    def __init__(self, expected_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected_s = expected_s
        self._clock = clock
        self._limits: dict[str, ModelLimits] = {}
        self._dead: dict[str, float] = {}  # when each died
        self._last: FleetLimits | None = None
        self._changed = False

    def opened(self, replica: str, limits: ModelLimits) -> None:
        """A replica has named its limits."""
        self._limits[replica] = limits
        self._dead.pop(replica, None)
        self._changed = True

    def died(self, replica: str) -> None:
        """A replica was lost without having been told to stop."""
        if replica in self._limits:
            self._dead[replica] = self._clock()

    def keep(self, replicas: Collection[str]) -> None:
        """These are known; all others have stopped or died."""
        for replica in self._limits.keys() - replicas - self._dead.keys():
            del self._limits[replica]
            self._changed = True

    def current(self) -> FleetLimits | None:
        """The limits now; ``None`` until a replica has named its own."""
        for replica, died in list(self._dead.items()):
            if self._clock() - died > self.expected_s:
                del self._dead[replica], self._limits[replica]
                self._changed = True
        if self._changed and self._limits:
            different = set(self._limits.values())
            self._last = FleetLimits(
                tuple(sorted(different, key=lambda limits: (-limits.max_tokens, -limits.num_blocks)))
            )
            self._changed = False
        return self._last
