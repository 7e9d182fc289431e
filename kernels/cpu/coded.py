"""The CPU matrix product with weights of 4 or 8 bits (``gemm_codes.cpp``)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kernels.codes import NOT_EXACT, NOT_FINITE, TOO_LARGE
from kernels.cpu.calls import DTYPE_CODES, Calls
from kernels.cpu.panels import aligned_buffer, give_back, padded_bias, panel_columns
from kernels.interface import PackedLinear


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

    def __init__(
        self,
        calls: Calls,
        weight: Tensor,
        bits: int,
        bias: Tensor | None,
        num_threads: int,
        *,
        exact: bool = False,
    ) -> None:
        """Code ``weight`` ``[N, K]`` as :func:`kernels.codes.encode` does, but for rounding.

        Raises ``ValueError`` for weights that cannot be coded, or are to be ``exact`` and are not what codes
        stand for. Their codes then keep no memory.
        """
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.out_features, self.in_features = weight.shape
        self._bias, bias_address = padded_bias(bias, panel_columns(calls, self.out_features))
        self._descriptor = _Descriptor(None, bias_address, self.in_features, self.out_features, bits)
        self.address = ctypes.addressof(self._descriptor)
        size = calls("quire_codes_bytes", self.address)
        self._buffer, self._descriptor.panels = aligned_buffer(calls, size)
        outcome = calls(
            "quire_codes_pack",
            *(self.address, DTYPE_CODES[weight.dtype], weight.data_ptr(), weight.stride(0), num_threads),
        )
        if outcome in (1, 2) or (exact and outcome):
            give_back(calls, size, self._descriptor.panels)
            raise ValueError({1: NOT_FINITE, 2: TOO_LARGE}.get(outcome, NOT_EXACT))
