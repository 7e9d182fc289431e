"""Draws the plots as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.findings import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4c72b0", "#dd8452", "#c44e52", "#8c8c8c", "#55a868", "#8172b3")
_MARKERS = "osv^DPX"


def draw(plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Write one picture for each plot into ``folder``, which is made if it is missing."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots:
        figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
        if plot.labels:
            _bars(plot, axes)
        else:
            _lines(plot, axes)
        axes.set_title(plot.title)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        axes.set_ylim(0, plot.y_max)
        axes.grid(axis="y", alpha=0.3)
        path = folder / f"{plot.name}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        paths.append(path)
    return paths


def _bars(plot: Plot, axes: Axes) -> None:
    bottom = [0.0] * len(plot.labels)
    for colour, (name, (places, heights)) in zip(_COLOURS, plot.series.items(), strict=False):
        axes.bar(places, heights, bottom=bottom, label=name, color=colour, width=0.65)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(plot.labels)), plot.labels)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(plot.series), frameon=False)


def _lines(plot: Plot, axes: Axes) -> None:
    for i, (name, (x, y)) in enumerate(plot.series.items()):
        axes.plot(
            x,
            y,
            label=name,
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=4,
        )
    if plot.log_x:
        axes.set_xscale("log", base=2)
        ticks = next(iter(plot.series.values()))[0]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend(frameon=False)
