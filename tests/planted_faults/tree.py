"""A copy of the repository that faults are planted in."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import py_compile
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.planted_faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "app",
    "clients",
    "engine",
    "kernels",
    "loadtests",
    "tests",
    "docs",
    "README.md",
    "pyproject.toml",
    "serve_config.yaml",
)
OUTPUT, TIMES = "output", "times.json"
"""In the folder of a tree, of the last run of tests: what it printed, and the seconds of each test function."""


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
        # Once, not in the process of each fault. By default the time and size of a source tell whether its
        # bytecode is current: a second fault of the same size in the same second would pass for the first.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder, quiet=2, invalidation_mode=by_content)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """With ``fault`` in its file."""
        path = self._folder / fault.file
        source = path.read_text()
        path.write_text(source.replace(fault.old, fault.new))
        try:
            yield
        finally:
            path.write_text(source)

    def status(
        self, tests: Sequence[str], limit_s: float | None = None, times: Mapping[str, float] | None = None
    ) -> int | None:
        """Exit status of pytest on ``tests``; negative: a signal's number; ``None``: it took over ``limit_s``.

        Without ``limit_s`` each test has its usual limit instead. ``times`` are the seconds of each test
        function of an earlier run: the fastest come first.
        """
        arguments = (str(self._folder), list(tests), limit_s is None, times or {})
        process = self._context.Process(target=run_tests, args=arguments)
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
        return (self._folder / OUTPUT).read_text()

    def times(self) -> dict[str, float]:
        """Seconds of each test function of the last run, which has ended by itself: ``file::test``."""
        seconds: dict[str, float] = json.loads((self._folder / TIMES).read_text())
        return seconds


class Times:
    """A plugin of pytest: how long each test function takes; those that took least before come first."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self.seconds: dict[str, float] = {}
        self._before = before
        self._files: dict[str, float] = defaultdict(float)
        for name, seconds in before.items():
            self._files[name.partition("::")[0]] += seconds

    def pytest_collection_finish(self, session: Any) -> None:
        """The first test that fails is the last one: file by file, as each may have fixtures of its own."""
        session.items.sort(key=self._seconds_before)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = _function(report.nodeid)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration

    def _seconds_before(self, item: Any) -> tuple[float, str, float]:
        name = _function(item.nodeid)
        file = name.partition("::")[0]
        return self._files.get(file, 0.0), file, self._before.get(name, 0.0)


def _function(nodeid: str) -> str:
    """``file::test``, whatever its parameters."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def run_tests(folder: str, tests: list[str], limits: bool, before: Mapping[str, float]) -> None:
    """In a process of its own: run pytest in ``folder``; exit with its status.

    ``limits``: each test has one. ``before``: the seconds that tests took.
    """
    os.setsid()
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    sys.modules.pop("tests", None)
    sys.dont_write_bytecode = False  # so that pytest rewrites each file of tests once
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest  # the tests' own, in their own process

    # Tracebacks are Python's own: for its own, pytest parses whole files, and on some releases of Python 3.11 that
    # raises a SystemError if a task with an exception, which is then logged, is collected meanwhile.
    options = ["-x", "-q", "--tb=native", "-p", "no:randomly", "-p", "no:cacheprovider"]
    if not limits:
        options.append("--timeout=0")  # a test that fails for its slowness would pass for one that notices
    times = Times(before)
    status = pytest.main([*options, *(f"tests/{test}" for test in tests)], plugins=[times])
    Path(TIMES).write_text(json.dumps(times.seconds))
    sys.stdout.flush()
    os._exit(int(status))  # threads of a broken engine must not keep it
