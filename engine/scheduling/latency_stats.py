"""How long requests wait, compute their prompts and decode on this engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.histogram import Histogram
from engine.request import FinishReason, RequestStats, TokenDelta
from engine.scheduling.sequence import Sequence, SequenceState

LATENCY_BOUNDS = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0),
)
"""Of histograms of seconds."""

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class LatencyStats:
    """Belongs to one scheduler; costs nothing for a token that is not a sequence's first or last.

    Each request counts once, however many sequences it has, and again on a replica to which it moves.
    ``queue`` is from its arrival to its first step (if it moved, from its arrival here), ``prefill`` from there
    to its first token, ``decode`` from there to its last; what clients or errors cut short has no ``decode``.
    ``clock`` is in monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.queue = Histogram(LATENCY_BOUNDS)
        self.prefill = Histogram(LATENCY_BOUNDS)
        self.decode = Histogram(LATENCY_BOUNDS)
        self._clock = clock
        self._prefilling: list[Sequence] = []  # have run and have no token yet

    def admitted(self, sequences: Iterable[Sequence]) -> None:
        """Sequences run for the first time."""
        now = self._clock()
        for sequence in sequences:
            if sequence.number == 0:
                sequence.admitted_at = now
                self.queue.add(max(now - sequence.queued_at, 0.0))
                self._prefilling.append(sequence)

    def committed(self, deltas: Iterable[TokenDelta]) -> None:
        """A step that made ``deltas`` has been accounted for; first tokens get the times so far."""
        if not self._prefilling:
            return
        now = self._clock()
        waiting = []
        begun: dict[str, RequestStats] = {}
        for sequence in self._prefilling:
            if sequence.num_output_tokens:
                sequence.first_token_at = now
                begun[sequence.request_id] = stats = stats_of(sequence)
                if sequence.group is not None:
                    sequence.group.stats = stats
                self.prefill.add(max(now - sequence.admitted_at, 0.0))
                if sequence.finish_reason in _WHOLE:
                    self.decode.add(0.0)
            elif sequence.state is not SequenceState.FINISHED:
                waiting.append(sequence)
        self._prefilling = waiting
        if begun:
            for delta in deltas:
                if delta.sequence == 0 and delta.request_id in begun:
                    generated = 0 if delta.stats is None else delta.stats.generated
                    delta.stats = begun[delta.request_id]._replace(generated=generated)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended."""
        if sequence.first_token_at and reason in _WHOLE:
            self.decode.add(max(self._clock() - sequence.first_token_at, 0.0))


def stats_of(sequence: Sequence) -> RequestStats:
    """What is known of a sequence so far; see ``RequestStats``."""
    queue_s = prefill_s = None
    if sequence.number == 0 and sequence.admitted_at:
        queue_s = max(sequence.admitted_at - sequence.queued_at, 0.0)
        if sequence.first_token_at:
            prefill_s = max(sequence.first_token_at - sequence.admitted_at, 0.0)
    return RequestStats(queue_s, prefill_s, sequence.num_preemptions)
