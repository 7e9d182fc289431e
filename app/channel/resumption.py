"""Attempts that continue on another channel of the same ingress, from the tokens that have arrived there."""

from __future__ import annotations

from collections.abc import Iterable

from app.channel import wire
from app.channel.engine_channel import EngineChannel
from app.channel.wire_resume import AttemptClaim
from engine.request import FinishReason


def carry_over(ended: EngineChannel, channel: EngineChannel, claims: Iterable[AttemptClaim]) -> list[int]:
    """Move the claimed attempts of a channel that has ended, with their tokens that have not arrived yet.

    Returns the attempts that continue, or that only have their last tokens to send. The other claimed attempts
    have lost records. What ``ended`` still has afterwards is not needed.
    """
    kept = _unacknowledged(ended)
    resumed = []
    for claim in claims:
        attempt, records = ended.attempts.get(claim.attempt), kept.get(claim.attempt, [])
        missing = _missing(records, claim)
        if missing is None or (attempt is None and not any(record.final for record in missing)):
            continue
        if attempt is not None:
            del ended.attempts[claim.attempt]
            attempt.channel = channel
            channel.attempts[claim.attempt] = attempt
        for record in missing:
            channel.add(record)
        resumed.append(claim.attempt)
    return resumed


def _unacknowledged(channel: EngineChannel) -> dict[int, list[wire.Record]]:
    """The records of each attempt that may not have arrived, in their order."""
    kept: dict[int, list[wire.Record]] = {}
    for _, frame in channel.sent:
        for record in wire.unpack_frame(frame).records:
            kept.setdefault(record.attempt, []).append(record)
    for number, sequences in channel.unsent.items():
        kept.setdefault(number, []).extend(sequences.values())
    return kept


def _missing(records: Iterable[wire.Record], claim: AttemptClaim) -> list[wire.Record] | None:
    """The part of ``records`` that has not arrived; ``None`` if it leaves a gap, or was aborted."""
    arrived = list(claim.received)
    missing = []
    for record in records:
        if record.end is FinishReason.ABORT:
            return None
        if record.end is FinishReason.ERROR:
            return [record]
        have = arrived[record.sequence] if record.sequence < len(arrived) else None
        if have is None:
            if record.final:  # of a sequence that the client's text has ended
                _cut(record, len(record.token_ids))
                missing.append(record)
            continue
        if record.index > have:
            return None
        end = record.index + len(record.token_ids)
        if end > have or record.end is not None or (record.prompt_logprobs is not None and end == have):
            _cut(record, have - record.index)
            missing.append(record)
            arrived[record.sequence] = None if record.end is not None else end
    return missing


def _cut(record: wire.Record, tokens: int) -> None:
    """Remove the first ``tokens``, which have arrived, and the data that came with them."""
    if tokens:
        record.token_ids, record.index = record.token_ids[tokens:], record.index + tokens
        record.logprobs = None if record.logprobs is None else record.logprobs[tokens:]
        record.prompt_logprobs = None
