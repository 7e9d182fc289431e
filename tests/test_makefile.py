"""``make .venv`` sets up once, and again only what has changed; options that make would swallow are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("pyproject.toml", "constraints.txt", "constraints-gpu.txt")
PYTHON = """\
#!/bin/sh
# Notes what it was asked for; -m venv makes a folder with another one like it.
echo "$*" >> "$LOG"
case "$1 $2" in "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; esac
case "$*" in *torch*) exit "${PIP_FAILS:-0}";; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With a Python that installs nothing."""
    for name in ("Makefile", *NEEDED):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(checkout: Path, pip_fails: bool = False) -> tuple[str, int]:
    """What ``make .venv`` says, and how often it called pip."""
    log = checkout / "log"
    log.write_text("")
    settings = {"LOG": str(log), "PIP_FAILS": str(int(pip_fails))}
    done = run_make(checkout, ".venv", f"PYTHON={checkout / 'python'}", **settings)
    assert (done.returncode != 0) is pip_fails, done.stderr
    return done.stdout, log.read_text().count("-m pip install")


def run_make(checkout: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env={**environment, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def make_newer(path: Path) -> None:
    """Than anything that make has written."""
    os.utime(path, (time.time() + 1, time.time() + 1))


@needs_make
def test_the_environment_is_set_up_once_and_updated_when_what_it_needs_changes(checkout: Path) -> None:
    said, calls = make(checkout, pip_fails=True)
    assert (said.startswith("Setting up .venv with constraints"), calls) == (True, 1)
    said, calls = make(checkout)  # again from the start
    assert (said.startswith("Setting up .venv"), calls) == (True, 2)
    assert make(checkout)[1] == 0
    for name in NEEDED:  # as after a checkout of another branch and back
        make_newer(checkout / name)
    assert make(checkout)[1] == 0
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# other\n")
    make_newer(checkout / "pyproject.toml")
    said, calls = make(checkout, pip_fails=True)
    assert (said, calls) == ("Updating .venv: what it needs has changed\n", 1)
    said, calls = make(checkout)
    assert (said, calls) == ("Updating .venv: what it needs has changed\n", 2)
    assert make(checkout)[1] == 0


@needs_make
def test_an_index_out_of_reach_has_a_substitute(checkout: Path) -> None:
    """pip's own words for an index out of reach are "conflicting dependencies"."""
    said = {}
    for constraints in ("constraints.txt", "constraints-gpu.txt"):
        arguments = ("serve", f"PYTHON={checkout / 'python'}", f"CONSTRAINTS={constraints}")
        done = run_make(checkout, *arguments, LOG=str(checkout / "log"), PIP_FAILS="1")
        (said[constraints],) = (line for line in done.stderr.splitlines() if line.startswith("Could not"))
        assert done.returncode == 2
    assert said["constraints.txt"] == (
        "Could not install torch with constraints.txt. If you cannot reach download.pytorch.org: "
        "make CONSTRAINTS=constraints-gpu.txt serve (3 GB more disk)"
    )
    assert said["constraints-gpu.txt"] == "Could not install torch with constraints-gpu.txt"


@needs_make
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serve", "port=8001"], 'make serve ARGS="port=8001"'),
        (["model=a/b", "serve", "port=8001"], 'make serve ARGS="model=a/b port=8001"'),
        (["port=8001"], 'make serve ARGS="port=8001"'),
        (["test", "seed=1"], 'make test ARGS="seed=1"'),
    ],
)
def test_an_option_that_make_would_take_for_its_own_is_refused(
    checkout: Path, arguments: list[str], meant: str
) -> None:
    done = run_make(checkout, *arguments)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.endswith(f"options go in ARGS; write: {meant}.  Stop.")


@needs_make
def test_names_in_the_environment_and_variables_in_capitals_are_not_refused(checkout: Path) -> None:
    done = run_make(checkout, "help", "WORKERS=1", "ARGS=port=8001", port="8001")
    assert (done.returncode, done.stderr) == (0, "")
