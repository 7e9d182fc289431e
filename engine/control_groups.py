"""Linux's control groups of this process: a container's limits of memory and processor time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group that limits what ``controller`` counts, this process's own first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, base = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, base = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may not exist below the mount, whose top is then the container's group.
        folder = Path(os.path.normpath(base / path.lstrip("/")))
        for group in (folder, *folder.parents):
            yield version, group
            if group == base:
                break


def cpu_quota(root: Path = ROOT) -> float:
    """How many processors' time this process may take; infinite where nothing limits it."""
    return min((_quota(*group) for group in groups("cpu", root)), default=math.inf)


def _quota(version: int, group: Path) -> float:
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
