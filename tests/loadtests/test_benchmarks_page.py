"""The page of figures: each command's newest ones, and what is written by hand is left alone."""

from __future__ import annotations

from typing import Any

from loadtests.benchmarks_page import MARKER, section, updated


def document(command: str, value: float, bar: float | None = None, holds: bool = True) -> dict[str, Any]:
    """As ``report.save`` writes it."""
    figure = {"name": "rate", "value": value, "unit": "x", "bar": bar, "at_most": False, "holds": holds}
    machine = {"cpu": "Some CPU", "vector": "avx2", "cores": 2}
    return {"command": command, "machine": machine, "commit": "abc", "figures": [figure]}


def test_a_section_names_command_machine_commit_and_bar() -> None:
    text = section(document("loadtests.kernels", 1.25, bar=1.5, holds=False))
    assert text.splitlines()[0] == "## `python -m loadtests.kernels`"
    assert "Some CPU (avx2), 2 cores; commit abc" in text
    assert "| rate | 1.25x | at least 1.5 **missed** |" in text
    assert "| rate | 2x |  |" in section(document("loadtests.kernels", 2.0))


def test_newer_figures_replace_older_ones_of_the_same_command_alone() -> None:
    page = "# Title\n\nBy hand.\n"
    first = updated(page, [document("loadtests.a", 1.0), document("loadtests.b", 2.0)])
    second = updated(first, [document("loadtests.a", 3.0)])
    assert second.startswith("# Title\n\nBy hand.\n")
    assert second.count(MARKER) == 1
    assert "| rate | 3x |  |" in second
    assert "| rate | 2x |  |" in second
    assert "| rate | 1x |  |" not in second
    assert updated(second, []) == second
