"""What to do with the KV of a request that loses its blocks."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from engine.request import Request


class Recovery(enum.Enum):
    """How a preempted request gets its KV back."""

    RECOMPUTE = "recompute"  # run its tokens again; what survives in the prefix cache is found there


class RecoveryPolicy(ABC):
    """Chooses a recovery when the scheduler preempts."""

    @abstractmethod
    def choose(self, request: Request) -> Recovery:
        """Return how ``request`` shall recover; called while it still holds its blocks."""


class RecomputeRecovery(RecoveryPolicy):
    """Drops the blocks and computes them again when there is room."""

    def choose(self, request: Request) -> Recovery:
        """Return :attr:`Recovery.RECOMPUTE`."""
        return Recovery.RECOMPUTE
