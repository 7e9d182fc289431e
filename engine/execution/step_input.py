"""The input of recorded steps."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.execution.batch import Layout
from kernels import AttentionMetadata
from kernels.interface import Choices


class StepInput:
    """Tensors that persist; a step's input is at their beginning, and recordings read it from there."""

    def __init__(self, tokens: int, requests: int, max_blocks: int, device: torch.device) -> None:
        """For steps of at most ``tokens`` of ``requests``, each with at most ``max_blocks`` blocks."""
        self.token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.sample_rows = torch.zeros(requests, dtype=torch.int64, device=device)
        self.choices = Choices(
            temperature=torch.zeros(requests, dtype=torch.float32, device=device),
            keys=torch.zeros(requests, dtype=torch.int64, device=device),
        )
        self.metadata = AttentionMetadata(
            query_start=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(requests, dtype=torch.int32, device=device),
            block_tables=torch.zeros(requests, max_blocks, dtype=torch.int32, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
            max_query_len=0,
            max_context_len=0,
        )
        self._arrays = _Arrays(self) if device.type == "cpu" else None

    def put(self, layout: Layout) -> None:
        """Hold a step's input."""
        if self._arrays is not None:
            self._arrays.put(layout)
            return
        batch, held = layout.batch(self.token_ids.device), self.metadata
        metadata = batch.metadata
        _put(batch.token_ids, self.token_ids)
        _put(batch.sample_rows, self.sample_rows)
        _put(metadata.query_start, held.query_start)
        _put(metadata.context_lens, held.context_lens)
        _put(metadata.block_tables, held.block_tables)
        _put(metadata.positions, held.positions)
        _put(metadata.slot_mapping, held.slot_mapping)

    def put_choices(self, choices: Choices) -> None:
        """Hold how a step's rows choose."""
        _put(choices.temperature, self.choices.temperature)
        _put(choices.keys, self.choices.keys)


class _Arrays:
    """The tensors of an input on the CPU, as arrays."""

    def __init__(self, held: StepInput) -> None:
        metadata = held.metadata
        self.own_rows = 0  # so many of the first requests have the row of their number, and it samples
        self._token_ids = held.token_ids.numpy()
        self._sample_rows = held.sample_rows.numpy()
        self._query_start = metadata.query_start.numpy()
        self._context_lens = metadata.context_lens.numpy()
        self._block_tables = metadata.block_tables.numpy()
        self._positions = metadata.positions.numpy()
        self._slot_mapping = metadata.slot_mapping.numpy()

    def put(self, layout: Layout) -> None:
        """Hold a step's input."""
        tokens, requests, samples = (
            len(each) for each in (layout.token_ids, layout.context_lens, layout.sample_rows)
        )
        self._token_ids[:tokens] = layout.token_ids
        self._context_lens[:requests] = layout.context_lens
        self._positions[:tokens] = layout.positions
        self._slot_mapping[:tokens] = layout.slot_mapping
        for row, table in enumerate(layout.block_tables):
            self._block_tables[row, : len(table)] = table
        if layout.decodes and requests <= self.own_rows:
            return
        self.own_rows = 0  # until both are written: if that fails, the next step must write them
        self._query_start[: requests + 1] = layout.query_start
        self._sample_rows[:samples] = layout.sample_rows
        self.own_rows = requests if layout.decodes else 0


def _put(value: Tensor, held: Tensor) -> None:
    """Let ``held`` begin with ``value``."""
    place = tuple(map(slice, value.shape))
    if held.device.type == "cpu":  # torch takes three times as long for so few elements
        held.numpy()[place] = value.numpy()
    else:
        held[place] = value
