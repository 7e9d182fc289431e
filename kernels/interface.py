"""The contract between the engine and its kernels.

Three implementations satisfy it: ``reference`` (plain torch, the definition of right), ``cpu`` (C++) and
``triton`` (CUDA, ROCm). Tests hold them to the same answers.

Determinism is part of the contract on a CPU: each row of a result depends on its own input row and on the keys
and values that it attends to, and on nothing else: not on the other rows, their number, the chunking or the
number of threads. Implementations reduce in a fixed order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import Activation


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Says which request each row of a step belongs to, and where its KV is; the same for every layer.

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
    """How the columns of a fused QKV row divide into heads: all of queries, then of keys, then of values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_dim(self) -> int:
        """Columns of a fused row."""
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


class PackedLinear(ABC):
    """A weight in the layout that :meth:`Kernels.linear` of one implementation reads."""

    in_features: int
    out_features: int
    screened_rows = 0
    """Up to so many rows, :meth:`Kernels.deciding_logits` is faster than :meth:`Kernels.logits`. A row that
    draws its token counts twice."""


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """How to choose from each of ``R`` rows; all tensors are on the CPU."""

    temperature: Tensor  # float32 [R]; 0 takes the token with the largest logit, the first of them
    min_p: Tensor  # float32 [R]; 0 keeps all
    top_k: Tensor  # int64 [R]; 0 keeps all
    top_p: Tensor  # float64 [R]; 1 keeps all
    num_draws: Tensor  # int64 [R]
    seeds: Tensor  # int64, of all draws, row after row: the bits that engine.execution.random.seed_bits gives


@dataclass(frozen=True, slots=True)
class Choices:
    """How each of ``R`` rows of a step chooses its token, where that takes no more than this."""

    temperature: Tensor  # float32 [R]; 0 takes the token with the largest logit
    keys: Tensor  # int64 [R], of the draws


@dataclass(slots=True)
class LogitEdit:
    """What to change in one row of logits, in the order of the fields; all tensors are on the CPU.

    No id comes twice in one tensor.
    """

    bias_ids: Tensor | None = None  # int64 [B]
    bias: Tensor | None = None  # float32 [B], added
    seen: Tensor | None = None  # int64 [N], tokens to penalize
    counts: Tensor | None = None  # int32 [N], how often the output has each; 0 for one of the prompt alone
    repetition: float = 1.0  # divides logits above 0 of tokens seen, and multiplies others
    frequency: float = 0.0  # subtracted as often as a token is in the output
    presence: float = 0.0  # subtracted once if it is there


