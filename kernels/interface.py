"""The contract between the engine and its kernels.

Three implementations satisfy it: ``reference`` (plain torch, the definition of right), ``cpu`` (C++) and
``triton`` (CUDA, ROCm). Tests hold them to the same answers.

Determinism is part of the contract on a CPU: a row of any result depends on that row and on the keys and
values it attends to, and on nothing else: not on the other rows, their number, the chunking or the thread
count. Implementations reduce in a fixed order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the rows of one step stand; the same for every layer.

    ``R`` requests have ``T`` new tokens in all; request ``r`` owns the rows
    ``query_start[r]:query_start[r + 1]`` of every flat tensor, at consecutive positions that end at
    ``context_lens[r] - 1``.
    """

    query_start: Tensor  # int32 [R + 1], first is 0, last is T
    context_lens: Tensor  # int32 [R], tokens in the KV cache once this step's are written
    block_tables: Tensor  # int32 [R, max_blocks], physical block of each logical block; the rest is padding
    positions: Tensor  # int64 [T], position of each new token in its sequence
    slot_mapping: Tensor  # int64 [T], block * block_size + offset: where each new token's K and V go
    max_query_len: int  # longest query of the step, in tokens
    max_context_len: int  # longest context of the step, in tokens


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the columns of a fused QKV row split into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_dim(self) -> int:
        """Columns of a fused row: all query heads, then all key heads, then all value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Per-head RMS norm of queries and keys before RoPE (Qwen3)."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float


class PackedLinear(ABC):
    """A weight in the layout that one implementation's :meth:`Kernels.linear` wants."""

    in_features: int
    out_features: int


class Kernels(ABC):
    """What the decoder needs from a device. All tensors are on that device and share one float dtype."""

    name: str

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Take over ``weight`` ``[N, K]`` and ``bias`` ``[N]``; the caller drops its own references."""

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """``[T, K] -> [T, N]``: ``x @ weight.T + bias``, accumulated in float32, returned in ``x.dtype``."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``[T, H] -> [T, H]``: normed in float32, rounded to ``x.dtype``, then times ``weight``."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, then the RMS norm of ``residual``; returns ``[T, H]``."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2 * I] -> [T, I]``: ``silu(gate) * up``, gate being the first half of the columns."""

    @abstractmethod
    def rope_and_write_kv(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        """Norm (if any) and rotate queries and keys, write K and V to their slots; return the queries.

        ``qkv`` is ``[T, layout.qkv_dim]`` and may be overwritten. ``cos_sin`` is float32
        ``[max_positions, 2, rotary_dim / 2]`` (cos, then sin; any scaling of the RoPE type already applied);
        the first ``rotary_dim`` elements of a head are rotated in halves (element ``i`` pairs with
        ``i + rotary_dim / 2``). ``kv_layer`` is one layer's view, see :meth:`attention`. Returns
        ``[T, num_heads, head_dim]``, contiguous or a view of ``qkv`` whose last two dimensions are dense.
        """

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Causal attention of each query over its request's blocks.

        ``q`` is ``[T, num_heads, head_dim]`` (rows may be strided). ``kv_layer`` is the strided view
        ``[blocks, 2, block_size, kv_heads, head_dim]`` of the pool (index 0 keys, 1 values; the last three
        dimensions are dense). Query ``i`` of a request attends to positions ``0..p`` with ``p`` its own, or
        to ``max(0, p - sliding_window + 1)..p``. Softmax in float32. Returns ``[T, num_heads, head_dim]``
        contiguous, in ``q.dtype``.
        """


def kv_pool_shape(
    num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """The pool is block-major, so that a block with all its layers is one contiguous unit to copy."""
    return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)


SUPPORTED_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
