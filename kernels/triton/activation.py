"""SiLU times up: the gate of a Llama MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.jit import jit

BLOCK = 1024  # columns of one program


@jit()
def silu_mul_kernel(
    out: tl.tensor, gate_up: tl.tensor, row_stride: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program computes ``BLOCK`` columns of one row. SiLU is rounded to the dtype, then multiplied."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_at = gate_up + row * row_stride + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=mask, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * WIDTH + columns, silu * up, mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``[T, 2 * I] -> [T, I]``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        silu_mul_kernel[grid](out, gate_up, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK, num_warps=4)
    return out
