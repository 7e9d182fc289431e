"""``make bench`` leaves out no measuring command."""

from __future__ import annotations

from pathlib import Path

from loadtests.bench import COMMANDS

LOADTESTS = Path(__file__).parent.parent.parent / "loadtests"
NEED_A_GPU = {"loadtests.gpu_engine"}


def test_every_measuring_command_is_run() -> None:
    commands = set()
    for path in LOADTESTS.glob("*.py"):
        code = path.read_text()
        if "add_arguments(parser)" in code and '__name__ == "__main__"' in code:
            commands.add(f"loadtests.{path.stem}")
    assert {command[0] for command in COMMANDS.values()} == commands - NEED_A_GPU
