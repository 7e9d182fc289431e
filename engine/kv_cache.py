"""The tensor that holds keys and values of all blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.models.config import ModelConfig
from kernels import kv_pool_shape


class KVCache:
    """One allocation ``[blocks, layers, 2, block_size, kv_heads, head_dim]``.

    A block with all its layers is contiguous: one unit to copy and to count. Who owns which block is the
    block pool's affair.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = kv_pool_shape(num_blocks, model.num_layers, block_size, model.num_kv_heads, model.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, so that padding never reads an old NaN.
        if device.type == "cpu":
            self.pool = _untouched_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of blocks, ``(source, destination)`` each; no destination may be a source."""
        if pairs:
            source, destination = torch.tensor(pairs, device=self.pool.device).unbind(1)
            self.pool[destination] = self.pool[source]


def _untouched_zeros(size: int) -> Tensor:
    """``size`` zero bytes at a multiple of 64, whose pages the system supplies when they are first used.

    ``torch.zeros`` writes every page: seconds at start, and memory that may never be needed.
    """
    raw = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    offset = -raw.data_ptr() % 64
    return raw[offset : offset + size]
