"""Draws the plots as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtests.findings import Plot

_COLORS = ("#4c72b0", "#dd8452", "#c44e52", "#8c8c8c", "#55a868", "#8172b3")
_MARKERS = "osv^DP"


def draw(plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Write one picture for each plot into ``folder``, which is made if it is missing."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots:
        figure, axes = pyplot.subplots(figsize=(7.6, 4.4), layout="constrained")
        bottom = [0.0] * len(plot.labels)
        for color, marker, (name, (x, y)) in zip(_COLORS, _MARKERS, plot.series.items(), strict=False):
            if plot.labels:
                axes.bar(x, y, bottom=bottom, label=name, color=color, width=0.65)
                bottom = [low + height for low, height in zip(bottom, y, strict=True)]
            else:
                axes.plot(x, y, label=name, color=color, marker=marker, markersize=4)
        if plot.labels:
            axes.set_xticks(range(len(plot.labels)), [label.replace(", ", ",\n") for label in plot.labels])
        if plot.log_x:
            axes.set_xscale("log", base=2)
            ticks = next(iter(plot.series.values()))[0]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.legend(frameon=False)
        axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
        axes.set_ylim(0, plot.y_max)
        axes.grid(axis="y", alpha=0.3)
        paths.append(folder / f"{plot.name}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths
