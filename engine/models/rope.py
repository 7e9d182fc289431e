"""The table of rotary angles that the kernels read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeConfig, RopeType


def rope_table(config: ModelConfig, positions: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    """Cosine and sine of each position: float32 ``[positions, 2, head_dim / 2]``.

    ``positions`` is how many the engine serves, by default all that the model has: 64 MiB for 131,072 positions
    and heads of 128. Index 0 of the second dimension is the cosine. YaRN's attention factor is multiplied in.
    The products are taken in float32, as transformers takes them, so that the angles agree to the last bit.
    """
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
    served = config.max_position_embeddings if positions is None else positions
    table = torch.empty(served, 2, config.head_dim // 2)
    angles = torch.outer(torch.arange(served, dtype=torch.float32), frequencies)
    torch.cos(angles, out=table[:, 0])
    torch.sin(angles, out=table[:, 1])
    if scale != 1.0:
        table *= scale
    return table.to(device)


def inverse_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of dimensions, float32 ``[dim / 2]``, and the factor on cos and sin.

    Sources: RoFormer (arXiv 2104.09864) for the default; position interpolation (arXiv 2306.15595) for
    linear; the Llama 3 report (arXiv 2407.21783) and its reference code for llama3; YaRN (arXiv 2309.00071).
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type is RopeType.LINEAR:
        return frequencies / rope.factor, 1.0
    if rope.type is RopeType.LLAMA3:
        return _llama3(frequencies, rope), 1.0
    if rope.type is RopeType.YARN:
        return _yarn(rope.theta**exponents, rope, dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are slowed by ``factor``, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    is_long = wavelengths > rope.original_max_position / rope.low_freq_factor
    is_short = wavelengths < rope.original_max_position / rope.high_freq_factor
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(wavelength_scale: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, with a linear ramp between (NTK by parts)."""

    def dimension_that_turns(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * wavelength_scale)) * (1 - kept) + (1.0 / wavelength_scale) * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
