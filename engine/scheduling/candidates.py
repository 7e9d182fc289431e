"""Several tokens chosen from one row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from engine.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens from one row of logits, with the log probabilities that the model gave them.

    The draws of a group's first step, one for each sequence; one draw, where sequences are ranked; or the
    likeliest tokens of a beam, best first. None where every token is forbidden. ``details`` has what the
    request wants to know of each token, if it asks for log probabilities.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    details: tuple[TokenLogprobs, ...] = ()


Choice = int | Candidates
"""What is chosen from one row of logits."""

Outcome = int | Candidates | tuple[int | Candidates, ...]
"""What comes of a chunk that samples: a choice, or with drafts those of its rows whose tokens are all right."""
