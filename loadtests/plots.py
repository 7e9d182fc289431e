"""Charts of the figures in ``docs/benchmarks.md``, one SVG each, from the commands' JSON files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLORS = ("#1f6fb2", "#d9702b", "#6b7785", "#3a9a5b", "#a05bb0", "#c7a12b")


class Chart(NamedTuple):
    """Bars of the figures whose names match; the groups of the pattern say where and whose."""

    file: str
    title: str
    pattern: str
    command: str


_ENGINES = r"(\([a-z]\) .+ out) (ours|ours in int4|transformers.*|vLLM|llama\.cpp.*)"
_FLEETS = r"(.+?): (ours|Ray's default|Ray's best here|clairvoyant)[^:]*: "
CHARTS = (
    Chart("throughput", "Output tokens per second, offline", _ENGINES, "loadtests.throughput"),
    Chart("autoscaling_hours", "Replica-hours (simulated)", f"{_FLEETS}replica-hours", "loadtests.autoscaling"),
    Chart("autoscaling", "Requests in time, % (simulated)", f"{_FLEETS}in time", "loadtests.autoscaling"),
    Chart("routing", "Prompt tokens found cached, % (simulated)", r"(.+): ([\w ]+): hits", "loadtests.routing"),
    Chart("memory", "Average batch (simulated)", r"(.+): average batch, (.+)", "loadtests.memory"),
)


def draw(document: dict[str, Any], folder: Path) -> list[str]:
    """Write the charts of one command's figures, the same for the same ones; returns their file names."""
    names = []
    for chart in CHARTS:
        found = [(re.fullmatch(chart.pattern, one["name"]), one["value"]) for one in document["figures"]]
        bars = {(match[1], match[2]): value for match, value in found if match}
        if chart.command == document["command"] and bars:
            on = document["machine"]
            source = f"python -m {chart.command}; {on['cpu']}, {on['cores']} cores; commit {document['commit']}"
            folder.mkdir(exist_ok=True)
            _bars(chart.title, bars, source, folder / f"{chart.file}.svg")
            names.append(f"{chart.file}.svg")
    return names


def _bars(title: str, bars: dict[tuple[str, str], float], source: str, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    where, whose = (list(dict.fromkeys(key[at] for key in bars)) for at in (0, 1))
    plain: Any = {"svg.fonttype": "none", "svg.hashsalt": "quire", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context(plain):
        figure = Figure(figsize=(8.0, 0.9 + 0.19 * len(bars) + 0.22 * len(where)), layout="constrained")
        axes = figure.subplots()
        at, ticks = 0.0, []
        for group in where:
            mine = [one for one in whose if (group, one) in bars]
            ticks.append(at + (len(mine) - 1) / 2)
            for one in mine:
                value = bars[group, one]
                axes.barh(at, value, 0.82, color=COLORS[whose.index(one) % len(COLORS)])
                shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                axes.text(value, at, f" {shown}", va="center", fontsize=8)
                at += 1.0
            at += 1.1
        axes.set_yticks(ticks, where)
        axes.invert_yaxis()
        axes.margins(x=0.08, y=0.01)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel(source, loc="left", fontsize=7, color="#5b6675")
        _legend(figure, whose)
        figure.savefig(path, metadata={"Date": None})


def _legend(figure: Any, whose: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLORS[at % len(COLORS)], label=one) for at, one in enumerate(whose)]
    figure.legend(handles=patches, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
