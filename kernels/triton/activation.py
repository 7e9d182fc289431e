"""Gated activations of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import Activation
from kernels.triton.jit import jit

BLOCK = 1024  # columns of one program
GELU_TANH = {Activation.SILU: False, Activation.GELU_TANH: True}  # of each activation that the kernel knows


@jit()
def activate_mul_kernel(
    out: tl.tensor,
    gate_up: tl.tensor,
    row_stride: tl.tensor,
    WIDTH: tl.constexpr,
    GELU_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program computes ``BLOCK`` columns of one row: ``gate * sigmoid(z)``, rounded to the dtype, times up.

    ``z`` is the gate for SiLU. For GELU in its tanh approximation it is twice the argument of tanh, since
    ``(1 + tanh(u)) / 2 = sigmoid(2 * u)``.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_at = gate_up + row * row_stride + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=mask, other=0.0)
    z = gate
    if GELU_TANH:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    active = (gate / (1.0 + tl.exp(-z))).to(up.dtype)
    tl.store(out + row * WIDTH + columns, active * up, mask=mask)


def activate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """See :meth:`kernels.interface.Kernels.activate_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        activate_mul_kernel[grid](
            out,
            gate_up,
            gate_up.stride(0),
            WIDTH=width,
            GELU_TANH=GELU_TANH[activation],
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
