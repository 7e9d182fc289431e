"""The CPU matrix product: weights packed once, multiplied by the C++ kernel or by oneDNN.

Our kernel (``gemm.cpp``) keeps bf16 and fp16 weights at two bytes, widens them on the way and accumulates in
float32; with AVX-512 BF16 it multiplies bf16 in hardware (``gemm_bf16.h``). Each element of a result is one
chain of multiply-adds over k in ascending order, so its bits depend on its row of ``x`` and its row of the
weight alone.

On CPUs with AMX, which our kernel does not use, oneDNN's packed product is many times faster for many rows and
takes over for bf16, after a self-test with each weight.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from kernels.cpu.calls import DTYPE_CODES, Calls
from kernels.cpu.coded import CodedLinear
from kernels.cpu.panels import aligned_buffer, padded_bias, panel_columns
from kernels.interface import SUPPORTED_DTYPES, PackedLinear

logger = logging.getLogger(__name__)

_ONEDNN_MIN_ROWS = 4  # with fewer rows it takes another path, whose bits differ


class _Descriptor(ctypes.Structure):
    """``PackedWeight`` of ``gemm.cpp``."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class PanelLinear(PackedLinear):
    """A weight in panels for ``gemm.cpp``, in its own dtype, and its bias in float32."""

    __slots__ = ("_bias", "_buffer", "_descriptor", "address", "dtype", "in_features", "out_features")

    def __init__(self, calls: Calls, weight: Tensor, bias: Tensor | None, num_threads: int) -> None:
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        columns = panel_columns(calls, self.out_features)
        depth = self.in_features
        if self.dtype == torch.bfloat16 and calls("quire_linear_bf16_in_pairs"):
            depth += depth % 2  # two neighbors of k lie together
        self._buffer, panels = aligned_buffer(calls, columns * depth * weight.itemsize)
        self._bias, bias_address = padded_bias(bias, columns)
        dtype = DTYPE_CODES[self.dtype]
        self._descriptor = _Descriptor(panels, bias_address, self.in_features, self.out_features, dtype)
        self.address = ctypes.addressof(self._descriptor)
        calls("quire_linear_pack", self.address, weight.data_ptr(), weight.stride(0), num_threads)


class OneDnnLinear(PackedLinear):
    """A weight in oneDNN's own layout for this CPU. It runs on torch's threads."""

    __slots__ = ("_bias", "_weight", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self.out_features))
        if rows < _ONEDNN_MIN_ROWS:
            padded = x.new_zeros((_ONEDNN_MIN_ROWS, self.in_features))
            padded[:rows] = x
            return self(padded)[:rows]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._weight, self._bias, "none", [], "")
        return y


def prefers_onednn(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies ``dtype`` in hardware that our kernel does not use: bf16 with AMX.

    The CPU's flags decide, not a timing, so that equal machines give equal bits.
    """
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.cpu._is_amx_tile_supported())


def try_onednn(weight: Tensor, bias: Tensor | None) -> OneDnnLinear | None:
    """Pack for oneDNN and test the result; ``None`` if torch refuses, or if the test fails.

    The test compares with ``F.linear``, and the bits of a row alone, among few and among many.
    """
    try:
        packed = OneDnnLinear(weight, bias)
        x = torch.linspace(-1.0, 1.0, 33 * packed.in_features).sin().reshape(33, -1).to(packed.dtype)
        y = packed(x)
        expected = torch.nn.functional.linear(x, weight, bias)
        near = torch.allclose(y.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        same = torch.equal(packed(x[:1]), y[:1]) and torch.equal(packed(x[5:12]), y[5:12])
    except RuntimeError as error:
        logger.info("oneDNN does not pack %s weights here: %s", weight.dtype, str(error).partition("\n")[0])
        return None
    if not (near and same):
        logger.warning("oneDNN's product fails its self-test for a weight of shape %s", tuple(weight.shape))
        return None
    return packed


def pack_linear(calls: Calls, weight: Tensor, bias: Tensor | None, num_threads: int) -> PackedLinear:
    """Pack ``weight`` ``[N, K]`` and ``bias`` ``[N]`` for :func:`linear`; neither is kept.

    Raises ``ValueError`` for a weight that is not two-dimensional, a dtype other than bf16, fp16 and fp32, or a
    bias of another shape.
    """
    if weight.dim() != 2:
        raise ValueError(f"a linear weight has 2 dimensions, not {weight.dim()} (shape {tuple(weight.shape)})")
    if weight.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"weights are {weight.dtype}, but the CPU kernels take bfloat16, float16 or float32")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit a weight of {tuple(weight.shape)}")
    if weight.numel() and prefers_onednn(weight.dtype) and (packed := try_onednn(weight, bias)) is not None:
        return packed
    return PanelLinear(calls, weight, bias, num_threads)


def linear(calls: Calls, x: Tensor, packed: PackedLinear, num_threads: int) -> Tensor:
    """``[T, K] -> [T, N]``: ``x @ weight.T + bias``, accumulated in float32, in ``x.dtype``, dense.

    Rows of ``x`` may be strided. Raises ``ValueError`` for an ``x`` of another dtype or width than the weight,
    and ``MemoryError`` if there is no scratch memory.
    """
    rows, depth = x.shape
    if isinstance(packed, CodedLinear):
        return _coded(calls, x, packed, num_threads)
    if not isinstance(packed, PanelLinear | OneDnnLinear):
        raise TypeError(f"{type(packed).__name__} was packed by other kernels")
    check_input(x, packed.dtype, packed.in_features)
    if isinstance(packed, OneDnnLinear):
        calls.give_up()
        return packed(x)
    x = dense_rows(calls, x)
    y = calls.empty("product", (rows, packed.out_features), packed.dtype)
    # A recording puts the weight that comes next in place of None.
    if calls("quire_linear", packed.address, x.data_ptr(), x.stride(0), rows, y.data_ptr(), num_threads, None):
        raise MemoryError(f"no memory for the product of {rows} rows of {depth}")
    return y


def check_input(x: Tensor, dtype: torch.dtype, in_features: int) -> None:
    """Raise ``ValueError`` for an ``x`` of another dtype or width than the weight."""
    if x.dtype != dtype or x.shape[1] != in_features:
        raise ValueError(
            f"x is {x.dtype} with {x.shape[1]} columns, but the weight is {dtype} with {in_features}"
        )


def dense_rows(calls: Calls, x: Tensor) -> Tensor:
    """``x`` with the elements of a row side by side; a copy, which cannot be recorded, if they are not."""
    if x.stride(1) == 1:
        return x
    calls.give_up()
    return x.contiguous()


def _coded(calls: Calls, x: Tensor, packed: CodedLinear, num_threads: int) -> Tensor:
    rows, depth = x.shape
    if x.dtype not in SUPPORTED_DTYPES or depth != packed.in_features:
        raise ValueError(f"x is {x.dtype} with {depth} columns, but the weight has {packed.in_features}")
    x = dense_rows(calls, x)
    y = calls.empty("product", (rows, packed.out_features), x.dtype)
    failed = calls(
        "quire_codes_linear",
        *(packed.address, DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), rows, y.data_ptr(), num_threads),
    )
    if failed:
        raise MemoryError(f"no memory for the product of {rows} rows of {depth}")
    return y
