"""How many blocks sharing saves, next to how many it could save at most."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

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


def perfect_beam_blocks(
    prompt: int, parents: Sequence[Sequence[int]], steps: int, block_size: int
) -> list[int]:
    """Fewest blocks for the beams of one search, after each of its steps.

    Two beams can share a block if it is full and both went on from the beam that filled it. Element ``t`` is
    for ``t`` tokens of output in memory: element 0 is the prompt alone. ``parents`` is used again from its
    start where it is shorter than ``steps``.
    """
    fresh = itertools.count()
    common = prompt // block_size  # full blocks that all beams share
    tails: list[tuple[int, ...]] = [(next(fresh),) if prompt % block_size else ()]
    counts = [common + len(tails[0])]
    for step in range(steps):
        opens_block = (prompt + step) % block_size == 0
        origin = parents[step % len(parents)] if step else (0,) * len(parents[0])
        # a block that a beam writes to is no other beam's, whatever it held before
        tails = [(*(tails[beam] if opens_block else tails[beam][:-1]), next(fresh)) for beam in origin]
        while len(tails[0]) > 1 and all(tail[0] == tails[0][0] for tail in tails):
            common += 1
            tails = [tail[1:] for tail in tails]
        counts.append(common + len({block for tail in tails for block in tail}))
    return counts


@dataclass(slots=True)
class SharingMeter:
    """Compares the blocks in use with those that the running sequences would need without and with sharing.

    Averages over time. Steps in which a search has not all of its beams in memory are left out (``skipped``).
    """

    jobs: dict[str, Job]
    block_size: int
    prefix: int = 0  # tokens that the prompts of all jobs begin with
    skipped: int = 0
    steps: int = 0
    _used: float = 0.0
    _unshared: float = 0.0
    _perfect: float = 0.0
    _beams: dict[str, list[int]] = field(default_factory=dict)

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
        perfect = self._prefix_blocks(covered) if self.prefix else 0
        for name, tokens in covered.items():
            job = self.jobs[name]
            if job.parents is not None:
                blocks = self._beam_blocks(job, tokens)
                if blocks is None:
                    self.skipped += 1
                    return
                perfect += blocks
            elif not self.prefix:
                perfect += perfect_blocks(len(job.prompt), tokens, self.block_size)
        self.steps += 1
        self._used += seconds * used
        self._perfect += seconds * perfect
        self._unshared += seconds * sum(
            -(-tokens // self.block_size) for group in covered.values() for tokens in group
        )

    def _prefix_blocks(self, covered: dict[str, list[int]]) -> int:
        return perfect_blocks(
            self.prefix, [tokens for group in covered.values() for tokens in group], self.block_size
        )

    def _beam_blocks(self, job: Job, covered: list[int]) -> int | None:
        prompt = len(job.prompt)
        if covered[0] <= prompt and len(covered) == 1:
            return -(-covered[0] // self.block_size)
        if len(covered) != job.width or len(set(covered)) != 1:
            return None
        if job.name not in self._beams:
            assert job.parents is not None
            self._beams[job.name] = perfect_beam_blocks(prompt, job.parents, job.output, self.block_size)
        return self._beams[job.name][covered[0] - prompt]
