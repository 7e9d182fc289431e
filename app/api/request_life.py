"""One request as the live page shows it: where it waited, which engine ran it, and why. No text."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from app.api.request_record import RequestRecord
from app.fleet.journal import AttemptNotes, Journal
from app.routing.cost import TERMS

MAX_PROMPTS, MAX_ATTEMPTS = 8, 16
"""Prompts of a request, and attempts of a prompt, that an answer has at most: the first ones."""


def life_of(record: RequestRecord, ingress: str) -> dict[str, Any]:
    """Plain data; times are seconds since the request's arrival, ``None`` until then."""
    now = time.monotonic()
    began = record.started
    since = partial(_since, record.started)
    attempts = [
        _attempt(prompt, number, attempt, journal, began)
        for prompt, journal in enumerate(record.journals[:MAX_PROMPTS])
        for number, attempt in enumerate(journal.attempts[:MAX_ATTEMPTS], 1)
    ]
    live = record.ended is None
    return {
        "request_id": record.request_id,
        "ingress": ingress,
        "model": record.model,
        "route": record.route,
        "stream": record.stream,
        "state": _state(record) if live else "ended",
        "outcome": None if live else record.outcome,
        "status": None if live else record.status,
        "finish": sorted(set(record.finish_reasons)),
        "trace_id": record.trace_id,
        "prompts": len(record.journals),
        "prompt_tokens": record.usage.prompt_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "output_tokens": record.usage.completion_tokens,
        "arrived": round(record.arrived, 3),
        "first_token_s": since(record.first_token),
        "last_token_s": since(record.last_token or None),
        "total_s": since(record.ended or now),
        "moves": sum(journal.moves for journal in record.journals),
        "retries": sum(journal.retries for journal in record.journals),
        "attempts": attempts,
    }


def _since(began: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - began, 4)


def _state(record: RequestRecord) -> str:
    if record.first_token is not None:
        return "decode"
    attempts = [attempt for journal in record.journals for attempt in journal.attempts]
    if not attempts:
        return "arrived"
    return "queue or prefill" if any(attempt.placed is not None for attempt in attempts) else "routing"


def _attempt(prompt: int, number: int, attempt: AttemptNotes, journal: Journal, began: float) -> dict[str, Any]:
    since = partial(_since, began)
    # As in the trace: the engine's queue begins with the request, or, if it moved, with the attempt.
    queued = attempt.began if attempt.tokens_before else journal.arrived
    first_step = None if attempt.queue_s is None else queued + attempt.queue_s
    prefilled = None if first_step is None or attempt.prefill_s is None else first_step + attempt.prefill_s
    return {
        "prompt": prompt,
        "number": number,
        "replica": attempt.replica,
        "began_s": since(attempt.began),
        "queued_s": since(queued),
        "placed_s": since(attempt.placed),
        "first_step_s": since(first_step),
        "prefilled_s": since(prefilled),
        "first_token_s": since(attempt.first_token),
        "ended_s": since(attempt.ended),
        "reason": attempt.reason,
        "predicted_tokens": attempt.predicted_tokens,
        "tokens_before": attempt.tokens_before,
        "preemptions": attempt.preemptions,
        "ended_early": attempt.failure or ("moved" if attempt.planned else ""),
        "compared": [
            {
                "replica": one.replica,
                "cached_tokens": one.cached_tokens,
                "terms": {name: round(value, 5) for name, value in zip(TERMS, one.terms, strict=True)},
            }
            for one in attempt.compared
        ],
    }
