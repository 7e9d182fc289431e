"""``--replay``: a table of what was and what would have been; other files are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests import routing
from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing_live.recording import Arrival, LiveFleet, Recording, write

FLEET = LiveFleet("power_of_two", 1, 2, 168, 16, 8, 64, 400, 220.0, 0.03, 0.005, 1e-6, 2.0, 20.0)


def test_every_way_to_route_gets_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrivals = tuple(Arrival(0.5 * n, n % 3, 445, 24, "a", 200, 1.25, 200, 30.0) for n in range(40))
    write(Recording(FLEET, arrivals), tmp_path / "two.jsonl")
    out = tmp_path / "out.json"
    routing.main(["--replay", str(tmp_path / "two.jsonl"), "--json", str(out)])
    said = capsys.readouterr().out
    assert "live: power_of_two" in said
    assert all(f"simulated: {arm.value}" in said for arm in Arm)
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["value"] == pytest.approx(200 / 400, rel=0.01)  # the oracle finds each system prompt


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit):
        routing.main(["--replay", str(tmp_path / "other.json")])
    assert "is not of a recorded live run" in capsys.readouterr().err


def test_live_has_options_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        routing.main(["--live", "--help"])
    assert "--arms" in capsys.readouterr().out
