"""The CPU matrix product with weights of 4 or 8 bits (``gemm_codes.cpp``)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.codes import NOT_FINITE, TOO_LARGE
from kernels.cpu.calls import DTYPE_CODES, Calls
from kernels.interface import PackedLinear

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


class _Descriptor(ctypes.Structure):
    """``CodedWeight`` of ``gemm_codes.cpp``."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


class CodedLinear(PackedLinear):
    """Codes in panels, with their scales and minima, and the bias in float32."""

    __slots__ = ("_bias", "_buffer", "_descriptor", "address", "in_features", "out_features")

    def __init__(self, calls: Calls, weight: Tensor, bits: int, bias: Tensor | None, num_threads: int) -> None:
        """Code ``weight`` ``[N, K]`` as :func:`kernels.codes.encode` does, but for rounding.

        Raises ``ValueError`` for weights that cannot be coded.
        """
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.out_features, self.in_features = weight.shape
        self._bias: Tensor | None = None
        if bias is not None:
            width: int = calls("quire_linear_width")
            self._bias = torch.zeros(-(-self.out_features // width) * width, dtype=torch.float32)
            self._bias[: self.out_features] = bias.detach()
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._descriptor = _Descriptor(None, bias_address, self.in_features, self.out_features, bits)
        self.address = ctypes.addressof(self._descriptor)
        self._buffer = torch.empty(calls("quire_codes_bytes", self.address) + _ALIGNMENT, dtype=torch.uint8)
        self._descriptor.panels = -(-self._buffer.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        failed = calls(
            "quire_codes_pack",
            *(self.address, DTYPE_CODES[weight.dtype], weight.data_ptr(), weight.stride(0), num_threads),
        )
        if failed:
            raise ValueError(NOT_FINITE if failed == 1 else TOO_LARGE)
