"""What becomes of a sampled token: it is added to its sequence, and ends it if it was the last one."""

from __future__ import annotations

from engine.request import FinishReason, TokenDelta
from engine.scheduling.latency_stats import LatencyStats, stats_of
from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.workload_stats import WorkloadStats
from engine.token_logprobs import TokenLogprobs


class Outcomes:
    """Adds tokens to sequences and ends sequences, for single ones and for those of groups alike."""

    def __init__(self, state: SchedulerState, workload: WorkloadStats, latency: LatencyStats) -> None:
        self._state = state
        self._workload = workload
        self._latency = latency
        self.generated_tokens = 0  # but those of beam search

    def append(
        self, sequence: Sequence, token: int, logprob: float, detail: TokenLogprobs | None = None
    ) -> TokenDelta | None:
        """Add a token, and end the sequence if that was its last one.

        ``None`` if the client sees nothing of it yet, as of a ranked sequence that goes on.
        """
        index = sequence.num_generated
        if sequence.params.max_tokens == 0:  # its prompt was all that was asked for
            return self.finish(sequence, FinishReason.LENGTH, index)
        sequence.token_ids.append(token)
        sequence.logprob += logprob
        self.generated_tokens += 1
        reason = _finish_reason(sequence, token)
        logprobs = None if detail is None else (detail,)
        if sequence.params.ranked and detail is not None:
            sequence.logprobs.append(detail)
        if reason is not None:
            delta = self.finish(sequence, reason, index, (token,))
            delta.logprobs = logprobs
            return delta
        if sequence.params.ranked:
            return None
        cached, number = sequence.cached_tokens or 0, sequence.number
        return TokenDelta(sequence.request_id, index, (token,), None, cached, None, number, logprobs=logprobs)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        index: int | None = None,
        tokens: tuple[int, ...] = (),
        error: str | None = None,
    ) -> TokenDelta:
        """End a sequence in any state; its last ``tokens`` begin at ``index`` of its output."""
        if index is None:  # of ranked sequences the client has seen nothing
            index = 0 if sequence.params.ranked else sequence.num_generated
        self._state.finish(sequence, reason)
        self._workload.ended(sequence, reason)
        self._latency.ended(sequence, reason)
        return TokenDelta(
            sequence.request_id,
            index,
            tokens,
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
            error=error,
            sequence=sequence.number,
            final=True,
            stats=stats_of(sequence),
        )


def _finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    if token in sequence.end_token_ids and sequence.num_generated > sequence.params.min_tokens:
        return FinishReason.STOP
    if sequence.grammar is not None and token in sequence.grammar.end_token_ids:  # it fits nothing after it
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_total_tokens else None
