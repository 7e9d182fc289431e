"""What the simulated systems are asked to do: requests with arrival times, prompts and true output lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import islice

from loadtests.arrivals import poisson
from loadtests.experiments.memory.constants import MAX_LENGTH, SIGMA, Lengths

_OWN_TOKENS = 2**40
"""First id of the ranges that belong to single requests: token ids only have to differ."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    ``output`` is the true output length in tokens, which a scheduler must not use. With ``width`` above 1 it
    asks for so many samples.
    """

    name: str
    arrival: float  # seconds
    prompt: tuple[int, ...]
    output: int
    width: int = 1

    @property
    def total(self) -> int:
        """Tokens of one finished sequence."""
        return len(self.prompt) + self.output


def own_tokens(number: int, count: int) -> tuple[int, ...]:
    """``count`` token ids that only request ``number`` uses."""
    start = _OWN_TOKENS + number * 2**20
    return tuple(range(start, start + count))


def draw_lengths(
    lengths: Lengths, count: int, rng: random.Random, longest: int = MAX_LENGTH
) -> list[tuple[int, int]]:
    """Log-normal prompt and output lengths, at least 1 and together at most ``longest``.

    They are scaled until the means, after clipping, are those asked for.
    """
    normal = [(rng.gauss(0.0, SIGMA), rng.gauss(0.0, SIGMA)) for _ in range(count)]
    scale = [lengths.prompt, lengths.output]
    drawn: list[tuple[int, int]] = []
    for _ in range(12):
        drawn = []
        for x, y in normal:
            prompt = min(max(1, round(scale[0] * math.exp(x))), longest - 1)
            drawn.append((prompt, min(max(1, round(scale[1] * math.exp(y))), longest - prompt)))
        scale[0] *= lengths.prompt * count / sum(prompt for prompt, _ in drawn)
        scale[1] *= lengths.output * count / sum(output for _, output in drawn)
    return drawn


def make_jobs(
    lengths: Lengths, rate: float, count: int, seed: int, *, prefix: int = 0, width: int = 1
) -> list[Job]:
    """``count`` requests of a workload at ``rate`` per second; the same for the same seed.

    ``prefix`` tokens before each prompt are the same for all.
    """
    rng = random.Random(seed)
    drawn = draw_lengths(lengths, count, rng, MAX_LENGTH - prefix)
    arrivals = list(islice(poisson(rate, math.inf, rng), count))
    common = tuple(range(1, prefix + 1))
    jobs = []
    for number, ((prompt, output), arrival) in enumerate(zip(drawn, arrivals, strict=True)):
        tokens = common + own_tokens(number, prompt)
        jobs.append(Job(f"job-{number}", arrival, tokens, output, width))
    return jobs
