"""Decode steps that are recorded once and replayed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.execution.batch import Batch
from engine.models.decoder import Decoder
from kernels import AttentionMetadata, Recording


class RecordedSteps:
    """Runs steps through the decoder, and replays those that repeat.

    A step in which each request decodes one token and samples asks the device for the same work whenever as
    many requests take part: only the contents of its input differ. So the input is copied to tensors that stay,
    the first such step is recorded, and later ones are replayed. The decoder remains the definition of a step,
    and a replay computes the same bits. Kernels that cannot record run every step through the decoder.
    """

    def __init__(self, decoder: Decoder, kv_pool: Tensor, max_rows: int, max_blocks: int) -> None:
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._max_rows = max_rows
        device = kv_pool.device
        self._possible = True
        self._forward = decoder.forward
        self._recordings: dict[int, tuple[Tensor, Recording]] = {}  # by the number of requests
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._sample_rows = torch.arange(max_rows, device=device)
        self._metadata = AttentionMetadata(
            query_start=torch.arange(max_rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(max_rows, dtype=torch.int64, device=device),
            max_query_len=1,
            max_context_len=0,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits as of :meth:`Decoder.forward`. They hold until the next call."""
        metadata = batch.metadata
        count = batch.token_ids.shape[0]
        # Whoever puts another forward in the decoder's place, as tests do that plant faults, gets every step.
        possible = self._possible and self._decoder.forward == self._forward
        if not possible or not batch.decodes or count > self._max_rows:
            return self._decoder.kernels.in_buffers(
                lambda: self._decoder.forward(batch.token_ids, self._kv_pool, metadata, batch.sample_rows)
            )
        self._token_ids[:count] = batch.token_ids
        self._metadata.context_lens[:count] = metadata.context_lens
        self._metadata.block_tables[:count, : metadata.block_tables.shape[1]] = metadata.block_tables
        self._metadata.positions[:count] = metadata.positions
        self._metadata.slot_mapping[:count] = metadata.slot_mapping
        recorded = self._recordings.get(count)
        if recorded is not None:
            logits, recording = recorded
            recording.replay()
            self._decoder.layers_run += len(self._decoder.layers)
            return logits
        return self._record(count, metadata.max_context_len)

    def _record(self, count: int, max_context_len: int) -> Tensor:
        """Run the step that lies in the input, and keep its recording if there can be one."""
        held = self._metadata
        metadata = dataclasses.replace(
            held,
            query_start=held.query_start[: count + 1],
            context_lens=held.context_lens[:count],
            block_tables=held.block_tables[:count],
            positions=held.positions[:count],
            slot_mapping=held.slot_mapping[:count],
            max_context_len=max_context_len,
        )
        token_ids, sample_rows = self._token_ids[:count], self._sample_rows[:count]
        logits, recording = self._decoder.kernels.record(
            lambda: self._decoder.forward(token_ids, self._kv_pool, metadata, sample_rows)
        )
        if recording is None:
            self._possible = False
        else:
            self._recordings[count] = (logits, recording)
        return logits
