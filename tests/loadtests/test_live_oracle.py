"""Recordings replayed in the simulator: the same requests, prompts shared as they were, what can be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing_live.oracle import replay
from loadtests.experiments.routing_live.recording import Arrival, LiveFleet, Recording, cached_share

FLEET = LiveFleet("prefix", 1, 2, 168, 16, 8, 64, 400, 220.0, 0.03, 0.005, 1e-6, 10.0, 40.0)


def recording(groups: int, **changes: int) -> Recording:
    """A request every quarter of a second, each group in its turn."""
    arrivals = tuple(
        Arrival(0.25 * number, number % groups, 445, 24, "a", 0, 1.0, 200, 50.0) for number in range(160)
    )
    return Recording(replace(FLEET, **changes), arrivals)  # type: ignore[arg-type]


def test_every_request_comes_at_its_time_and_with_its_lengths() -> None:
    given = recording(8)
    records = sorted(replay(given), key=lambda record: record.number)
    assert [record.arrival for record in records] == [one.t for one in given.arrivals]
    assert {(record.prompt, record.output) for record in records} == {(445, 24)}
    assert {record.replica for record in records} == {0, 1}


def test_with_room_for_all_the_oracle_finds_every_system_prompt() -> None:
    given = recording(8, num_blocks=1000)
    assert cached_share(FLEET.counted(replay(given))) == pytest.approx(400 / 445)


def test_no_group_finds_anothers_system_prompt() -> None:
    given = recording(160, num_blocks=10_000)
    assert cached_share(FLEET.counted(replay(given))) == 0.0


def test_pools_bound_what_is_found() -> None:
    """In turns, each of two replicas is asked about all seven system prompts, and has room for fewer."""
    given = recording(7)
    oracle = cached_share(FLEET.counted(replay(given)))
    turns = cached_share(FLEET.counted(replay(given, Arm.ROUND_ROBIN)))
    assert 0.8 < oracle <= 400 / 445
    assert turns < oracle


def test_requests_of_unknown_length_are_left_out() -> None:
    given = recording(8)
    lost = Arrival(1.0, 0, 0, 0, "", 0, None, 503, None)
    assert len(replay(Recording(FLEET, (*given.arrivals, lost)))) == len(given.arrivals)
