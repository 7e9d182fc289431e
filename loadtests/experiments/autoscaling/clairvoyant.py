"""A fleet that knows what comes, to judge the others by: a good plan, not the best one that there could be."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from loadtests.experiments.autoscaling import constants as given
from loadtests.experiments.autoscaling.policies import View
from loadtests.experiments.autoscaling.runs import simulate
from loadtests.experiments.autoscaling.workloads import Workload

SHARES = (0.65, 0.75, 0.85, 0.95, 1.05, 1.15)
"""Of a replica, what the clairvoyant plans to use; each share makes another fleet, and the best one counts.

More than all of it: prompts may take more of the time than the share that they have beside decodes.
"""


def clairvoyant_name(share: float) -> str:
    """The clairvoyant that plans to use so much of each replica."""
    return f"clairvoyant {100 * share:g}%"


CLAIRVOYANT = {clairvoyant_name(share): share for share in SHARES}


class _Instant:
    """Has at each second what memory and slots need at that second: its replicas start at once.

    What it needed is kept for ``hold_s``, so that it drains no replica that comes back.
    """

    name = "instant"

    def __init__(self, share: float, prefill: list[float], hold_s: float) -> None:
        self._share, self._prefill, self._hold = share, prefill, round(hold_s)
        self.needs: list[float] = []

    def __call__(self, view: View) -> int:
        service, reports = given.SERVICE, view.reports.values()
        blocks = sum(one.referenced_blocks + one.waiting_blocks for one in reports)
        sequences = sum(one.sequences for one in reports) + view.queued
        unit = max(blocks * given.BLOCK_SIZE / service.pool_tokens, sequences / service.max_rows) / self._share
        second = len(self.needs)
        prompts = self._prefill[second] if second < len(self._prefill) else 0.0
        self.needs.append(max(unit, prompts))
        return min(max(math.ceil(max(self.needs[-self._hold - 1 :])), 1), view.most)


class Clairvoyant:
    """Asks for what is needed within the time that a replica takes to start.

    It knows the requests of that time with the lengths of their answers, and nothing of later ones. A replica
    that is needed within this time must be there or start now, and no other one must. The needs are estimates:
    those of a fleet whose replicas start at once. Others may do with fewer.
    """

    def __init__(self, workload: Workload, share: float, first: int, most: int, startup_s: float) -> None:
        self.name = clairvoyant_name(share)
        prompts = _prefill(workload, share)
        instant = _Instant(share, prompts, startup_s)
        simulate(workload, instant, first, most, 0.0, delay_s=0.0)
        self._needs, self._ahead = instant.needs, round(startup_s)

    def __call__(self, view: View) -> int:
        second = round(view.now)
        ahead = self._needs[second : second + self._ahead + 1]
        return min(max(math.ceil(max(ahead, default=0.0)), 1), view.most)


def _prefill(workload: Workload, share: float) -> list[float]:
    """By second: replicas whose prefill rate lets prompts be computed within the target after they came."""
    service, width = given.SERVICE, round(given.TTFT_TARGET_S)
    came = np.zeros(math.ceil(workload.seconds) + width + 1)
    np.add.at(came, workload.arrival.astype(int), workload.prompt * (1.0 - workload.hit_share))
    total = np.concatenate([[0.0], np.cumsum(came)])
    windows = total[width:] - total[:-width]  # of the seconds from each on
    rate = share * service.shared_prefill * service.prefill_rate * width
    # A window is computed from its first second until as long after its last one.
    return [max(pair) / rate for pair in pairwise((0.0, *windows.tolist()))]
