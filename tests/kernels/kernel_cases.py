"""Made-up steps for the kernels: requests with contexts, on scattered blocks of a pool full of garbage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AttentionMetadata, HeadLayout, kv_pool_shape


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence's whole queries, keys and values, ``[length, heads, head_dim]``, wherever its blocks lie."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]


def make_sequence(length: int, layout: HeadLayout, dtype: torch.dtype, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn((length, heads, layout.head_dim), generator=generator).to(dtype)

    return Sequence(draw(layout.num_heads), draw(layout.num_kv_heads), draw(layout.num_kv_heads))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries ``begin..end`` of a sequence, whose first ``end`` tokens are in the cache."""

    sequence: Sequence
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    q: Tensor  # [T, heads, head_dim]
    kv_layer: Tensor  # strided, as the pool gives it
    metadata: AttentionMetadata


def make_metadata(chunks: list[tuple[int, int]], block_size: int, seed: int) -> tuple[AttentionMetadata, int]:
    """Metadata of requests with queries ``begin..end`` each, on blocks in random order; their number."""
    counts = [-(-end // block_size) for _, end in chunks]
    total = sum(counts)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.full((len(chunks), max(counts, default=0) + 1), -1, dtype=torch.int32)
    positions, slots, starts, used = [], [], [0], 0
    for r, (begin, end) in enumerate(chunks):
        tables[r, : counts[r]] = order[used : used + counts[r]]
        used += counts[r]
        position = torch.arange(begin, end)
        positions.append(position)
        slots.append(tables[r, position // block_size].long() * block_size + position % block_size)
        starts.append(starts[-1] + end - begin)
    metadata = AttentionMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32),
        block_tables=tables,
        positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
        slot_mapping=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
        max_query_len=max((end - begin for begin, end in chunks), default=0),
        max_context_len=max((end for _, end in chunks), default=0),
    )
    return metadata, total


def make_step(chunks: list[Chunk], block_size: int, seed: int = 0) -> Step:
    """The chunks as one step. Every slot that no request owns holds NaN, which must never reach a result."""
    metadata, total = make_metadata([(chunk.begin, chunk.end) for chunk in chunks], block_size, seed)
    first = chunks[0].sequence
    heads, dim = first.k.shape[1:]
    pool = torch.full(kv_pool_shape(total, 3, block_size, heads, dim), float("nan"), dtype=first.k.dtype)
    layer = pool[:, 1]
    for r, chunk in enumerate(chunks):
        position = torch.arange(chunk.end)
        blocks, offsets = metadata.block_tables[r, position // block_size].long(), position % block_size
        layer[blocks, 0, offsets] = chunk.sequence.k[: chunk.end]
        layer[blocks, 1, offsets] = chunk.sequence.v[: chunk.end]
    return Step(torch.cat([c.sequence.q[c.begin : c.end] for c in chunks]), layer, metadata)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: a NaN equals itself, 0.0 and -0.0 differ."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
