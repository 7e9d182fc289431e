"""Log probabilities of one place in a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the token at one place and of the likeliest there, best first, ties by lower id.

    All are of the model's raw logits. ``rank`` is 1 for the likeliest token; equal ones share a rank.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
