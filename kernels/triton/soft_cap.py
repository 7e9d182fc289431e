"""Soft caps, on attention scores (a device function) and on logits (a kernel): ``cap * tanh(x / cap)``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.jit import jit

BLOCK = 1024  # elements of one program


@jit()
def capped(x: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """``CAP * tanh(x / CAP)`` of float32, to a few units in the last place.

    Triton has no tanh that runs everywhere. Near 0, where the formula with powers cancels, its Taylor series
    stands in. Multiply-adds are spelled out: left to the compiler, they might differ between kernels.
    """
    y = x * (1.0 / CAP)
    size = tl.abs(y)
    square = y * y
    series = tl.fma(square, 62.0 / 2835.0, -17.0 / 315.0)
    series = tl.fma(square, series, 2.0 / 15.0)
    series = tl.fma(square, series, -1.0 / 3.0)
    series = tl.fma(square * y, series, y)
    power = tl.exp2(size * -2.8853900817779268)  # exp(-2 |y|)
    far = (1.0 - power) / (1.0 + power)
    far = tl.where(y < 0.0, -far, far)
    return tl.where(size < 0.25, series, far) * CAP


@jit(varying=("size",))
def soft_cap_kernel(x: tl.tensor, size: tl.tensor, CAP: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One program caps ``BLOCK`` elements of ``x`` in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    tl.store(x + at, capped(tl.load(x + at, mask=mask, other=0.0), CAP), mask=mask)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """See :meth:`kernels.interface.Kernels.soft_cap`."""
    if x.numel():
        soft_cap_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), CAP=cap, BLOCK=BLOCK, num_warps=4)
    return x
