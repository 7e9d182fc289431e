"""One step's input as flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.scheduling.sequence import ScheduledChunk
from kernels import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat input of one step with ``T`` new tokens; ``S`` rows are sampled from."""

    token_ids: Tensor  # int64 [T]
    metadata: AttentionMetadata
    sample_rows: Tensor  # int64 [S], row of the last token of each chunk that samples, then those of its drafts
    decodes: bool  # every row samples


def build_batch(chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device) -> Batch:
    """Lay out ``chunks`` one after the other; their blocks must already be in their sequences' block tables.

    A draft is laid out like a separate sequence that decodes one token and shares all blocks. Attention then
    needs no special kind of chunk, and a step with drafts is recorded and replayed like any decode step.
    """
    if chunks and all(chunk.length == 1 and chunk.samples and not chunk.drafts for chunk in chunks):
        return _decodes(chunks, block_size, device)
    token_ids = np.fromiter(
        chain.from_iterable(
            chain(chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length], chunk.drafts)
            for chunk in chunks
        ),
        dtype=np.int64,
    )
    counts = np.array([1 + len(chunk.drafts) for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
    ends = starts + lengths
    tables = _tables(chunks, -(-(ends + counts - 1) // block_size))
    if counts.sum() > len(chunks):
        firsts = np.cumsum(counts) - counts
        # 0 for a chunk, then 1, 2, ... for its drafts.
        place = np.arange(counts.sum()) - np.repeat(firsts, counts)
        drafted = place > 0
        starts = np.where(drafted, np.repeat(ends, counts) + place - 1, np.repeat(starts, counts))
        lengths = np.where(drafted, 1, np.repeat(lengths, counts))
        samples = np.repeat(samples, counts) | drafted
        tables = np.repeat(tables, counts, axis=0)
        ends = starts + lengths
    query_start = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    total = int(query_start[-1])
    rows = np.repeat(np.arange(len(starts)), lengths)
    positions = np.arange(total) + (starts - query_start[:-1])[rows]
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    metadata = AttentionMetadata(
        query_start=_tensor(query_start.astype(np.int32), device),
        context_lens=_tensor(ends.astype(np.int32), device),
        block_tables=_tensor(tables, device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(slots, device),
        max_query_len=int(lengths.max(initial=0)),
        max_context_len=int(ends.max(initial=0)),
    )
    decodes = bool(samples.all()) and total == len(starts) > 0
    return Batch(_tensor(token_ids, device), metadata, _tensor(query_start[1:][samples] - 1, device), decodes)


def _decodes(chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device) -> Batch:
    """As :func:`build_batch`, for chunks of one token that all sample: most steps, and so in few operations."""
    positions = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    token_ids = np.array([chunk.sequence.token_ids[chunk.start] for chunk in chunks], dtype=np.int64)
    blocks, offsets = np.divmod(positions, block_size)
    tables = _tables(chunks, blocks + 1)
    rows = np.arange(len(chunks) + 1)
    slots = tables[rows[:-1], blocks].astype(np.int64) * block_size + offsets
    metadata = AttentionMetadata(
        query_start=_tensor(rows.astype(np.int32), device),
        context_lens=_tensor((positions + 1).astype(np.int32), device),
        block_tables=_tensor(tables, device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(slots, device),
        max_query_len=1,
        max_context_len=int(positions.max()) + 1,
    )
    return Batch(_tensor(token_ids, device), metadata, _tensor(rows[:-1], device), decodes=True)


def _tables(chunks: Sequence[ScheduledChunk], num_blocks: NDArray[np.int64]) -> NDArray[np.int32]:
    """The first ``num_blocks`` blocks of each chunk's sequence."""
    tables = np.zeros((len(chunks), int(num_blocks.max(initial=0))), dtype=np.int32)
    for row, (chunk, needed) in enumerate(zip(chunks, num_blocks.tolist(), strict=True)):
        tables[row, :needed] = chunk.sequence.block_table[:needed]
    # Absent blocks lie outside every window, so these entries are never read.
    return np.maximum(tables, 0, out=tables)


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
