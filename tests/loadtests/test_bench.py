"""``make bench`` leaves out no measuring command; the wheel has none of the experiments."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from setuptools import find_packages

from loadtests import bench, report

ROOT = Path(__file__).parent.parent.parent
NEED_A_GPU = {"loadtests.gpu_engine"}
NOT_MEASURING = {"loadtests.bench", "loadtests.benchmarks_page"}


def test_every_measuring_command_is_run() -> None:
    commands = {
        f"loadtests.{path.stem}"
        for path in (ROOT / "loadtests").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert {
        command.words.split()[0] for command in bench.COMMANDS.values()
    } == commands - NEED_A_GPU - NOT_MEASURING


def test_each_command_leaves_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"good": bench.Command("platform", 1), "bad": bench.Command("loadtests.nothing", 2.5)}
    page = run(monkeypatch, tmp_path, commands, r"^checks failed:\nbad: it ended before it had figures")
    assert not (tmp_path / "bad.json").exists()
    assert "## " not in page
    assert capsys.readouterr().out.startswith("about 3.5 minutes on two idle cores\n")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, commands: dict[str, bench.Command], error: str) -> str:
    """Run ``commands`` over an earlier run's files; some fail with this ``error``. Returns the page."""
    page = folder / "page.md"
    page.write_text("By hand.\n")
    options = ["--only", *commands, "--reports", str(folder), "--page", str(page)]
    monkeypatch.setattr(bench, "COMMANDS", commands)
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    for name in commands:
        (folder / f"{name}.json").write_text("of an earlier run")
    with pytest.raises(SystemExit, match=error):
        bench.main()
    return page.read_text()


def test_missed_bars_are_told_with_value_and_limit_and_keep_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = {
        "fast": [report.Figure("speed", 3.0, "x", 2.0)],
        "slow": [report.Figure("speed", 1.0, "x", 2.0), report.most("pause", 1.5, 1.0, " s")],
    }

    def measure(command: list[str], check: bool) -> Any:
        out = Path(command[command.index("--json") + 1])
        report.save(command[2], figures[command[2]], out)
        return SimpleNamespace(returncode=command[2] == "slow")

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=measure))
    monkeypatch.setattr(report, "commit", lambda: "abc")
    told = "checks failed:\nslow: speed: 1x  bar >= 2\nslow: pause: 1.5 s  bar <= 1\n"
    told += f"slow: all its figures are in {tmp_path}/slow.json"
    commands = {name: bench.Command(name, 1) for name in figures}
    page = run(monkeypatch, tmp_path, commands, f"^{re.escape(told)}$")
    assert "`python -m fast`" in page
    assert "slow" not in page


def test_the_wheel_has_the_client_and_no_experiment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = find_packages(str(ROOT), **project["tool"]["setuptools"]["packages"]["find"])
    assert "loadtests" in found
    assert not [name for name in found if name.startswith("loadtests.experiments")]


def test_a_missing_experiment_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Callable[[str], None]:
        def find(_: str) -> None:
            raise ModuleNotFoundError("No module", name=module)

        return find

    monkeypatch.setattr(report, "import_module", missing("loadtests.experiments"))
    with pytest.raises(SystemExit, match="run it in a checkout"):
        report.experiment("memory")
    monkeypatch.setattr(report, "import_module", missing("locust"))
    with pytest.raises(ModuleNotFoundError):
        report.experiment("memory")
