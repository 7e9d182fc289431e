"""The request on this engine that may have killed another one, whichever ingress sent it."""

from __future__ import annotations

from app.channel.engine_channel import Attempt
from engine.errors import QuireError

NEWS_S = 0.2
"""A suspect starts this long after the other ingresses have been told, so that none blames its own requests."""


class OccupiedError(QuireError):
    """Another suspect runs here."""


class SuspectPlace:
    """Lets at most one suspect run on an engine: two would both be blamed. See ``app/fleet/faults.py``."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._proof_tokens = 0

    @property
    def count(self) -> int:
        """Suspects that run here: 1 until it has ended or has made the tokens that clear it."""
        attempt = self._attempt
        if attempt is not None and (attempt.done.done() or attempt.generated >= self._proof_tokens):
            self._attempt = None
        return int(self._attempt is not None)

    def take(self, attempt: Attempt, proof_tokens: int) -> None:
        """Start a suspect, which ``proof_tokens`` clear.

        Raises:
            OccupiedError: another one runs.
        """
        if self.count:
            raise OccupiedError("another request runs there that may have killed an engine")
        self._attempt, self._proof_tokens = attempt, proof_tokens
