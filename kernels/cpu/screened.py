"""An output head of which only what decides the next token is computed (``screening.cpp``)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.calls import DTYPE_CODES, Calls
from kernels.cpu.coded import CodedLinear
from kernels.cpu.linear import PanelLinear, check_input, dense_rows
from kernels.cpu.panels import panel_columns
from kernels.interface import Choices, PackedLinear


class _Descriptor(ctypes.Structure):
    """``ScreenedWeight`` of ``screening.cpp``."""

    _fields_ = (
        ("exact", ctypes.c_void_p),
        ("coded", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
    )


class ScreenedLinear(PackedLinear):
    """A weight, ``whole``, in panels, and once more in 8 bits, with the error of these codes for each row."""

    screened_rows = 4
    __slots__ = ("_coded", "_descriptor", "_errors", "address", "in_features", "out_features", "whole")

    def __init__(self, calls: Calls, weight: Tensor, whole: PanelLinear, num_threads: int) -> None:
        """``whole`` is ``weight`` ``[N, K]``, packed without a bias.

        Raises ``ValueError`` for weights that cannot be coded.
        """
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.whole = whole
        self.out_features, self.in_features = weight.shape
        self._coded = CodedLinear(calls, weight, 8, None, num_threads)
        self._errors = torch.zeros(panel_columns(calls, self.out_features))
        calls(
            "quire_codes_errors",
            *(self._coded.address, DTYPE_CODES[weight.dtype], weight.data_ptr(), weight.stride(0)),
            *(self._errors.data_ptr(), num_threads),
        )
        self._descriptor = _Descriptor(whole.address, self._coded.address, self._errors.data_ptr())
        self.address = ctypes.addressof(self._descriptor)


def deciding_logits(
    calls: Calls, x: Tensor, packed: ScreenedLinear, choices: Choices, num_threads: int
) -> Tensor:
    """:meth:`kernels.interface.Kernels.deciding_logits`; raises as :func:`kernels.cpu.linear.linear` does."""
    rows = x.shape[0]
    check_input(x, packed.whole.dtype, packed.in_features)
    x = dense_rows(calls, x)
    y = calls.empty("logits", (rows, packed.out_features), torch.float32)
    failed = calls(
        "quire_deciding_logits",
        *(packed.address, x.data_ptr(), x.stride(0), rows),
        *(choices.temperature.data_ptr(), choices.keys.data_ptr(), y.data_ptr(), num_threads),
    )
    if failed:
        raise MemoryError(f"no memory for the logits of {rows} rows")
    return y
