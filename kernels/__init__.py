"""Attention and the other operations of a decoder, behind one interface: :mod:`kernels.interface`."""

from kernels.interface import (
    Activation,
    AttentionMetadata,
    AttentionOptions,
    HeadLayout,
    Kernels,
    PackedLinear,
    QKNorm,
    Recording,
    kv_pool_shape,
)
from kernels.registry import available, get_kernels

__all__ = [
    "Activation",
    "AttentionMetadata",
    "AttentionOptions",
    "HeadLayout",
    "Kernels",
    "PackedLinear",
    "QKNorm",
    "Recording",
    "available",
    "get_kernels",
    "kv_pool_shape",
]
