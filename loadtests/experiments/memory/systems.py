"""The systems that are compared, by the names that tables have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

from loadtests.experiments.memory.allocators import BuddyAllocator, FirstFitAllocator
from loadtests.experiments.memory.constants import GPU_LIKE, POOL_SLOTS
from loadtests.experiments.memory.contiguous import Reservation, simulate_contiguous
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.simulated_replica import SimulatedReplica

Case = TypeVar("Case")

PAGED = "paged"
MAX, POW2, ORACLE = (reservation.value for reservation in Reservation)
ORACLE_FIRST_FIT = f"{ORACLE}, first fit"
CONTIGUOUS: dict[str, tuple[Reservation, type[BuddyAllocator | FirstFitAllocator]]] = {
    MAX: (Reservation.MAX, BuddyAllocator),
    POW2: (Reservation.POW2, BuddyAllocator),
    ORACLE: (Reservation.ORACLE, BuddyAllocator),
    f"{POW2}, first fit": (Reservation.POW2, FirstFitAllocator),
    ORACLE_FIRST_FIT: (Reservation.ORACLE, FirstFitAllocator),
}
"""The first three are the published baselines, whose allocator is the buddy allocator."""

SYSTEMS = (*CONTIGUOUS, PAGED)


def simulate(system: str, jobs: Sequence[Job]) -> Result:
    """Run one of ``SYSTEMS`` on the GPU-like machine, saturated; a tenth of the requests warms it up."""
    meter = Meter(len(jobs) // 10, saturated=True)
    if system == PAGED:
        return simulate_paged(jobs, SimulatedReplica(paged_config()), meter)
    reservation, allocator = CONTIGUOUS[system]
    return simulate_contiguous(jobs, reservation, allocator(POOL_SLOTS), GPU_LIKE, meter)


def watched(name: str, cases: Sequence[Case]) -> Iterable[Case]:
    """The cases, with a progress bar where somebody watches."""
    return tqdm(cases, desc=name, unit="case", disable=None)
