"""How long the tests of planted faults may take, from how long they took without any."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tests.planted_faults.fault import Fault

START_S = 0.5
"""Of the process that runs the tests of a fault."""
BUILD_S = 40.0
"""To compile the C++ kernels, which a fault in one of them changes."""
LIMIT_S = 300.0
"""After which tests that should end are too slow to decide anything, in any case."""
HANGS_S = 30.0
"""After which tests that should hang do, at the earliest."""
TIMES = 10
"""As long as without the fault may tests take, on a machine that has become busy."""


class Estimate:
    """Made of the seconds of each test function."""

    def __init__(self, times: Iterable[Mapping[str, float]]) -> None:
        self.times = {name: seconds for part in times for name, seconds in part.items()}

    def seconds(self, fault: Fault) -> float:
        """Of one process that tries ``fault``, if no test fails: then it ends sooner."""
        tests = sum(
            seconds
            for name, seconds in self.times.items()
            if any(name == test or name.startswith(f"{test}::") for test in fault.tests)
        )
        return START_S + tests + (BUILD_S if fault.file.endswith((".cpp", ".h")) else 0.0)

    def limit_s(self, fault: Fault) -> float:
        """After which the tests of ``fault`` hang, or are too slow."""
        return max(HANGS_S if fault.hangs else LIMIT_S, TIMES * self.seconds(fault))

    def remaining_s(self, elapsed_s: float, done: Collection[Fault], left: Collection[Fault]) -> float:
        """Until the faults ``left`` are tried, if they take what those ``done`` took, of what was expected."""
        expected = sum(map(self.seconds, done))
        return elapsed_s / expected * sum(map(self.seconds, left)) if expected else 0.0
