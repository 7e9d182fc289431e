"""Quantiles and goals beside pytest-benchmark's own table, and ``--check`` to fail where a goal is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Note = Callable[[float, float, dict[str, float]], None]

_results: list[tuple[str, str, float, float, bool]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--check``."""
    parser.addoption("--check", action="store_true", help="fail where a goal is missed")


@pytest.fixture
def goals(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[dict[str, float]], None]:
    """Compare with goals after a benchmark has run.

    The names are ``p50_us``, ``p99_us`` (at most), and ``records_per_s`` (at least; ``records`` a round from
    ``benchmark.extra_info``).
    """

    def compare(limits: dict[str, float]) -> None:
        data = sorted(benchmark.stats.stats.data)
        figures = {"p50_us": data[len(data) // 2] * 1e6, "p99_us": data[int(len(data) * 0.99)] * 1e6}
        if "records" in benchmark.extra_info:
            figures["records_per_s"] = benchmark.extra_info["records"] * len(data) / sum(data)
        missed = []
        for name, limit in limits.items():
            value = figures[name]
            reached = value >= limit if name.endswith("_per_s") else value <= limit
            _results.append((request.node.name, name, value, limit, reached))
            if not reached:
                missed.append(f"{name} {value:,.1f}, goal {limit:,.1f}")
        benchmark.extra_info.update(figures, goals=limits)
        if missed and request.config.getoption("--check"):
            pytest.fail("; ".join(missed))

    return compare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print all figures that have a goal."""
    if not _results:
        return
    terminalreporter.section("goals")
    for test, name, value, limit, reached in _results:
        verdict = "reached" if reached else "MISSED"
        terminalreporter.line(f"{test:44} {name:14} {value:14,.1f}  goal {limit:12,.0f}  {verdict}")
