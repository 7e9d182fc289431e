"""Attention and the other operations of a decoder, behind one interface: :mod:`kernels.interface`.

Names are imported at first use, so that ``import kernels`` is light and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.activation import Activation
    from kernels.interface import (
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

_ELSEWHERE = {
    "Activation": "kernels.activation",
    "available": "kernels.registry",
    "get_kernels": "kernels.registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "kernels.interface")), name)
