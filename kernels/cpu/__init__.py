"""C++ kernels for the CPU, compiled for this machine at first use."""

from __future__ import annotations

import functools
import warnings

from kernels.cpu.build import BuildError
from kernels.cpu.kernels import CpuKernels
from kernels.interface import Kernels

__all__ = ["BuildError", "CpuKernels", "load_or_reference"]


def load_or_reference(num_threads: int = 1) -> Kernels:
    """:class:`CpuKernels`, or the reference kernels with one warning where they cannot be compiled."""
    try:
        return CpuKernels(num_threads)
    except BuildError as error:
        from kernels.reference import ReferenceKernels

        _warn_once(str(error))
        return ReferenceKernels()


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"{reason}. Quire runs on its reference kernels instead: many times slower, and without the promise "
        "that a result's bits do not depend on the batch.",
        RuntimeWarning,
        stacklevel=3,
    )
