"""Log probabilities of a prompt's tokens, gathered while it is computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.token_logprobs import TokenLogprobs


class PromptLogprobs:
    """Log probabilities of a prompt's tokens from the second on; entry ``i`` is from the logits at ``i``.

    A chunk may be computed again, by a step that is repeated or after a preemption.
    """

    __slots__ = ("entries", "top", "wanted")

    def __init__(self, prompt_tokens: int, top: int) -> None:
        self.wanted = prompt_tokens - 1
        self.top = top
        self.entries: list[TokenLogprobs] = []

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return len(self.entries) == self.wanted

    def rows(self, start: int, length: int) -> range:
        """The positions of a chunk ``start:start + length`` whose logits are wanted."""
        return range(max(start, len(self.entries)), min(start + length, self.wanted))

    def put(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Add what comes from the positions from ``start`` on; they follow those that are there."""
        if start != len(self.entries):
            raise ValueError(f"log probabilities from {start} on do not follow the first {len(self.entries)}")
        self.entries += entries
