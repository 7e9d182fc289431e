"""What the weights in panels share: memory that starts on a cache line, and a bias as long as the panels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.calls import Arena, Calls

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_ARENA = 64 << 20  # bytes of an allocation; what is never written takes no memory


def panel_columns(calls: Calls, out_features: int) -> int:
    """Columns of the panels that hold ``out_features``: a multiple of the kernels' width."""
    width: int = calls("quire_linear_width")
    return -(-out_features // width) * width


def aligned_buffer(calls: Calls, size: int) -> tuple[Tensor, int]:
    """What keeps the memory of ``size`` bytes, and the address where they start.

    The weights of a model lie one after the other in a few large allocations: numpy asks the system for large
    pages for them, with which a product of one row takes a tenth less time.
    """
    arena = calls.weight_arena
    start = -(-arena.free // _ALIGNMENT) * _ALIGNMENT
    if start + size > arena.end:
        memory = torch.from_numpy(np.empty(max(size, _ARENA) + _ALIGNMENT, dtype=np.uint8))
        arena = calls.weight_arena = Arena(memory, memory.data_ptr(), memory.data_ptr() + memory.numel())
        start = -(-arena.free // _ALIGNMENT) * _ALIGNMENT
    arena.free = start + size
    return arena.memory, start


def give_back(calls: Calls, size: int, start: int) -> None:
    """The last buffer, of ``size`` bytes from ``start`` on, is not needed: the next one takes its place."""
    arena = calls.weight_arena
    if arena.free == start + size:
        arena.free = start


def padded_bias(bias: Tensor | None, columns: int) -> tuple[Tensor | None, int | None]:
    """``bias`` ``[N]`` in float32 with zeros up to ``columns``, and its address."""
    if bias is None:
        return None, None
    padded = torch.zeros(columns, dtype=torch.float32)
    padded[: len(bias)] = bias.detach()
    return padded, padded.data_ptr()
