"""Head norms, RoPE and the write of K and V to their slots, in one pass over a fused QKV row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import AttentionMetadata, HeadLayout, QKNorm
from kernels.triton.jit import jit

BLOCK_HEADS = 8  # heads of one program


@jit()
def rope_and_write_kv_kernel(
    q_out: tl.tensor,
    kv: tl.tensor,
    qkv: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    qkv_stride: tl.tensor,
    kv_block_stride: tl.tensor,
    kv_value_offset: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program takes ``BLOCK_HEADS`` heads of one token; a head may be a query, a key or a value.

    Each element is read twice, once for itself and once as its partner's rotation needs it; the second read
    hits the cache. Queries go to their own tensor, so no program writes what another lane still reads.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < HEAD_DIM)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS

    HALF: tl.constexpr = ROTARY_DIM // 2
    rotated = d < ROTARY_DIM
    partner = tl.where(d < HALF, d + HALF, tl.where(rotated, d - HALF, d))
    row = qkv + token * qkv_stride + head * HEAD_DIM
    raw = tl.load(row + d, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        own = tl.where(
            is_query,
            tl.load(q_weight + d, mask=d < HEAD_DIM, other=0.0),
            tl.load(k_weight + d, mask=d < HEAD_DIM, other=0.0),
        )
        other = tl.where(
            is_query,
            tl.load(q_weight + partner, mask=d < HEAD_DIM, other=0.0),
            tl.load(k_weight + partner, mask=d < HEAD_DIM, other=0.0),
        )
        # Rounded where the unfused sequence of operations rounds.
        x = ((x * scale).to(own.dtype) * own).to(raw.dtype).to(tl.float32)
        y = ((y * scale).to(own.dtype) * other).to(raw.dtype).to(tl.float32)

    angle = cos_sin + tl.load(positions + token) * ROTARY_DIM + tl.where(d < HALF, d, d - HALF)
    cos = tl.load(angle, mask=rotated, other=1.0)
    sin = tl.load(angle + HALF, mask=rotated, other=0.0)
    turned = (x * cos + tl.where(d < HALF, -y, y) * sin).to(raw.dtype)
    result = tl.where(is_value, raw, turned)

    tl.store(q_out + (token * HEADS + head) * HEAD_DIM + d, result, mask=inside & is_query)
    slot = tl.load(slots + token)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    kv_at = kv + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
    kv_at = kv_at + tl.where(is_value, kv_value_offset, 0) + kv_head * HEAD_DIM + d
    tl.store(kv_at, result, mask=inside & (head >= HEADS))


def rope_and_write_kv(
    qkv: Tensor,
    layout: HeadLayout,
    cos_sin: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    qk_norm: QKNorm | None,
) -> Tensor:
    """See :meth:`kernels.interface.Kernels.rope_and_write_kv`; returns a contiguous tensor of its own."""
    tokens = qkv.shape[0]
    q = torch.empty((tokens, layout.num_heads, layout.head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    heads = layout.num_heads + 2 * layout.num_kv_heads
    rope_and_write_kv_kernel[(tokens, triton.cdiv(heads, BLOCK_HEADS))](
        q,
        kv_layer,
        qkv,
        cos_sin,
        metadata.positions,
        metadata.slot_mapping,
        qk_norm.q_weight if qk_norm is not None else qkv,
        qk_norm.k_weight if qk_norm is not None else qkv,
        qkv.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        qk_norm.eps if qk_norm is not None else 0.0,
        HEADS=layout.num_heads,
        KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        ROTARY_DIM=2 * cos_sin.shape[2],
        BLOCK_SIZE=kv_layer.shape[2],
        NORM=qk_norm is not None,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_D=triton.next_power_of_2(layout.head_dim),
        num_warps=4,
    )
    return q
