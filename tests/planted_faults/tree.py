"""A copy of the repository that faults are planted in."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from enum import Enum
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.planted_faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "app",
    "engine",
    "kernels",
    "loadtests",
    "tests",
    "docs",
    "README.md",
    "pyproject.toml",
    "serve_config.yaml",
)
LIMIT_S = 300.0
"""After which the tests of a fault hang: it may make a loop endless."""


class Verdict(Enum):
    """What came of a fault."""

    CAUGHT = "caught"
    HUNG = "caught: the tests hang"
    CRASHED = "caught: the tests crash"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN: the tests do not run"


class Tree:
    """A copy of the repository that faults are planted in, one at a time."""

    def __init__(self, folder: Path, context: ForkServerContext) -> None:
        self._folder = folder
        self._context = context
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "reports")
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)

    def verdict(self, fault: Fault) -> Verdict:
        """Run the tests of ``fault`` with it."""
        path = self._folder / fault.file
        source = path.read_text()
        path.write_text(source.replace(fault.old, fault.new))
        try:
            status = self.status(fault.tests)
        finally:
            path.write_text(source)
        if status is None:
            return Verdict.HUNG
        if status < 0:
            return Verdict.CRASHED
        return {0: Verdict.SURVIVED, 1: Verdict.CAUGHT}.get(status, Verdict.BROKEN)

    def status(self, tests: Sequence[str], limit_s: float | None = LIMIT_S) -> int | None:
        """Exit status of pytest on ``tests``; negative: a signal's number; ``None``: it took over ``limit_s``.

        What it printed is in the file ``output`` of the folder.
        """
        process = self._context.Process(target=run_tests, args=(str(self._folder), list(tests)))
        process.start()
        process.join(limit_s)
        status = process.exitcode
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that the tests have started
        process.join()
        return status

    def output(self) -> str:
        """What the last run of tests printed."""
        return (self._folder / "output").read_text()


def run_tests(folder: str, tests: list[str]) -> None:
    """In a process of its own: run pytest in ``folder``; exit with its status."""
    os.setsid()
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    sys.modules.pop("tests", None)
    sys.dont_write_bytecode = True  # else a second fault of the same size and time passes for the first
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest  # the tests' own, in their own process

    options = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--timeout=120"]
    status = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(int(status))  # threads of a broken engine must not keep it