@dataclass(frozen=True, slots=True)
class RowEdit:
    """The edit of one row; ``forbidden`` tokens, and all that are not ``allowed``, get minus infinity."""

    row: int
    edit: LogitEdit | None
    forbidden: tuple[int, ...] = ()
    allowed: Tensor | None = None  # int32 on the CPU, a word for each 32 tokens: bit t % 32 of word t // 32


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """The log probabilities to take of each of ``R`` rows; all tensors are on the CPU."""

    rows: Tensor  # int64 [R], which rows of the logits
    num_top: Tensor  # int64 [R], how many of the likeliest tokens; at most the vocabulary
    num_tokens: Tensor  # int64 [R]
    tokens: Tensor  # int64 [T], the tokens of all rows, row after row


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The answer to :class:`LogprobOptions`; all tensors are on the CPU.

    A normalizer that is NaN or infinite says that the row has a logit that is, or no finite one.
    """

    normalizers: Tensor  # float64 [R], log of the summed exponentials; a log probability is logit - normalizer
    top_ids: (
        Tensor  # int64 [R, K], the likeliest tokens, best first, ties by lower id; K is the largest num_top
    )
    top_logits: Tensor  # float32 [R, K]; what lies past a row's num_top is undefined
    logits: Tensor  # float32 [T], of the tokens
    ranks: Tensor  # int64 [T], 1 + how many logits of the row are larger


class Recording(ABC):
    """What a run asks of the device, to be done again and again with new contents of its input, in any size."""

    @abstractmethod
    def replay(self, sizes: Sequence[int], parts: int = 1) -> Iterator[None]:
        """Do it in so many parts, and yield after each; results lie where :meth:`Kernels.record` said.

        Raises ``MemoryError`` if there is too little; the results are then garbage.
        """


class Kernels(ABC):
    """What the decoder needs from a device.

    All tensors are on that device. They share one float dtype except where an operation says otherwise.
    Operations with a body here are written in torch; an implementation may have faster ones.
    """

    name: str
    draws = False
    """Whether :meth:`draw` is there; the engine's sampler draws in torch otherwise."""

    takes_codes = False
    """Whether :meth:`pack_codes` is there."""

    prefers_codes = False
    """Whether products with weights in few bits are faster here."""

    own_threads = False
    """Whether nothing that takes long runs on torch's threads."""

    def in_buffers(self, run: Callable[[], Tensor]) -> Tensor:
        """Call ``run``, which uses these operations alone, and return its result.

        Their results may lie in buffers that serve the next run, too: a result of one operation holds until
        that operation's next, as a decoder needs it, those of ``embed`` and ``take_rows`` to the end of the
        run, and the result of ``run`` until the next run. So nothing is allocated.
        """
        return run()

    def record(
        self, run: Callable[[Sequence[int]], Tensor], most: Sequence[int]
    ) -> tuple[Tensor, Recording] | None:
        """Note what ``run(sizes)`` asks of the device for sizes from 1 to ``most``, without doing any of it.

        ``run`` is called a few times, with sizes up to one more than ``most``. It takes its input from tensors
        that stay where they are, and uses these operations alone. Returns its result for ``most``, of which a
        replay fills the first part, and the recording; ``None`` where there can be none. Replayed work computes
        the same bits. Results hold as in :meth:`in_buffers`; a replay is a run.
        """
        return None

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

    def deciding_logits(self, x: Tensor, packed: PackedLinear, choices: Choices) -> Tensor:
        """:meth:`logits`, but for those that do not matter for ``choices``, which may be minus infinity.

        The largest of each row are there. :meth:`draw` chooses the same tokens, if it has the same temperatures
        and keys, and no filters.
        """
        return self.logits(x, packed)

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Take ownership of ``weight`` ``[N, K]`` and ``bias`` ``[N]``; the caller drops its references."""

    def pack_head(self, weight: Tensor) -> PackedLinear:
        """:meth:`pack_linear`, with what makes :meth:`deciding_logits` fast, if anything does."""
        return self.pack_linear(weight, None)

    def pack_codes(
        self, weight: Tensor, bits: int, bias: Tensor | None, *, exact: bool = False
    ) -> PackedLinear:
        """Like :meth:`pack_linear`, but kept in 4 or 8 ``bits``; see :mod:`kernels.codes`.

        :meth:`linear` then codes the rows of ``x``, too. Raises ``ValueError`` for weights that cannot be
        coded, or are to be ``exact`` and are not what codes stand for.
        """
        raise NotImplementedError(f"{self.name} kernels do not support 4-bit or 8-bit weights")

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

    def edit_logits(self, logits: Tensor, edits: Sequence[RowEdit]) -> None:
        """Change rows of ``logits`` ``[R, vocab]``, float32, in place, each by its own edit alone."""
        edit_logits(logits, edits)

    def logprobs(self, logits: Tensor, options: LogprobOptions) -> RowLogprobs:
        """Log probabilities of ``logits`` ``[R, vocab]``, float32, which stay as they are."""
        return row_logprobs(logits, options)

    def draw(
        self, logits: Tensor, positions: Sequence[int], options: DrawOptions
    ) -> tuple[list[int], list[float]]:
        """Choose tokens at ``positions``, one for each row, from ``logits`` ``[R, vocab]``, float32.

        Returns them, as many as there are seeds, and each row's largest logit, NaN if one is; if that is not
        finite, the row's tokens mean nothing. ``engine.execution.sampler`` defines what is drawn.
        """
        raise NotImplementedError(f"{self.name} kernels do not draw tokens")


def edit_logits(logits: Tensor, edits: Sequence[RowEdit]) -> None:
    """The definition of :meth:`Kernels.edit_logits`."""
    device, vocab = logits.device, logits.shape[1]
    masks = {each.row: each.allowed for each in edits if each.allowed is not None}
    if masks:  # together: on a device each operation has its price
        words = torch.stack(list(masks.values())).to(device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        rows = torch.tensor(list(masks), device=device)
        logits[rows] = logits[rows].masked_fill_(bits.flatten(1)[:, :vocab] == 0, -math.inf)
    for each in edits:
        row, edit = logits[each.row], each.edit
        if each.forbidden:
            row[list(each.forbidden)] = -math.inf
        if edit is not None and edit.bias_ids is not None and edit.bias is not None:
            row[edit.bias_ids.to(device)] += edit.bias.to(device)
        if edit is not None and edit.seen is not None and edit.counts is not None:
            seen, counts = edit.seen.to(device), edit.counts.to(device)
            values = row[seen]
            values = torch.where(values > 0, values / edit.repetition, values * edit.repetition)
            row[seen] = values - edit.frequency * counts - edit.presence * (counts > 0)


def row_logprobs(logits: Tensor, options: LogprobOptions) -> RowLogprobs:
    """The definition of :meth:`Kernels.logprobs`."""
    rows = logits[options.rows.to(logits.device)]
    wide = rows.double()
    normalizers = wide.logsumexp(dim=1)
    count = int(options.num_top.max()) if options.num_top.numel() else 0
    # A stable sort, not topk: equal logits in the order of their ids.
    order = rows.sort(dim=1, descending=True, stable=True)
    owners = torch.repeat_interleave(options.num_tokens).to(logits.device)
    values = rows[owners, options.tokens.to(logits.device)]
    ranks = 1 + (rows[owners] > values[:, None]).sum(dim=1)
    return RowLogprobs(
        normalizers.cpu(),
        order.indices[:, :count].cpu(),
        order.values[:, :count].cpu(),
        values.cpu(),
        ranks.cpu(),
    )


def kv_pool_shape(
    num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """Shape of the KV pool: block-major, so that a block with all its layers is one contiguous unit to copy."""
    return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)


SUPPORTED_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
