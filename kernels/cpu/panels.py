"""What the weights in panels share: memory that starts on a cache line, and a bias as long as the panels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.calls import Calls

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def panel_columns(calls: Calls, out_features: int) -> int:
    """Columns of the panels that hold ``out_features``: a multiple of the kernels' width."""
    width: int = calls("quire_linear_width")
    return -(-out_features // width) * width


def aligned_buffer(size: int) -> tuple[Tensor, int]:
    """Memory with room for ``size`` bytes, and the address in it where they start."""
    buffer = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    return buffer, -(-buffer.data_ptr() // _ALIGNMENT) * _ALIGNMENT


def padded_bias(bias: Tensor | None, columns: int) -> tuple[Tensor | None, int | None]:
    """``bias`` ``[N]`` in float32 with zeros up to ``columns``, and its address."""
    if bias is None:
        return None, None
    padded = torch.zeros(columns, dtype=torch.float32)
    padded[: len(bias)] = bias.detach()
    return padded, padded.data_ptr()
