"""The figures in ``docs/benchmarks.md``, from the JSON files that ``make bench`` leaves.

``python -m loadtests.benchmarks_page`` replaces what stands after the marker; the text before it is written by
hand. A command without a file keeps the section that it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.plots import draw
from loadtests.report import parse

PLOTS = "plots"
"""The folder of the charts, beside the page."""
MARKER = "<!-- Written by python -m loadtests.benchmarks_page -->"


def section(document: dict[str, Any], charts: Sequence[str] = ()) -> str:
    """One command's figures with bars or not, its machine and its commit, and its ``charts``."""
    on = document["machine"]
    lines = [
        f"## `python -m {document['command']}`",
        "",
        f"{on['cpu']} ({on['vector']}), {on['cores']} cores; commit {document['commit']}",
        "",
        *(f"![{Path(chart).stem.replace('_', ' ')}]({PLOTS}/{chart})" for chart in charts),
        *([""] if charts else []),
        "| Figure | Measured | Bar |",
        "|---|---|---|",
    ]
    for figure in document["figures"]:
        bar = ""
        if figure["bar"] is not None:
            missed = "" if figure["holds"] else " **missed**"
            bar = f"{'at most' if figure['at_most'] else 'at least'} {figure['bar']:g}{missed}"
        name = figure["name"].replace("|", "\\|")
        lines.append(f"| {name} | {figure['value']:.4g}{figure['unit']} | {bar} |")
    return "\n".join(lines) + "\n"


def updated(page: str, documents: list[dict[str, Any]], charts: dict[str, list[str]] | None = None) -> str:
    """The page with each document's section in the place of the one of the same command, or at its end."""
    text, marker, old = page.partition(MARKER)
    sections = {
        part.splitlines()[0]: part.strip() + "\n" for part in re.split(r"(?m)^(?=## `)", old) if part.strip()
    }
    for document in documents:
        made = section(document, (charts or {}).get(document["command"], ()))
        sections[made.splitlines()[0]] = made
    return f"{text.rstrip()}\n\n{marker or MARKER}\n\n" + "\n".join(sections.values())


def write(reports: Sequence[Path], page: Path) -> None:
    """Update the page, or begin it, and its charts from these JSON files."""
    documents = [json.loads(path.read_text()) for path in reports]
    page.parent.mkdir(parents=True, exist_ok=True)
    charts = {one["command"]: draw(one, page.parent / PLOTS) for one in documents}
    page.write_text(updated(page.read_text() if page.exists() else "", documents, charts))


def main() -> None:
    folder = (Path("loadtests/reports"), "folder of JSON files")
    options = {"--reports": folder, "--page": (Path("docs/benchmarks.md"), "to be updated")}
    arguments = parse("benchmarks_page", __doc__, options)
    reports = sorted(arguments.reports.glob("*.json"))
    write(reports, arguments.page)
    print(f"wrote {len(reports)} sections to {arguments.page}")


if __name__ == "__main__":
    main()
