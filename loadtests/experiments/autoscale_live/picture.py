"""Draws one run: requests, memory, replicas, over time."""

from __future__ import annotations

from pathlib import Path

from loadtests.experiments.autoscale_live.judge import Recording
from loadtests.experiments.autoscale_live.plan import POOL_BLOCKS

NAME = "autoscale-live"


def draw(run: Recording, folder: Path) -> Path:
    """Write the picture into ``folder``, which is made if it is missing."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    picture, rows = pyplot.subplots(3, 1, figsize=(9.0, 7.5), sharex=True, layout="constrained")
    requests, memory, replicas = rows
    looks = [look for look in run.engines if look.at >= run.began]
    seen = [look for look in run.serve if look.at >= run.began]
    at, at_serve = [look.at - run.began for look in looks], [look.at - run.began for look in seen]
    streams, clients = [look.streams for look in looks], [look.requests for look in looks]
    requests.stackplot(at, streams, clients, labels=("streams", "requests of clients"), alpha=0.8)
    requests.plot(at, [look.waiting for look in looks], color="red", label="of these, waiting in an engine")
    memory.plot(at, [look.held_blocks / POOL_BLOCKS for look in looks], label="KV held")
    needed = [(look.held_blocks + look.waiting) / POOL_BLOCKS for look in looks]
    memory.plot(at, needed, color="red", label="held and waited for", linewidth=0.8)
    replicas.step(at_serve, [look.target for look in seen], where="post", label="target", linewidth=2.5)
    replicas.step(at_serve, [len(look.running) for look in seen], where="post", label="running")
    replicas.set_yticks(range(1 + max(look.target for look in seen)))
    replicas.set_xlabel("seconds")
    for axes, title in zip(rows, ("open requests", "pools of one replica", "replicas"), strict=True):
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, loc="upper left", fontsize=8)
        for moment, _ in run.events:
            axes.axvline(moment - run.began, color="grey", linewidth=0.6, linestyle="--")
    for moment, name in run.events:
        place = (moment - run.began, 1.02)
        requests.annotate(name, place, xycoords=("data", "axes fraction"), rotation=60, fontsize=7)
    path = folder / f"{NAME}.png"
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
    return path
