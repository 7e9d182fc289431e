"""The Triton implementation of :class:`kernels.interface.Kernels`, for CUDA and ROCm devices."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import Activation
from kernels.interface import (
    AttentionMetadata,
    AttentionOptions,
    HeadLayout,
    Kernels,
    PackedLinear,
    QKNorm,
)
from kernels.triton.activation import activate_mul
from kernels.triton.attention import attention
from kernels.triton.jit import interpreting
from kernels.triton.kv_write import rope_and_write_kv
from kernels.triton.linear import linear
from kernels.triton.norm import rms_norm
from kernels.triton.soft_cap import soft_cap


@dataclass(slots=True)
class PlainLinear(PackedLinear):
    """The weight as in the checkpoint: cuBLAS and hipBLASLt need no other layout."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int


class TritonKernels(Kernels):
    """Triton kernels on one CUDA or ROCm device; matrix products in half precision by the vendor's library.

    The library picks its algorithm by the number of rows, so in half precision a row's bits may depend on its
    batch. In float32 they do not, see ``docs/kernels.md``.

    Raises ``ValueError`` for a device that cannot run Triton. With ``TRITON_INTERPRET=1`` in the environment
    before the first import, kernels are interpreted and ``device`` must be ``cpu``; use float32 or float16, for
    the interpreter's products in bfloat16 are wrong.
    """

    name = "triton"

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        wanted = "cpu" if interpreting() else "cuda"
        if device.type != wanted:
            raise ValueError(
                f"kernels='triton' cannot run on device {device}; it needs a CUDA or ROCm device, or device "
                "'cpu' with TRITON_INTERPRET=1 set before start; use kernels='auto' otherwise"
            )
        self._device = device
        self._target_programs = 8
        if device.type == "cuda":
            # Several programs a multiprocessor hide each other's loads.
            self._target_programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
            # The contract says float32 sums; the library may otherwise add partial sums in the weight's dtype.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, whatever device the tensors are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PlainLinear(weight, bias, in_features=weight.shape[1], out_features=weight.shape[0])

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if not isinstance(packed, PlainLinear):
            raise TypeError(f"this weight was packed as {type(packed).__name__} by other kernels than 'triton'")
        if x.dtype == torch.float32:
            with self._on_device():
                return linear(x, packed.weight, packed.bias)
        return F.linear(x, packed.weight, packed.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        with self._on_device():
            return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        with self._on_device():
            return rms_norm(x, weight, eps, residual)

    def activate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        with self._on_device():
            return activate_mul(gate_up, activation)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        with self._on_device():
            return soft_cap(x, cap)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        with self._on_device():
            return rope_and_write_kv(qkv, layout, cos_sin, kv_layer, metadata, qk_norm)

    def attention(
        self, q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        with self._on_device():
            return attention(q, kv_layer, metadata, options, self._target_programs)
