"""The C++ kernels behind the common interface."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.cpu.calls import DTYPE_CODES, Calls
from kernels.cpu.coded import CodedLinear
from kernels.cpu.linear import PanelLinear, linear, pack_linear, prefers_onednn
from kernels.cpu.screened import ScreenedLinear, deciding_logits
from kernels.interface import (
    AttentionMetadata,
    AttentionOptions,
    Choices,
    DrawOptions,
    HeadLayout,
    Kernels,
    LogprobOptions,
    PackedLinear,
    QKNorm,
    Recording,
    RowEdit,
    RowLogprobs,
)

logger = logging.getLogger(__name__)

_ACTIVATION_CODES = {Activation.SILU: 0, Activation.GELU_TANH: 1}


class _Draws:
    """Room for what is drawn from some logits by some options, and where all of it lies.

    Mostly the next step has the same ones. Room is in arrays and addresses are kept, because each of torch's
    operations takes up to 10 us once a step has swept the CPU's caches.
    """

    def __init__(self, logits: Tensor, options: DrawOptions) -> None:
        self.logits = weakref.ref(logits)  # kept here, those of a step without a recording would stay in memory
        self.options = options
        rows, vocab = logits.shape
        self.positions = np.empty(rows, dtype=np.int64)
        self.tokens = np.empty(len(options.seeds), dtype=np.int64)
        self.largest = np.empty(rows, dtype=np.float32)
        filters = (options.min_p, options.top_k, options.top_p)
        by = (options.temperature, *filters, options.num_draws, options.seeds)
        self.arguments = (
            *(logits.data_ptr(), logits.stride(0), rows, vocab),
            *(each.data_ptr() for each in by),
            *(each.ctypes.data for each in (self.positions, self.tokens, self.largest)),
        )


class CpuKernels(Kernels):
    """Kernels compiled for this CPU; see the ``*.cpp`` files beside this one.

    Tensors are dense in their last dimension (``kv_layer`` in its last three); rows may be strided. The bits of
    a result do not depend on ``num_threads``, batch, chunking, block size or placement of blocks. They differ
    between CPUs with vectors of different width; in bfloat16 also by AVX-512 BF16 and AMX.

    Raises :class:`kernels.cpu.build.BuildError` where the kernels cannot be compiled.
    """

    name = "cpu"
    draws = True
    takes_codes = True

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads} but must be at least 1")
        self.num_threads = num_threads
        self.own_threads = not prefers_onednn(torch.bfloat16)
        self._calls = Calls()
        self._draws: _Draws | None = None
        self.prefers_codes = self.own_threads and bool(self._calls("quire_codes_in_hardware"))

    def in_buffers(self, run: Callable[[], Tensor]) -> Tensor:
        return self._calls.in_buffers(run)

    def record(
        self, run: Callable[[Sequence[int]], Tensor], most: Sequence[int]
    ) -> tuple[Tensor, Recording] | None:
        return self._calls.record(run, most)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack_linear(self._calls, weight, bias, self.num_threads)

    def pack_codes(
        self, weight: Tensor, bits: int, bias: Tensor | None, *, exact: bool = False
    ) -> PackedLinear:
        return CodedLinear(self._calls, weight, bits, bias, self.num_threads, exact=exact)

    def pack_head(self, weight: Tensor) -> PackedLinear:
        whole = self.pack_linear(weight, None)
        if not (self.prefers_codes and isinstance(whole, PanelLinear)):
            return whole
        try:
            return ScreenedLinear(self._calls, weight, whole, self.num_threads)
        except ValueError as error:
            logger.info("the output head is not screened: %s", error)
            return whole

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, ScreenedLinear):
            packed = packed.whole
        return linear(self._calls, x, packed, self.num_threads)

    def deciding_logits(self, x: Tensor, packed: PackedLinear, choices: Choices) -> Tensor:
        if not isinstance(packed, ScreenedLinear):
            return self.logits(x, packed)
        return deciding_logits(self._calls, x, packed, choices, self.num_threads)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        y = self.linear(x, packed)
        if y.dtype == torch.float32:
            return y
        wide = self._calls.empty("logits", tuple(y.shape), torch.float32)
        self._calls(
            "quire_widen", DTYPE_CODES[y.dtype], y.data_ptr(), wide.data_ptr(), y.numel(), self.num_threads
        )
        return wide

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        return self._take(table, token_ids, 1.0 if scale is None else scale)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._take(x, rows, 1.0)

    def _take(self, x: Tensor, rows: Tensor, scale: float) -> Tensor:
        count, size = rows.shape[0], x.shape[1]
        y = self._calls.empty("rows", (count, size), x.dtype, kept_for_all=True)
        self._calls(
            "quire_take_rows",
            *(DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), rows.data_ptr(), y.data_ptr(), count, size),
            *(scale, self.num_threads),
        )
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        self._calls(
            "quire_add",
            *(DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(*x.shape, self.num_threads),
        )
        return residual

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = self._calls.empty("norm", tuple(x.shape), x.dtype)
        self._norm(x, weight, y, eps)
        return y

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        self._norm(x, weight, x, eps)

    def _norm(self, x: Tensor, weight: Tensor, y: Tensor, eps: float) -> None:
        self._calls(
            "quire_rms_norm",
            *(DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), DTYPE_CODES[weight.dtype], weight.data_ptr()),
            *(y.data_ptr(), y.stride(0), *x.shape, eps, self.num_threads),
        )

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        y = self._calls.empty("norm", (rows, size), x.dtype)
        self._calls(
            "quire_add_rms_norm",
            *(DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(DTYPE_CODES[weight.dtype], weight.data_ptr(), y.data_ptr(), rows, size, eps, self.num_threads),
        )
        return y

    def activate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, columns = gate_up.shape
        y = self._calls.empty("activated", (rows, columns // 2), gate_up.dtype)
        self._calls(
            "quire_activate_mul",
            *(DTYPE_CODES[gate_up.dtype], _ACTIVATION_CODES[activation]),
            *(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), rows, columns // 2, self.num_threads),
        )
        return y

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self._calls("quire_soft_cap", x.data_ptr(), x.numel(), cap, self.num_threads)
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
        self._calls(
            "quire_rope_and_write_kv",
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
        out = self._calls.empty("attended", tuple(shape), q.dtype)
        block_stride, value_offset, *_ = kv_layer.stride()
        _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
        tables = metadata.block_tables
        failed = self._calls(
            "quire_attention",
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

    def edit_logits(self, logits: Tensor, edits: Sequence[RowEdit]) -> None:
        words: list[int] = []
        factors: list[float] = []
        kept: list[Tensor] = []  # until the call is done
        for each in edits:
            edit = each.edit
            words.append(each.row)
            words.append(0 if each.allowed is None else each.allowed.data_ptr())
            if each.forbidden:
                kept.append(torch.tensor(each.forbidden, dtype=torch.int64))
                words += (len(each.forbidden), kept[-1].data_ptr())
            else:
                words += (0, 0)
            if edit is None or edit.bias_ids is None or edit.bias is None:
                words += (0, 0, 0)
            else:
                words += (edit.bias_ids.numel(), edit.bias_ids.data_ptr(), edit.bias.data_ptr())
            if edit is None or edit.seen is None or edit.counts is None:
                words += (0, 0, 0)
            else:
                words += (edit.seen.numel(), edit.seen.data_ptr(), edit.counts.data_ptr())
            factors += (1.0, 0.0, 0.0) if edit is None else (edit.repetition, edit.frequency, edit.presence)
        packed, of_rows = torch.tensor(words, dtype=torch.int64), torch.tensor(factors, dtype=torch.float32)
        self._calls(
            "quire_edit_logits",
            *(logits.data_ptr(), logits.stride(0), logits.shape[1], len(edits)),
            *(packed.data_ptr(), of_rows.data_ptr(), self.num_threads),
        )

    def logprobs(self, logits: Tensor, options: LogprobOptions) -> RowLogprobs:
        count, vocab = options.rows.numel(), logits.shape[1]
        most = int(options.num_top.max()) if count else 0
        made = RowLogprobs(
            torch.empty(count, dtype=torch.float64),
            torch.empty(count, most, dtype=torch.int64),
            torch.empty(count, most, dtype=torch.float32),
            torch.empty(options.tokens.shape, dtype=torch.float32),
            torch.empty(options.tokens.shape, dtype=torch.int64),
        )
        failed = self._calls(
            "quire_logprobs",
            *(logits.data_ptr(), logits.stride(0), vocab, count, options.rows.data_ptr()),
            *(options.num_top.data_ptr(), options.num_tokens.data_ptr(), options.tokens.data_ptr(), most),
            *(made.normalizers.data_ptr(), made.top_ids.data_ptr(), made.top_logits.data_ptr()),
            *(made.logits.data_ptr(), made.ranks.data_ptr(), self.num_threads),
        )
        if failed:
            raise MemoryError(f"no memory for the log probabilities of {count} rows")
        return made

    def draw(
        self, logits: Tensor, positions: Sequence[int], options: DrawOptions
    ) -> tuple[list[int], list[float]]:
        draws = self._draws
        if draws is None or draws.logits() is not logits or draws.options is not options:
            draws = self._draws = _Draws(logits, options)
        draws.positions[:] = positions
        if self._calls("quire_draw", *draws.arguments, self.num_threads):
            raise MemoryError("no memory to draw from {} rows of {} logits".format(*logits.shape))
        return draws.tokens.tolist(), draws.largest.tolist()
