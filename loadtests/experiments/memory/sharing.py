"""How many blocks sharing saves, next to how many it could save at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from engine.scheduling.step import StepPlan
from loadtests.experiments.memory.jobs import Job


def perfect_blocks(prompt: int, covered: Sequence[int], block_size: int) -> int:
    """Fewest blocks for sequences that have only their first ``prompt`` tokens in common.

    ``covered`` are the tokens that each has in memory. A full block of common tokens is needed once; a block
    that holds a token of one sequence alone belongs to it.
    """
    common = [min(tokens, prompt) // block_size for tokens in covered]
    own = sum(-(-tokens // block_size) - shared for tokens, shared in zip(covered, common, strict=True))
    return max(common, default=0) + own


@dataclass(slots=True)
class SharingMeter:
    """Compares the blocks in use with those that the running sequences would need without and with sharing.

    Averages over time.
    """

    jobs: dict[str, Job]
    block_size: int
    prefix: int = 0  # tokens that the prompts of all jobs begin with
    steps: int = 0
    _used: float = 0.0
    _unshared: float = 0.0
    _perfect: float = 0.0

    @property
    def saved(self) -> float:
        """Percent of the blocks without sharing that were not used."""
        return 100 * (1 - self._used / self._unshared)

    @property
    def possible(self) -> float:
        """Percent that perfect sharing of blocks would have saved."""
        return 100 * (1 - self._perfect / self._unshared)

    def step(self, plan: StepPlan, seconds: float, used: int) -> None:
        """Account for a planned step while ``used`` blocks are referenced."""
        covered: dict[str, list[int]] = {}
        for chunk in plan.chunks:
            covered.setdefault(chunk.sequence.request_id, []).append(chunk.start + chunk.length)
        everything, size = list(chain.from_iterable(covered.values())), self.block_size
        if self.prefix:
            perfect = perfect_blocks(self.prefix, everything, size)
        else:
            perfect = sum(perfect_blocks(len(self.jobs[n].prompt), made, size) for n, made in covered.items())
        self.steps += 1
        self._used += seconds * used
        self._perfect += seconds * perfect
        self._unshared += seconds * sum(-(-tokens // size) for tokens in everything)
