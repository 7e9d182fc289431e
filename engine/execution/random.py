"""Counter-based random numbers: a draw is a function of (seed, position, candidate) and of nothing else.

No generator has state, so a draw is the same in any batch row, after any preemption, on any replica and on
any device. The mixing is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014), an exact integer function; only the last step, to float64, rounds.

    key(seed, position)  = mix(mix(seed + GOLDEN) ^ (position + 1) * GOLDEN)      (modulo 2**64)
    bits(key, candidate) = mix(key + (candidate + 1) * GOLDEN)
    uniform              = ((bits >> 12) + 0.5) * 2**-52              (exact, so never 0 and never 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def draw_key(seed: int, position: int) -> int:
    """Key of all draws for the token at absolute ``position``; a signed 64-bit integer."""
    return _signed(_mix(seed_bits(seed) ^ ((position + 1) * _GOLDEN & _MASK)))


def seed_bits(seed: int) -> int:
    """The half of a key's work that does not depend on the position; below ``2**64``."""
    return _mix((seed + _GOLDEN) & _MASK)


def exponential(keys: Tensor, candidates: Tensor) -> Tensor:
    """Standard exponential draws, float64, above 0; ``keys`` and ``candidates`` are int64 and broadcast."""
    z = keys + (candidates + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    uniform = (_shift(z, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(uniform)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX_1 & _MASK
    z = (z ^ (z >> 27)) * _MIX_2 & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


def _shift(z: Tensor, bits: int) -> Tensor:
    # torch's shift of int64 copies the sign; a logical shift masks the copies away
    return (z >> bits) & ((1 << (64 - bits)) - 1)
