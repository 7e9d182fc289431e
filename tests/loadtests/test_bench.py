"""``make bench`` leaves out no measuring command; the wheel has none of the experiments."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

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


def test_each_command_leaves_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = {"good": bench.Command("platform", 1), "bad": bench.Command("loadtests.nothing", 1)}
    monkeypatch.setattr(bench, "COMMANDS", commands)
    page = tmp_path / "page.md"
    page.write_text("By hand.\n")
    options = ["--only", "good", "bad", "--reports", str(tmp_path), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    (tmp_path / "bad.json").write_text("of an earlier run")
    with pytest.raises(SystemExit, match=r"^checks failed: bad$"):
        bench.main()
    assert not (tmp_path / "bad.json").exists()


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
