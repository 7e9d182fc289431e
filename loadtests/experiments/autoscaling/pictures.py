"""What happened over time, drawn as PNG files: one policy beside another under the same load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.experiments.autoscaling.runs import IN_TIME_S, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DEMAND, _TARGET, _RUNNING, _IN_TIME = "#dd8452", "#4c72b0", "#8c8c8c", "#55a868"


@dataclass(frozen=True, slots=True)
class Picture:
    """One file: a column for each outcome."""

    name: str  # of the file, without its ending
    title: str
    outcomes: tuple[Outcome, ...]


def draw(pictures: Sequence[Picture], folder: Path) -> list[Path]:
    """Write one picture each into ``folder``, which is made if it is missing."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures:
        count = len(picture.outcomes)
        figure, axes = pyplot.subplots(
            2,
            count,
            figsize=(4.4 * count + 0.6, 4.8),
            sharex=True,
            sharey="row",
            squeeze=False,
            layout="constrained",
            gridspec_kw={"height_ratios": (3, 1)},
        )
        for place, outcome in enumerate(picture.outcomes):
            _replicas(outcome, axes[0][place])
            _in_time(outcome, axes[1][place])
        most = max(max(max(one.series["target"]), max(one.series["running"])) for one in picture.outcomes)
        # Demand without bound would press everything else to the ground.
        axes[0][0].set_ylim(0, 1.15 * most)
        axes[0][0].set_ylabel("replicas")
        axes[1][0].set_ylabel("in time, %")
        figure.suptitle(picture.title)
        figure.legend(
            *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
        )
        path = folder / f"{picture.name}.png"
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
        paths.append(path)
    return paths


def _replicas(outcome: Outcome, axes: Axes) -> None:
    minutes = [place * outcome.every_s / 60.0 for place in range(len(outcome.series["target"]))]
    axes.fill_between(
        minutes, outcome.series["demand"], color=_DEMAND, alpha=0.45, linewidth=0, label="demand, in pools"
    )
    axes.plot(minutes, outcome.series["running"], color=_RUNNING, linewidth=2.2, label="running replicas")
    axes.plot(minutes, outcome.series["target"], color=_TARGET, linewidth=1.2, label="target")
    axes.set_title(
        f"{outcome.policy}: {100 * outcome.served:.1f} % in time, {outcome.replica_hours:.1f} replica-hours",
        fontsize="medium",
    )
    axes.grid(axis="y", alpha=0.3)


def _in_time(outcome: Outcome, axes: Axes) -> None:
    shares = [(place, share) for place, share in enumerate(outcome.series["in time"]) if not math.isnan(share)]
    minutes = [(place + 0.5) * IN_TIME_S / 60.0 for place, _ in shares]
    axes.fill_between(minutes, [100 * share for _, share in shares], color=_IN_TIME, alpha=0.7, linewidth=0)
    axes.set_ylim(0, 105)
    axes.set_xlabel("minutes")
    axes.grid(axis="y", alpha=0.3)
