"""The processors of this machine. torch takes seconds to load, so it is asked only where there may be a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.control_groups import cpu_quota
from engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

_DRIVERS = tuple(Path("/dev") / name for name in ("nvidiactl", "kfd", "dxg"))
"""One of them is there on Linux with CUDA or ROCm: NVIDIA's driver, AMD's, and that of Windows' subsystem."""


def usable_cores() -> int:
    """Number of processors that this process may use, within a container's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(int(min(cores, cpu_quota())), 1)


def on_cpu(device: str) -> bool:
    """Whether the option ``device`` means the CPU here.

    Raises:
        ConfigError: no such device here.
    """
    if device == "cpu" or (device == "auto" and not _may_have_gpu()):
        return True
    return resolve_device(device).type == "cpu"


def resolve_device(device: str) -> torch.device:
    """The device called ``device``; ``auto`` takes CUDA (or ROCm) where there is one.

    Raises:
        ConfigError: no such device here.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is unknown; choose auto, cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not supported; choose auto, cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} but torch finds no GPU here; set device to cpu")
    return chosen


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(driver.exists() for driver in _DRIVERS)
