"""The page of figures: each command's newest ones, and what is written by hand is left alone."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests.benchmarks_page import MARKER, section, updated, write
from loadtests.experiments.routing.runs import Summary
from loadtests.experiments.routing.scenarios import SCENARIOS
from loadtests.plots import CHARTS, draw
from loadtests.report import save


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


def test_charts_are_drawn_beside_the_page_and_shown_in_their_sections(tmp_path: Path) -> None:
    measured = document("loadtests.throughput", 1.0)
    names = ("(a) 2 x 8 in, 4 out ours", "(a) 2 x 8 in, 4 out vLLM", "(c) 1 x 8 in, 4 out ours")
    names += ("(a) 2 x 8 in, 4 out ours / vLLM",)
    measured["figures"] = [{**measured["figures"][0], "name": name} for name in names]
    page = tmp_path / "benchmarks.md"
    page.write_text("By hand.\n")
    (tmp_path / "throughput.json").write_text(json.dumps(measured))
    (tmp_path / "kernels.json").write_text(json.dumps(document("loadtests.kernels", 2.0)))
    write(sorted(tmp_path.glob("*.json")), page)
    assert page.read_text().count("![throughput](plots/throughput.svg)") == 1
    chart = (tmp_path / "plots" / "throughput.svg").read_text()
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["throughput.svg"]
    for text in (
        "(c) 1 x 8 in, 4 out",
        "vLLM",
        "python -m loadtests.throughput; Some CPU, 2 cores; commit abc",
    ):
        assert f">{text}</text>" in chart
    assert "ours / vLLM" not in chart
    draw(measured, tmp_path / "again")
    assert (tmp_path / "again" / "throughput.svg").read_text() == chart


def test_the_routing_command_makes_its_charts(tmp_path: Path) -> None:
    """From the names of its own figures to the page; only what its runs yield is made up."""
    times = {"short": array("f", [1.0])}
    figures = []
    for place, name in enumerate(("equal", "shared", "cold")):
        scenario = SCENARIOS[name](1)
        seen = [
            Summary(1000.0 + run, 0.5 + place / 10, 0.02, times, 1.0, 0, True, 8, 1.0, 1.0)
            for run in range(len(scenario.runs))
        ]
        figures += [replace(figure, name=f"{name}: {figure.name}") for figure in scenario.judge(seen)]
    page = tmp_path / "benchmarks.md"
    page.write_text("By hand.\n")
    save("loadtests.routing", figures, tmp_path / "routing.json", seeds=1)
    write([tmp_path / "routing.json"], page)
    assert "![routing](plots/routing.svg)\n![routing output](plots/routing_output.svg)\n" in page.read_text()
    hits, output = ((tmp_path / "plots" / name).read_text() for name in ("routing.svg", "routing_output.svg"))
    for chart in (hits, output):
        for text in ("prefix", "oracle", "round robin", "equal: at saturation", "shared: at saturation"):
            assert f">{text}</text>" in chart
        assert "cold" not in chart
    assert ">60</text>" in hits
    assert ">1,000</text>" in output


def test_a_page_that_does_not_exist_is_begun(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(json.dumps(document("loadtests.kernels", 2.0)))
    write([tmp_path / "kernels.json"], tmp_path / "new" / "benchmarks.md")
    assert "loadtests.kernels" in (tmp_path / "new" / "benchmarks.md").read_text()


def test_charts_find_the_figures_that_the_commands_make() -> None:
    made = {
        "autoscaling": ("six ramps: ours: in time", "six ramps: Ray's best here, Ray 2, 30/600 s: in time"),
        "autoscaling_hours": ("a day in two hours: clairvoyant 95%: replica-hours",),
        "routing": ("equal: at saturation: round robin: hits",),
        "routing_output": ("pressure: 1 ingress: prefix: output or more",),
        "memory": ("161/338: average batch, Oracle, first fit",),
    }
    by_file = {chart.file: chart.pattern for chart in CHARTS}
    for file, names in made.items():
        assert all(re.fullmatch(by_file[file], name) for name in names)
    assert not re.fullmatch(by_file["autoscaling"], "six ramps: in time")
    assert not re.fullmatch(by_file["memory"], "161/338: average batch over Oracle")
