"""Perfect sharing worked out by hand and by brute force, and what the scheduler reaches of it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from loadtests.experiments.memory.constants import ALPACA, WIDTHS
from loadtests.experiments.memory.jobs import Job, Parents, load_parents, make_jobs, own_tokens
from loadtests.experiments.memory.measure import Meter
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.memory.sharing import SharingMeter, perfect_beam_blocks, perfect_blocks
from loadtests.experiments.simulated_replica import SimulatedReplica


def random_parents(width: int, steps: int, seed: int) -> Parents:
    rng = random.Random(seed)
    return tuple(tuple(min(width - 1, int(rng.expovariate(1.0))) for _ in range(width)) for _ in range(steps))


def brute_force(prompt: int, parents: Parents, steps: int, block_size: int) -> list[int]:
    """Different contents of the beams' blocks: a block is named by all tokens up to its end."""
    fresh = itertools.count(prompt)
    beams = [tuple(range(prompt))]
    counts = [-(-prompt // block_size)]
    for step in range(steps):
        origin = parents[step % len(parents)] if step else (0,) * len(parents[0])
        beams = [(*beams[parent], next(fresh)) for parent in origin]
        counts.append(
            len({beam[: end + block_size] for beam in beams for end in range(0, len(beam), block_size)})
        )
    return counts


def test_blocks_of_samples_by_hand() -> None:
    # a prompt of 10 tokens: 2 full blocks of 4 in common; each sequence has its own third, and fourth
    assert perfect_blocks(10, [10], 4) == 3
    assert perfect_blocks(10, [12, 12], 4) == 2 + 1 + 1
    assert perfect_blocks(10, [13, 13, 12], 4) == 2 + 2 + 2 + 1
    assert perfect_blocks(10, [6, 13], 4) == 2 + 1 + 2  # the first has the second block in part only
    assert perfect_blocks(3, [5, 5], 4) == 4
    assert perfect_blocks(8, [], 4) == 0


def test_blocks_of_beams_by_hand() -> None:
    # 3 tokens of prompt, blocks of 2. Both beams always go on from the first one.
    # The prompt fills block 0 and half of block 1. After 1 token each beam has its own block 1; after 2 both
    # have beam 0's and a block 2 each; the third fills those; after 4 both have beam 0's and a block 3 each.
    assert perfect_beam_blocks(3, [(0, 0)], 4, 2) == [2, 3, 4, 4, 5]
    # Beams that stay apart share the prompt's full block only.
    assert perfect_beam_blocks(3, [(0, 1)], 4, 2) == [2, 3, 5, 5, 7]
    assert perfect_beam_blocks(4, [(0, 1)], 1, 2) == [2, 4]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
def test_blocks_of_beams_by_brute_force(width: int, block_size: int) -> None:
    for seed, prompt in enumerate((1, 7, 14, 32)):
        parents = random_parents(width, 40, seed)
        found = perfect_beam_blocks(prompt, parents, 60, block_size)
        assert found == brute_force(prompt, parents, 60, block_size)


def shared(jobs: list[Job], block_size: int = 16, prefix: int = 0) -> SharingMeter:
    meter = SharingMeter({job.name: job for job in jobs}, block_size, prefix)
    replica = SimulatedReplica(paged_config(block_size=block_size))
    result = simulate_paged(jobs, replica, Meter(), meter)
    assert result.preemptions == 0
    assert meter.skipped == 0
    replica.check()
    assert replica.scheduler.stats().referenced_blocks == 0
    return meter


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("width", [2, 6])
def test_samples_share_all_they_can(width: int, block_size: int) -> None:
    meter = shared(make_jobs(ALPACA, 2.0, 30, 5, width=width), block_size)
    assert meter.possible > 4
    assert meter.saved == pytest.approx(meter.possible, rel=0.01)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("width", [2, 6])
def test_beams_share_all_they_can(width: int, block_size: int) -> None:
    parents = [random_parents(width, 30, seed) for seed in range(3)]
    meter = shared(make_jobs(ALPACA, 2.0, 20, 5, width=width, parents=parents), block_size)
    assert meter.possible > 30
    assert meter.saved == pytest.approx(meter.possible, rel=0.01)


def test_beams_go_on_as_recorded() -> None:
    # If the search did not follow the record, the blocks in use could not be those of the record.
    job = Job("a", 0.0, own_tokens(0, 20), 50, 4, random_parents(4, 50, 1))
    other = Job("a", 0.0, job.prompt, 50, 4, ((0, 1, 2, 3),))
    follows = SharingMeter({"a": job}, 4)
    compared = SharingMeter({"a": other}, 4)
    replica = SimulatedReplica(paged_config(block_size=4))
    for meter in (follows, compared):
        simulate_paged([job], replica, Meter(), meter)
    assert follows.saved == pytest.approx(follows.possible)
    assert compared.saved > compared.possible + 10


def test_prefixes_are_shared_whole() -> None:
    meter = shared(make_jobs(ALPACA, 10.0, 50, 5, prefix=83), prefix=83)
    assert meter.possible > 30
    assert meter.saved == pytest.approx(meter.possible, rel=0.01)


def test_recorded_parents_are_read_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "beams.json"
    path.write_text('{"parents": {"2": ["0001", "1100"]}}')
    assert load_parents(2, path) == [((0, 0), (0, 1)), ((1, 1), (0, 0))]
    with pytest.raises(ValueError, match=r"no search with 3 beams"):
        load_parents(3, path)


@pytest.mark.parametrize("record", ["", "010", "02"])
def test_damaged_records_are_named(tmp_path: Path, record: str) -> None:
    path = tmp_path / "beams.json"
    path.write_text(f'{{"parents": {{"2": ["0101", "{record}"]}}}}')
    with pytest.raises(ValueError, match=r"beams.json: a search with 2 beams is damaged"):
        load_parents(2, path)


@pytest.mark.parametrize("width", WIDTHS)
def test_there_are_recorded_beams(width: int) -> None:
    searches = load_parents(width)
    assert len(searches) >= 4
    assert all(len(search) >= 64 for search in searches)
