"""Chooses an implementation by name or by device."""

from __future__ import annotations

import os

import torch

from kernels.interface import Kernels

NAMES = ("auto", "reference", "cpu", "triton")


def available(device: torch.device) -> list[str]:
    """Names that can run on ``device``, best first; ``cpu`` also needs a C++ compiler."""
    return ["triton", "reference"] if device.type == "cuda" else ["cpu", "reference"]


def get_kernels(name: str = "auto", device: torch.device | str = "cpu", num_threads: int = 1) -> Kernels:
    """The kernels called ``name`` for ``device``; ``auto`` takes the best one.

    ``num_threads`` is the threads of the CPU kernels. Without a C++ compiler, ``auto`` on a CPU warns once
    and returns ``reference``. Raises ``ValueError`` for an unknown name, for one that cannot run on ``device``,
    and for one that is unavailable: no C++ compiler, or no Triton.
    """
    device = torch.device(device)
    if name not in NAMES:
        raise ValueError(f"kernels={name!r} is unknown; choose one of {', '.join(NAMES)}")
    if name == "auto":
        name = available(device)[0]
        if name == "cpu":
            from kernels.cpu import load_or_reference

            return load_or_reference(num_threads)
    if name == "reference":
        from kernels.reference import ReferenceKernels

        return ReferenceKernels()
    if name == "cpu":
        if device.type != "cpu":
            raise ValueError(f"kernels='cpu' cannot run on device {device}; use 'triton' or 'reference'")
        from kernels.cpu import BuildError, CpuKernels

        try:
            return CpuKernels(num_threads)
        except BuildError as error:
            reason = " ".join(str(error).split())[:500]  # the compiler may have much to say
            raise ValueError(f"kernels='cpu' cannot be built: {reason}") from error
    return _triton(device)


def _triton(device: torch.device) -> Kernels:
    # Its interpreter, for tests, runs on the CPU.
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise ValueError(
            f"kernels='triton' cannot run on device {device}; it needs a CUDA or ROCm device, or device 'cpu' "
            "with TRITON_INTERPRET=1 set before start; use kernels='auto' otherwise"
        )
    try:
        from kernels.triton import TritonKernels
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ValueError(
            "kernels='triton' needs the package triton, which is not installed; install it or use "
            "kernels='reference'"
        ) from error
    return TritonKernels(device)
