"""The kernels in plain torch: the definition of right, and the fallback where nothing faster runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.codes import NOT_EXACT, code_rows, encode, is_exact
from kernels.interface import (
    AttentionMetadata,
    AttentionOptions,
    HeadLayout,
    Kernels,
    PackedLinear,
    QKNorm,
)

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


class ReferenceLinear(PackedLinear):
    """The weight as it is: ``[out_features, in_features]``."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias


class ReferenceCodes(PackedLinear):
    """The weight that codes stand for, in float32."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(self, weight: Tensor, bits: int, bias: Tensor | None, *, exact: bool = False) -> None:
        matrix = encode(weight, bits)
        if exact and not is_exact(matrix, weight):
            raise ValueError(NOT_EXACT)
        self.out_features, self.in_features = weight.shape
        self.weight = matrix.decode()
        self.bias = None if bias is None else bias.float()


class ReferenceKernels(Kernels):
    """Every operation as its formula reads, on any device.

    Determinism is not promised: torch may reduce in another order for another number of rows.
    """

    name = "reference"
    takes_codes = True

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def pack_codes(
        self, weight: Tensor, bits: int, bias: Tensor | None, *, exact: bool = False
    ) -> ReferenceCodes:
        return ReferenceCodes(weight, bits, bias, exact=exact)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """See the interface. Fewer than 4 rows are padded: torch has other paths for those, with other bits."""
        if isinstance(packed, ReferenceCodes):
            return F.linear(code_rows(x), packed.weight, packed.bias).to(x.dtype)
        if not isinstance(packed, ReferenceLinear):
            raise TypeError(f"a weight packed as {type(packed).__name__} belongs to other kernels")
        rows = x.shape[0]
        if rows < 4:
            x = F.pad(x, (0, 0, 0, 4 - rows))
        return F.linear(x, packed.weight, packed.bias)[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed.to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def activate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        heads = qkv.view(qkv.shape[0], layout.num_heads + 2 * layout.num_kv_heads, layout.head_dim)
        q, kv = heads[:, : layout.num_heads], heads[:, layout.num_heads :]
        k, v = kv.chunk(2, dim=1)
        if qk_norm is not None:
            q = self.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = self.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        cos, sin = cos_sin[metadata.positions].unsqueeze(1).unbind(2)  # [T, 1, rotary_dim / 2]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        block_size = kv_layer.shape[2]
        block, offset = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        kv_layer[block, 0, offset] = k
        kv_layer[block, 1, offset] = v
        return q

    def attention(
        self, q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        window = options.sliding_window
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        block_size = kv_layer.shape[2]
        starts = metadata.query_start.tolist()
        for r, context in enumerate(metadata.context_lens.tolist()):
            rows = slice(starts[r], starts[r + 1])
            num_queries = starts[r + 1] - starts[r]
            first = 0  # blocks before every query's window may be gone
            if window is not None:
                first = max(0, context - num_queries - window + 1) // block_size * block_size
            blocks = metadata.block_tables[r, first // block_size : -(-context // block_size)].long()
            k, v = kv_layer[blocks].transpose(0, 1).flatten(1, 2)[:, : context - first].float()
            k_position = torch.arange(first, context, device=q.device)
            q_position = torch.arange(context - num_queries, context, device=q.device).unsqueeze(1)
            visible = k_position <= q_position
            if window is not None:
                visible &= k_position > q_position - window
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [heads, context, dim]
            scores = q[rows].float().transpose(0, 1) @ k.transpose(1, 2) * options.scale
            if options.soft_cap is not None:
                scores = self.soft_cap(scores, options.soft_cap)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` elements of each head, in float32; rounded once."""
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
