"""Recorded live runs: what is written is read again, and the figures count what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.experiments.routing_live.recording import Arrival, LiveFleet, Recording, read, write

FLEET = LiveFleet("prefix", 1, 2, 160, 16, 8, 64, 400, 220.0, 0.03, 0.005, 1e-6, 10.0, 20.0)
BEFORE = Arrival(5.0, 0, 440, 24, "a", 0, 2.0, 200, 12.0)
FIRST = Arrival(11.0, 0, 440, 24, "a", 400, 0.5, 200, 13.0)
SECOND = Arrival(12.0, 1, 460, 24, "b", 0, 1.5, 200, 19.5)
LATE = Arrival(19.0, 1, 440, 24, "b", 400, 4.0, 200, 25.0)
REFUSED = Arrival(19.5, 1, 0, 0, "", 0, None, 503, None)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording = Recording(FLEET, (BEFORE, FIRST, REFUSED))
    write(recording, tmp_path / "run.jsonl")
    assert read(tmp_path / "run.jsonl") == recording


def test_requests_are_sorted_by_time(tmp_path: Path) -> None:
    write(Recording(FLEET, (SECOND, BEFORE)), tmp_path / "run.jsonl")
    assert read(tmp_path / "run.jsonl").arrivals == (BEFORE, SECOND)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "line 1"), ("{}\n", "line 1"), ("no json\n", "line 1"), ('{"fleet": {"arm": "x"}}\n', "line 1")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "run.jsonl")


def test_figures_are_of_the_window() -> None:
    recording = Recording(FLEET, (BEFORE, FIRST, SECOND, LATE))
    assert recording.counted == [FIRST, SECOND, LATE]
    assert recording.throughput == 3 * 24 / 10  # the one that came before ended within, the last one did not
    assert recording.cached_share == 800 / (440 + 460 + 440)
    assert recording.ttft == 1.5
    assert replace(recording, arrivals=(FIRST, REFUSED, REFUSED)).ttft == math.inf  # two never got a token
    assert recording.balance == pytest.approx(2 * 2 / 3)
    assert recording.failed == 0


def test_whatever_did_not_end_well_is_counted() -> None:
    cut = replace(LATE, ended=None)
    recording = Recording(FLEET, (FIRST, cut, REFUSED, replace(BEFORE, status=500)))
    assert recording.failed == 3
    assert recording.throughput == 24 * 2 / 10
