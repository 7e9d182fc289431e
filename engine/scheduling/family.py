"""The sequences of one request that asked for more than one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduling.beam import BeamSearch

if TYPE_CHECKING:
    from engine.scheduling.request_table import Entry


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence of a ranked family; ``score`` decides its rank, higher is better."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


@dataclass(slots=True, eq=False)
class Family:
    """One request's live sequences, by number, and what has been kept back of finished ones.

    ``search`` is set for beam search. ``spread`` says that the prompt's first tokens have been drawn, so that
    all sequences exist.
    """

    request_id: str
    params: SamplingParams
    search: BeamSearch | None
    seed: int = 0  # the request's; each further sequence draws with one of its own
    members: dict[int, Entry] = field(default_factory=dict)
    finished: list[Hypothesis] = field(default_factory=list)
    spread: bool = False
    next_sequence: int = 1  # numbers are never used twice

    def best(self) -> list[Hypothesis]:
        """The ``n`` finished sequences with the highest scores, best first; equal scores keep their order."""
        return sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.params.n]


def needs_family(request: Request) -> bool:
    """Whether a request asks for more than one sequence, or for a search over several."""
    return request.params.width > 1 or request.params.use_beam_search
