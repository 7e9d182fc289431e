"""A step of requests of equal length over a paged cache, for measurements of attention."""

from __future__ import annotations

import torch

from kernels.interface import AttentionMetadata

BLOCK_SIZE = 16


def make_metadata(requests: int, context: int, queries: int, device: str = "cpu") -> AttentionMetadata:
    """Requests of equal length, the last ``queries`` tokens new, on blocks scattered over the pool."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0)).int()
    tables = tables.view(requests, blocks).to(device)
    positions = torch.arange(context - queries, context, device=device)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        query_start=torch.arange(requests + 1, dtype=torch.int32, device=device) * queries,
        context_lens=torch.full((requests,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        positions=positions.repeat(requests),
        slot_mapping=slots.flatten(),
        max_query_len=queries,
        max_context_len=context,
    )
