"""The C++ kernels behind the common interface."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.build import load_library
from kernels.cpu.linear import DTYPE_CODES, linear, pack_linear
from kernels.interface import (
    Activation,
    AttentionMetadata,
    AttentionOptions,
    HeadLayout,
    Kernels,
    PackedLinear,
    QKNorm,
)

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

_ACTIVATION_CODES = {Activation.SILU: 0, Activation.GELU_TANH: 1}

# Argument types by C function, in groups: tensor or shape, ..., threads. The sources say what each one means.
_SIGNATURES: dict[str, list[type]] = {
    "quire_rms_norm": [
        *(_INT, _POINTER, _LONG, _INT, _POINTER, _POINTER),
        *(_LONG, _LONG, _FLOAT, _INT),
    ],
    "quire_add_rms_norm": [
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _INT, _POINTER, _POINTER),
        *(_LONG, _LONG, _FLOAT, _INT),
    ],
    "quire_activate_mul": [_INT, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT],
    "quire_soft_cap": [_POINTER, _LONG, _FLOAT, _INT],
    "quire_rope_and_write_kv": [
        *(_INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG, _LONG, _INT, _POINTER, _POINTER, _FLOAT, _INT),
    ],
    "quire_attention": [
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER),
        *(_POINTER, _POINTER, _POINTER, _LONG, _LONG),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _FLOAT, _INT),
    ],
}


class CpuKernels(Kernels):
    """Kernels compiled for this CPU; see ``attention.cpp``, ``elementwise.cpp`` and ``gemm.cpp``.

    Tensors are dense in their last dimension (``kv_layer`` in its last three); rows may be strided. The bits of
    a result do not depend on ``num_threads``, batch, chunking, block size or placement of blocks. They differ
    between CPUs with vectors of different width.

    Raises :class:`kernels.cpu.build.BuildError` where the kernels cannot be compiled.
    """

    name = "cpu"

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads} but must be at least 1")
        self.num_threads = num_threads
        self._library = load_library()
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = types
            function.restype = None
        self._rms_norm = self._library.quire_rms_norm
        self._add_rms_norm = self._library.quire_add_rms_norm
        self._activate_mul = self._library.quire_activate_mul
        self._soft_cap = self._library.quire_soft_cap
        self._rope_and_write_kv = self._library.quire_rope_and_write_kv
        self._attention = self._library.quire_attention
        self._attention.restype = _INT

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack_linear(self._library, weight, bias, self.num_threads)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return linear(self._library, x, packed, self.num_threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        y = torch.empty((rows, size), dtype=x.dtype)
        self._rms_norm(
            *(DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0)),
            *(DTYPE_CODES[weight.dtype], weight.data_ptr(), y.data_ptr(), rows, size, eps, self.num_threads),
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        y = torch.empty((rows, size), dtype=x.dtype)
        self._add_rms_norm(
            *(DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(DTYPE_CODES[weight.dtype], weight.data_ptr(), y.data_ptr(), rows, size, eps, self.num_threads),
        )
        return y

    def activate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, columns = gate_up.shape
        y = torch.empty((rows, columns // 2), dtype=gate_up.dtype)
        self._activate_mul(
            *(DTYPE_CODES[gate_up.dtype], _ACTIVATION_CODES[activation]),
            *(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), rows, columns // 2, self.num_threads),
        )
        return y

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self._soft_cap(x.data_ptr(), x.numel(), cap, self.num_threads)
        return x

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        rows, row_stride = qkv.shape[0], qkv.stride(0)
        block_stride, value_offset, *_ = kv_layer.stride()
        weight_dtype, q_weight, k_weight, eps = qkv.dtype, None, None, 0.0
        if qk_norm is not None:
            weight_dtype, eps = qk_norm.q_weight.dtype, qk_norm.eps
            q_weight, k_weight = qk_norm.q_weight.data_ptr(), qk_norm.k_weight.data_ptr()
        self._rope_and_write_kv(
            *(DTYPE_CODES[qkv.dtype], qkv.data_ptr(), row_stride, rows),
            *(layout.num_heads, layout.num_kv_heads, layout.head_dim),
            *(metadata.positions.data_ptr(), metadata.slot_mapping.data_ptr()),
            *(cos_sin.data_ptr(), cos_sin.shape[2], kv_layer.data_ptr(), kv_layer.shape[2]),
            *(block_stride, value_offset),
            *(DTYPE_CODES[weight_dtype], q_weight, k_weight, eps, self.num_threads),
        )
        return qkv.as_strided(
            (rows, layout.num_heads, layout.head_dim), (row_stride, layout.head_dim, 1), qkv.storage_offset()
        )

    def attention(
        self, q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        shape = q.shape
        out = torch.empty(shape, dtype=q.dtype)
        block_stride, value_offset, *_ = kv_layer.stride()
        _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
        tables = metadata.block_tables
        failed = self._attention(
            *(
                DTYPE_CODES[q.dtype],
                q.data_ptr(),
                q.stride(0),
                kv_layer.data_ptr(),
                block_stride,
                value_offset,
            ),
            *(out.data_ptr(), metadata.query_start.data_ptr(), metadata.context_lens.data_ptr()),
            *(tables.data_ptr(), tables.stride(0), tables.shape[0], shape[1], num_kv_heads, head_dim),
            *(
                block_size,
                options.sliding_window or 0,
                options.scale,
                options.soft_cap or 0.0,
                self.num_threads,
            ),
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {shape[0]} tokens")
        return out
