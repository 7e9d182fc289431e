"""Products in float32 whose bits do not depend on the number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.jit import jit

BLOCK_K = 16  # operands lie whole in registers
FEW_ROWS = 16
FEW, MANY = (16, 32, 4), (64, 64, 4)  # rows and columns of a tile, warps


def options(num_warps: int, *, hip: bool) -> dict[str, int]:
    """The options of a launch. On AMD all tiles take one shape of instruction: each adds in its own order."""
    return {"num_warps": num_warps, "matrix_instr_nonkdim": 16} if hip else {"num_warps": num_warps}


@jit(varying=("rows",))
def linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid ``(column tiles, row tiles)``. Each element is one chain of multiply-adds over ascending k.

    On NVIDIA, that is; see :func:`options` for AMD. So it does not matter how large the tile is that computes
    it, and which other rows are in it.
    """
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, IN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_mask = (m < rows)[:, None] & (k < IN)[None, :]
        w_mask = (n < OUT)[None, :] & (k < IN)[:, None]
        a = tl.load(x + m[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        b = tl.load(weight + n[None, :] * IN + k[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < OUT, other=0.0)[None, :]
    tl.store(out + m[:, None] * OUT + n[None, :], acc, mask=(m < rows)[:, None] & (n < OUT)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[T, K] -> [T, N]`` of float32: ``x @ weight.T + bias``."""
    rows, width = x.shape[0], weight.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block_m, block_n, num_warps = FEW if rows <= FEW_ROWS else MANY
    linear_kernel[(triton.cdiv(width, block_n), triton.cdiv(rows, block_m))](
        out,
        x,
        weight,
        bias if bias is not None else weight,
        rows,
        x.stride(0),
        IN=weight.shape[1],
        OUT=width,
        BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        **options(num_warps, hip=torch.version.hip is not None),
    )
    return out
