"""What the parts of the experiment hand to the command: tables, figures with bars, plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from loadtests.experiments.memory.constants import GPU_LIKE, POOL_SLOTS
from loadtests.experiments.memory.contiguous import Reservation, simulate_contiguous
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import PAGED, Machine, Memory, simulate_paged
from loadtests.experiments.memory.static_batches import STATIC, simulate_static
from loadtests.findings import Findings, Plot, Table

SYSTEMS = (STATIC, *(reservation.value for reservation in Reservation), PAGED)


__all__ = ["PAGED", "STATIC", "SYSTEMS", "Findings", "Plot", "Table", "progress_bar", "simulate"]


@contextmanager
def progress_bar(name: str, requests: int) -> Iterator[Callable[[], object]]:
    """A bar that each ended request moves; silent where nobody watches."""
    with tqdm(total=requests, desc=name, unit="request", unit_scale=True, disable=None) as bar:
        yield bar.update


def simulate(
    system: str,
    jobs: Sequence[Job],
    progress: Callable[[], object],
    *,
    saturated: bool = True,
    memory: Memory | None = None,
) -> Result:
    """Run one of ``SYSTEMS`` on the GPU-like machine; a tenth of the requests warms it up."""
    memory = memory or Memory()
    meter = Meter(system, len(jobs) // 10, saturated, POOL_SLOTS)
    if system == STATIC:
        return simulate_static(jobs, GPU_LIKE, meter, progress=progress)
    if system == PAGED:
        scheduler, _ = memory.scheduler()
        machine = Machine(GPU_LIKE, memory.block_size)
        return simulate_paged(jobs, scheduler, machine, meter, memory.block_size, progress=progress)
    return simulate_contiguous(jobs, Reservation(system), GPU_LIKE, meter, progress=progress)
