"""Choose an implementation by name or by device."""

from __future__ import annotations

import torch

from kernels.interface import Kernels

NAMES = ("auto", "reference", "cpu", "triton")


def available(device: torch.device) -> list[str]:
    """Names that can run on ``device``, best first (``cpu`` may still fall back where no compiler is)."""
    return ["triton", "reference"] if device.type == "cuda" else ["cpu", "reference"]


def get_kernels(name: str = "auto", device: torch.device | str = "cpu", num_threads: int = 1) -> Kernels:
    """The kernels called ``name`` for ``device``; ``auto`` takes the best one.

    ``num_threads`` is how many threads the CPU kernels use. ``auto`` on a CPU without a C++ compiler warns
    once and returns ``reference``. Raises ``ValueError`` for an unknown name or one that cannot run there.
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
        from kernels.cpu import CpuKernels

        return CpuKernels(num_threads)
    from kernels.triton import TritonKernels

    return TritonKernels(device)
