"""Several tokens chosen from one row of logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens from one row of logits, with the log probabilities that the model gave them.

    The draws of a group's first step, one for each sequence; one draw, where sequences are ranked; or the
    likeliest tokens of a beam, best first.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
