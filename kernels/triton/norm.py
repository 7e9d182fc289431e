"""RMS norm of whole rows, with or without a residual that is added first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.jit import jit


@jit()
def rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """One program a row. With ``ADD`` the sum is rounded to the residual's dtype before it is normed.

    The normed row is rounded to the weight's dtype before the product, and the product to the row's.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual + row * residual_stride + columns
        summed = (values + tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(residual_at, summed, mask=mask)
        values = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    normed = (values * scale).to(weight.dtype.element_ty) * tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + columns, normed.to(x.dtype.element_ty), mask=mask)


def norm_warps(width: int) -> int:
    """Warps for a row of ``width`` elements: each lane holds at most 32 of them up to 16,384."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """``[T, H] -> [T, H]``. With a ``residual``, it becomes ``residual + x`` in place and is normed."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    add = residual is not None
    target = residual if residual is not None else x
    rms_norm_kernel[(rows,)](
        out,
        x,
        target,
        weight,
        x.stride(0),
        target.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD=add,
        num_warps=norm_warps(width),
    )
    return out
