"""One step's input: as lists, and as flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.kv.block_pool import NO_BLOCK
from engine.scheduling.sequence import ScheduledChunk
from kernels import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat input of one step with ``T`` new tokens; ``S`` rows are sampled from."""

    token_ids: Tensor  # int64 [T]
    metadata: AttentionMetadata
    sample_rows: Tensor  # int64 [S], row of the last token of each chunk that samples, then those of its drafts


@dataclass(frozen=True, slots=True)
class Layout:
    """What a :class:`Batch` holds, as lists: a step sweeps the CPU's caches, and after it each of torch's and
    numpy's operations takes 5 to 20 us, so a step is laid out with few of them.
    """

    token_ids: list[int]
    query_start: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]  # only blocks with tokens
    positions: list[int]
    slot_mapping: list[int]
    sample_rows: list[int]

    @property
    def decodes(self) -> bool:
        """Whether every row samples: each is a request of its own then."""
        return 0 < len(self.sample_rows) == len(self.token_ids)

    @property
    def max_context_len(self) -> int:
        """The longest context."""
        return max(self.context_lens, default=0)

    def batch(self, device: torch.device) -> Batch:
        """The tensors."""
        longs = (self.token_ids, self.positions, self.slot_mapping, self.sample_rows)
        token_ids, positions, slots, samples = (
            torch.tensor(each, dtype=torch.int64, device=device) for each in longs
        )
        widest = max(map(len, self.block_tables), default=0)
        tables = np.zeros((len(self.block_tables), widest), dtype=np.int32)
        for row, table in enumerate(self.block_tables):  # torch takes ten times as long for a list of many
            tables[row, : len(table)] = table
        starts = self.query_start
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(self.context_lens, dtype=torch.int32, device=device),
            block_tables=torch.from_numpy(tables).to(device),
            positions=positions,
            slot_mapping=slots,
            max_query_len=max((end - start for start, end in pairwise(starts)), default=0),
            max_context_len=self.max_context_len,
        )
        return Batch(token_ids, metadata, samples)


def lay_out(chunks: Sequence[ScheduledChunk], block_size: int) -> Layout:
    """Lay out ``chunks`` one after the other; their blocks must already be in their sequences' block tables.

    A draft is laid out like a separate sequence that decodes one token and shares all blocks. Attention then
    needs no special kind of chunk, and a step with drafts is recorded and replayed like any decode step.
    """
    layout = Layout([], [0], [], [], [], [], [])
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.length
        _add(layout, sequence.token_ids[start:end], start, sequence.block_table, block_size, chunk.samples)
        for place, draft in enumerate(chunk.drafts, end):
            _add(layout, [draft], place, sequence.block_table, block_size, True)
    return layout


def _add(
    layout: Layout, tokens: list[int], start: int, block_table: list[int], block_size: int, samples: bool
) -> None:
    """A request with ``tokens`` from position ``start`` on."""
    end = start + len(tokens)
    table = block_table[: (end - 1) // block_size + 1]
    if NO_BLOCK in table:  # outside every window, so these entries are never read
        table = [max(0, block) for block in table]
    layout.token_ids.extend(tokens)
    layout.query_start.append(len(layout.token_ids))
    layout.context_lens.append(end)
    layout.block_tables.append(table)
    layout.positions.extend(range(start, end))
    for place in range(start // block_size, len(table)):
        shift = (table[place] - place) * block_size
        first, last = max(start, place * block_size), min(end, (place + 1) * block_size)
        layout.slot_mapping.extend(range(first + shift, last + shift))
    if samples:
        layout.sample_rows.append(len(layout.token_ids) - 1)
