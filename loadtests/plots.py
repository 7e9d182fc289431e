"""Charts of the figures in ``docs/benchmarks.md``, one SVG each, from the commands' JSON files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

COLORS = ("#2f81c7", "#d9702b", "#7d8895", "#3a9a5b", "#a86bb8", "#c7a12b")
"""Seen on white as on black."""
WIDTH = 760
STYLE = """<style>
text { font: 11px sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: bold }
.end { text-anchor: end }
.source { font-size: 9px; opacity: .75 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>"""


class Chart(NamedTuple):
    """Bars of the figures whose names match; the groups of the pattern say where and whose."""

    file: str
    title: str
    pattern: str
    command: str


_ENGINES = r"(\([a-z]\) .+ out) (ours|ours in int[48]|transformers.*|vLLM|llama\.cpp.*)"
_FLEETS = r"(.+?): (ours|our best here|Ray's default|Ray's best here|clairvoyant)[^:]*: "
_ROUTED = r"((?:equal|shared|pressure): .+): ([\w ]+): "
CHARTS = (
    Chart("throughput", "Output tokens per second, offline", _ENGINES, "loadtests.throughput"),
    Chart("autoscaling_hours", "Replica-hours (simulated)", f"{_FLEETS}replica-hours", "loadtests.autoscaling"),
    Chart("autoscaling", "Requests in time, % (simulated)", f"{_FLEETS}in time", "loadtests.autoscaling"),
    Chart("routing", "Prompt tokens found cached, % (simulated)", _ROUTED + "hits", "loadtests.routing"),
    Chart("routing_output", "Output tokens per second (simulated)", _ROUTED + "output.*", "loadtests.routing"),
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
    where, whose = (list(dict.fromkeys(key[at] for key in bars)) for at in (0, 1))
    colors = {one: COLORS[at % len(COLORS)] for at, one in enumerate(whose)}
    left = 12 + round(6.2 * max(map(len, where)))
    scale = (WIDTH - left - 60) / (max(bars.values()) or 1.0)
    parts, x, y = [_text(0, 14, title, "title")], 0, 34
    for one in whose:
        if x and x + 24 + 6.2 * len(one) > WIDTH:
            x, y = 0, y + 16
        parts += [
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colors[one]}"/>',
            _text(x + 14, y, one),
        ]
        x += round(30 + 6.2 * len(one))
    for group in where:
        mine = [one for one in whose if (group, one) in bars]
        y += 14
        parts.append(_text(left - 6, y + 6 + 6.5 * len(mine), group, "end"))
        for one in mine:
            value = bars[group, one]
            shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            width = round(value * scale, 1)
            parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="11" fill="{colors[one]}"/>')
            parts.append(_text(left + width + 4, y + 9, shown))
            y += 13
    parts.append(_text(0, y + 18, source, "source"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" role="img">'
    path.write_text("\n".join([head, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>\n"]))


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{style}>{escape(words)}</text>'
