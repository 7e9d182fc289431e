from __future__ import annotations

import itertools
import random
import statistics

import pytest

from loadtests.experiments.memory.constants import ALPACA, SHAREGPT, SIGMA
from loadtests.experiments.memory.jobs import draw_lengths, make_jobs


@pytest.mark.parametrize("lengths", [SHAREGPT, ALPACA])
def test_lengths_have_their_means_and_their_limit(lengths) -> None:
    drawn = draw_lengths(lengths, 5_000, random.Random(0))
    assert statistics.fmean(prompt for prompt, _ in drawn) == pytest.approx(lengths.prompt, rel=0.002)
    assert statistics.fmean(output for _, output in drawn) == pytest.approx(lengths.output, rel=0.002)
    assert all(prompt >= 1 and output >= 1 and prompt + output <= 2_048 for prompt, output in drawn)


def test_lengths_spread_as_stated() -> None:
    drawn = draw_lengths(SHAREGPT, 5_000, random.Random(0))
    deciles = statistics.quantiles([output for _, output in drawn], n=10)
    assert deciles[8] / deciles[4] == pytest.approx(2.718281828 ** (1.2816 * SIGMA), rel=0.05)


def test_arrivals_come_at_their_rate() -> None:
    times = [job.arrival for job in make_jobs(ALPACA, 4.0, 4_000, 0)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_jobs_are_the_same_for_the_same_seed_and_share_only_the_prefix() -> None:
    jobs = make_jobs(ALPACA, 1.0, 20, 7, prefix=80)
    assert jobs == make_jobs(ALPACA, 1.0, 20, 7, prefix=80)
    assert jobs != make_jobs(ALPACA, 1.0, 20, 8, prefix=80)
    assert {job.prompt[:80] for job in jobs} == {tuple(range(1, 81))}
    own = [token for job in jobs for token in job.prompt[80:]]
    assert len(set(own)) == len(own)
