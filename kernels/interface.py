"""The contract between the engine and its kernels.

Three implementations satisfy it: ``reference`` (plain torch, the definition of right), ``cpu`` (C++) and
``triton`` (CUDA, ROCm). Tests hold them to the same answers.

Determinism is part of the contract on a CPU: each row of a result depends on its own input row and on the keys
and values that it attends to, and on nothing else: not on the other rows, their number, the chunking or the
number of threads. Implementations reduce in a fixed order.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which request each row of a step belongs to, and where its keys and values are; the same for every layer.

    ``R`` requests have ``T`` new tokens in all. Request ``r`` owns the rows
    ``query_start[r]:query_start[r + 1]`` of every flat tensor. They are at consecutive positions, of which the
    last is ``context_lens[r] - 1``.
    """

    query_start: Tensor  # int32 [R + 1]; the first is 0, the last is T
    context_lens: Tensor  # int32 [R], tokens in the KV cache after this step's are written
    block_tables: Tensor  # int32 [R, max_blocks], physical block of each logical block; the rest is padding
    positions: Tensor  # int64 [T], position of each new token in its sequence
    slot_mapping: Tensor  # int64 [T], block * block_size + offset: the slot of each new token's K and V
    max_query_len: int  # most new tokens of a request in this step
    max_context_len: int  # largest of context_lens


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the columns of a fused QKV row divide into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_dim(self) -> int:
        """Columns of a fused row: all query heads, then all key heads, then all value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norm of each query and key head before RoPE (Qwen3); the weights as in :meth:`Kernels.rms_norm`."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends; the same for every step."""

    scale: float  # factor on the dot product of a query and a key
    sliding_window: int | None = None  # tokens that a query sees, its own included; None: all up to its own
    soft_cap: float | None = None  # scaled scores s become soft_cap * tanh(s / soft_cap), then the mask applies


class Activation(enum.StrEnum):
    """Activation of an MLP's gate; a value is the name in ``config.json``."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"  # GELU in its tanh approximation


class PackedLinear(ABC):
    """A weight in the layout that :meth:`Kernels.linear` of one implementation reads."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """How to draw from each of ``R`` rows; all tensors are on the CPU."""

    temperature: Tensor  # float32 [R], above 0
    min_p: Tensor  # float32 [R]; 0 keeps all
    top_k: Tensor  # int64 [R]; 0 keeps all
    top_p: Tensor  # float64 [R]; 1 keeps all
    num_draws: Tensor  # int64 [R]
    keys: Tensor  # int64, of all draws, row after row


class Recording(ABC):
    """What one run asked of the device, to be done again with new contents of the same tensors."""

    @abstractmethod
    def replay(self) -> None:
        """Do it all again; results lie where those of the recorded run lay.

        Raises ``MemoryError`` if there is too little; the results are then garbage.
        """


class Kernels(ABC):
    """What the decoder needs from a device.

    All tensors are on that device. They share one float dtype except where an operation says otherwise.
    Operations with a body here are written in torch; an implementation may have faster ones.
    """

    name: str
    draws = False
    """Whether :meth:`draw` is there; the engine's sampler does it in torch otherwise."""

    own_threads = False
    """Whether nothing that takes long runs on torch's threads."""

    def in_buffers(self, run: Callable[[], Tensor]) -> Tensor:
        """Call ``run``, which uses these operations alone, and return its result.

        Their results may lie in buffers that serve the next run, too: a result of one operation holds until
        that operation's next, as a decoder needs it, those of ``embed`` and ``take_rows`` to the end of the
        run, and the result of ``run`` until the next run. So nothing is allocated.
        """
        return run()

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Call ``run`` and return its result and a recording of it, or ``None`` where there can be none.

        ``run`` takes its input from tensors that stay where they are, and uses these operations alone. Replayed
        work computes the same bits. Results hold as in :meth:`in_buffers`; a replay is a run.
        """
        return run(), None

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        """``[T], [V, H] -> [T, H]``: rows of ``table``, times ``scale`` if there is one, rounded."""
        rows = table[token_ids]
        return rows if scale is None else rows * scale

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x[rows]``: a copy."""
        return x[rows]

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place; returns ``residual``."""
        return residual.add_(x)

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """``x = rms_norm(x)``; rows of ``x`` may be strided."""
        x.copy_(self.rms_norm(x, weight, eps))

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """:meth:`linear` with a result in float32 that was rounded to ``x.dtype``."""
        return self.linear(x, packed).float()

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Take ownership of ``weight`` ``[N, K]`` and ``bias`` ``[N]``; the caller drops its references."""

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """``[T, K] -> [T, N]``: ``x @ weight.T + bias``, accumulated in float32, returned in ``x.dtype``."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``[T, H] -> [T, H]``: ``x / sqrt(mean(x ** 2) + eps) * weight``, normed in float32.

        ``weight`` is ``[H]``, in ``x.dtype`` or float32. The normed row is rounded to ``weight``'s dtype and
        multiplied, and the product is rounded to ``x.dtype``: a float32 weight means one rounding at the end.
        Rows of ``x`` may be strided.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, then :meth:`rms_norm` of ``residual``; returns ``[T, H]``."""

    @abstractmethod
    def activate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``[T, 2 * I] -> [T, I]``: ``activation(gate) * up``; the gate is the first half of the columns.

        The activation is computed in float32 and rounded before the product.
        """

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)`` of each element, in place; returns ``x``, float32, contiguous, any shape."""

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
        """Norm (if ``qk_norm``) and rotate queries and keys, write K and V to their slots, return the queries.

        ``qkv`` is ``[T, layout.qkv_dim]`` and may be overwritten. ``cos_sin`` is float32
        ``[max_positions, 2, rotary_dim / 2]`` (cosines, then sines, with the scaling of the RoPE type applied).
        The first ``rotary_dim`` elements of a head are rotated in halves: element ``i`` pairs with
        ``i + rotary_dim / 2``. ``kv_layer`` is one layer's view, see :meth:`attention`. Returns
        ``[T, num_heads, head_dim]``, contiguous or a view of ``qkv`` whose last two dimensions are dense.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        """Causal attention of each query over its request's blocks.

        ``q`` is ``[T, num_heads, head_dim]`` (rows may be strided). ``kv_layer`` is the strided view
        ``[blocks, 2, block_size, kv_heads, head_dim]`` of the pool (index 0 keys, 1 values; the last three
        dimensions are dense). A query at position ``p`` attends to positions ``0..p`` of its request, or with
        a window to ``max(0, p - sliding_window + 1)..p``. Scores and softmax are in float32. Returns
        ``[T, num_heads, head_dim]``, contiguous, in ``q.dtype``.
        """

    def draw(self, logits: Tensor, best: Tensor, options: DrawOptions) -> Tensor:
        """Draw tokens from ``logits`` ``[R, vocab]``, float32; ``best`` ``[R]`` has each row's largest logit.

        Returns int64, as many as there are keys. ``engine.execution.sampler`` defines what is drawn.
        """
        raise NotImplementedError(f"{self.name} kernels draw no tokens")


def kv_pool_shape(
    num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """Shape of the KV pool: block-major, so that a block with all its layers is one contiguous unit to copy."""
    return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)


SUPPORTED_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
