"""Draws one run: requests, memory, replicas, over time."""

from __future__ import annotations

from pathlib import Path

from loadtests.experiments.autoscale_live.judge import Recording
from loadtests.experiments.autoscale_live.plan import POOL_BLOCKS

NAME = "autoscale-live"
BLUE, ORANGE, RED, GREY, GREEN = "#4c72b0", "#dd8452", "#c44e52", "#8c8c8c", "#55a868"


def draw(run: Recording, folder: Path) -> Path:
    """Write the picture into ``folder``, which is made if it is missing."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    picture, (requests, memory, replicas) = pyplot.subplots(
        3, 1, figsize=(9.0, 7.5), sharex=True, layout="constrained"
    )
    looks = [look for look in run.engines if look.at >= run.began]
    at = [look.at - run.began for look in looks]
    requests.stackplot(
        at,
        [look.streams for look in looks],
        [look.requests for look in looks],
        labels=("streams", "requests of clients"),
        colors=(BLUE, ORANGE),
        alpha=0.8,
    )
    requests.plot(at, [look.waiting for look in looks], color=RED, label="of these, waiting in an engine")
    requests.set_ylabel("open requests")

    memory.plot(at, [look.held_blocks / POOL_BLOCKS for look in looks], color=BLUE, label="KV held")
    memory.plot(
        at,
        [(look.held_blocks + look.waiting) / POOL_BLOCKS for look in looks],
        color=RED,
        linestyle=":",
        label="KV held, and wanted by those that wait",
    )
    memory.step(at, [look.replicas for look in looks], where="post", color=GREY, label="KV there is")
    memory.set_ylabel("pools of one replica")

    # A new controller calls no replica running before it has found it again.
    seen = [look for look in run.serve if look.at >= run.began and "RECOVERING" not in look.states.values()]
    times = [look.at - run.began for look in seen]
    replicas.step(
        times, [look.target for look in seen], where="post", color=ORANGE, label="target", linewidth=2.5
    )
    replicas.step(times, [len(look.running) for look in seen], where="post", color=GREEN, label="running")
    replicas.set_ylabel("replicas")
    replicas.set_yticks(range(1 + max(look.target for look in seen)))
    replicas.set_xlabel("seconds")

    for axes in (requests, memory, replicas):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        for moment, _ in run.events:
            axes.axvline(moment - run.began, color=GREY, linewidth=0.6, linestyle="--")
    for axes in (requests, memory, replicas):
        axes.legend(frameon=False, loc="upper left", fontsize=8)
    for moment, name in run.events:
        requests.annotate(
            name,
            (moment - run.began, 1.02),
            xycoords=("data", "axes fraction"),
            rotation=60,
            fontsize=7,
            annotation_clip=False,
        )
    path = folder / f"{NAME}.png"
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
    return path
