"""Weights in few bits: what their codes mean, and how they are chosen.

A matrix ``[N, K]`` is cut along ``k`` into groups of 32. A weight is ``code * scale + minimum``, with one scale
and one minimum for each row and group. Codes of 4 bits are 0 to 15; codes of 8 bits are -127 to 127 and have no
minimum. GGUF files call the two Q4_1 and Q8_0. A product codes the rows of ``x`` likewise, in 8 bits and in
groups of 32, and multiplies integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 32
"""``k`` of a group; the last one of a row may be shorter."""

NOT_EXACT = "the weights are not exactly what codes stand for"
NOT_FINITE = "a weight is not finite"
TOO_LARGE = "a weight is too large for the scales, which are float16"

_ROWS = 16
"""Rows whose groups are looked at together; CPUs with shorter vectors take fewer."""

_AT_ONCE = 1 << 19
"""Weights that are coded at a time: what is computed of them stays in a processor's cache."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix as codes. Scales and minima are float16, in a wider type."""

    bits: int  # 4 or 8
    codes: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N, groups]
    minima: Tensor | None  # the same, with 4 bits

    def decode(self) -> Tensor:
        """The weights in float32, ``[N, K]``."""
        group_of = torch.arange(self.codes.shape[1]) // GROUP
        weight = self.codes * self.scales[:, group_of]
        return weight if self.minima is None else weight + self.minima[:, group_of]


def encode(weight: Tensor, bits: int) -> CodedMatrix:
    """The codes of ``weight`` ``[N, K]``, of any float dtype.

    With 8 bits the largest size gets code 127; with 4 bits the smallest weight gets 0 and the largest 15. Scale
    and minimum are then those with the least squares of errors for these codes. Weights that were such codes
    before they were rounded to bfloat16, as those of a GGUF file, get their codes back, and scales and minima
    nearer to the file's than the rounded weights are.

    Raises ``ValueError`` for weights that are not finite or too large for float16.
    """
    rows, columns = weight.shape
    groups = -(-columns // GROUP)
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, groups)
    minima = torch.empty(rows, groups) if bits == 4 else None
    step = max(_AT_ONCE // max(columns, 1), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        codes[part], scales[part], low = _encode(weight[part].float(), bits)
        if minima is not None:
            minima[part] = low
    return CodedMatrix(bits, codes, scales, minima)


def _encode(wide: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima of rows."""
    rows, columns = wide.shape
    if not bool(wide.isfinite().all()):
        raise ValueError(NOT_FINITE)
    if columns % GROUP:  # with copies of the last column, so that extremes stay
        wide = torch.cat([wide, wide[:, -1:].expand(rows, -columns % GROUP)], dim=1)
    wide = wide.view(rows, -(-columns // GROUP), GROUP)
    if bits == 8:
        codes = (wide / _nonzero(wide.abs().amax(-1, keepdim=True) / 127.0)).round_()
        scales = _half((codes * wide).sum(-1, keepdim=True) / _nonzero(codes.square().sum(-1, keepdim=True)))
        minima = torch.zeros_like(scales)
    else:
        low = wide.amin(-1, keepdim=True)
        codes = ((wide - low) / _nonzero((wide.amax(-1, keepdim=True) - low) / 15.0)).round_()
        code_mean, mean = codes.mean(-1, keepdim=True), wide.mean(-1, keepdim=True)
        away = codes - code_mean
        slope = (away * (wide - mean)).sum(-1, keepdim=True) / _nonzero(away.square().sum(-1, keepdim=True))
        scales = _half(slope)
        minima = _half(mean - scales * code_mean)
        codes = ((wide - minima) / _nonzero(scales)).round_().clamp_(0.0, 15.0)
    return codes.view(rows, -1)[:, :columns].to(torch.int8), scales.squeeze(-1), minima.squeeze(-1)


def are_codes(weight: Tensor, bits: int) -> bool:
    """Whether ``weight`` ``[N, K]`` probably was decoded from such codes and then rounded to 16 bits.

    Some rows are tried, which takes next to no time; :func:`is_exact` knows. Parts of a matrix may be of
    another origin: several matrices stacked, of which one was trained further, or rows of new tokens.
    """
    tried = weight[:: max(weight.shape[0] // 4, 1)].float()
    if not tried.numel() or weight.shape[1] < GROUP or not bool(tried.isfinite().all()):
        return False
    return float(_near(encode(tried, bits), tried).mean()) > 0.99


def is_exact(matrix: CodedMatrix, weight: Tensor) -> bool:
    """Whether all of ``weight``, of which ``matrix`` has the codes, was decoded from such codes.

    If it was, codes lose nothing. Weights of another origin miss by up to half a step, most of them by far more
    than rounding to 16 bits moves them. A few miss everywhere, and half of a group now and then, so those of a
    row count together, and those of a group in neighboring rows.
    """
    near = _near(matrix, weight.float())
    rows, columns = near.shape
    blocks = F.pad(near, (0, -columns % GROUP, 0, -rows % _ROWS), value=1.0)
    blocks = blocks.view(-1, _ROWS, blocks.shape[1] // GROUP, GROUP).mean((1, 3))
    return bool((near.mean(1) >= 7 / 8).all()) and bool((blocks >= 3 / 4).all())


def _near(matrix: CodedMatrix, weight: Tensor) -> Tensor:
    """1.0 where rounding to 16 bits may be all that sets a weight apart from its code, else 0.0."""
    steps = matrix.scales[:, torch.arange(weight.shape[1]) // GROUP].abs()
    return ((matrix.decode() - weight).abs() <= 2.0**-8 * weight.abs() + 2.0**-6 * steps).float()


def code_rows(x: Tensor) -> Tensor:
    """What a product makes of the rows of ``x`` ``[T, K]``: coded in 8 bits and decoded, in float32."""
    rows, columns = x.shape
    wide = F.pad(x.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    size = wide.abs().amax(-1, keepdim=True)
    scale = size * (1.0 / 127.0)
    inverse = torch.full_like(size, 127.0).div_(size)  # torch's ``127.0 / size`` multiplies by the reciprocal
    inverse = torch.where(scale > 0, inverse, 0.0).clamp_(max=torch.finfo(torch.float32).max)
    codes = (wide * inverse).round_()
    return (codes * scale).view(rows, -1)[:, :columns]


def _half(x: Tensor) -> Tensor:
    """As it is after a round trip through float16."""
    rounded = x.half().float()
    if not bool(rounded.isfinite().all()):
        raise ValueError(TOO_LARGE)
    return rounded


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
