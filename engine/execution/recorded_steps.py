"""Steps that are recorded once and replayed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.batch import Batch
from engine.models.decoder import Decoder
from kernels import AttentionMetadata, Recording

_MOST = 512
"""Sizes that are remembered; the least recently used goes. A recording takes about a KiB a layer."""

LONGEST_S = 0.5
"""Steps, other than decodes, that take longer are not recorded. A replay is one call, in which the watchdog
sees no layer end, and the Python that it saves is nothing beside such a step."""


class _Size(NamedTuple):
    """What decides which calls a step makes."""

    tokens: int
    requests: int
    samples: int


class RecordedSteps:
    """Runs steps through the decoder, and replays those that repeat.

    Steps of one size ask the device for the same work: only the contents of their input differ. So the input
    is copied to tensors that stay, a step is recorded, and later ones of its size are replayed. Decode steps
    are recorded at first sight, others, such as whole chunks of long prompts, at their second, unless the first
    took longer than ``LONGEST_S``. The decoder remains the definition of a step, and a replay computes the same
    bits. Kernels that cannot record run every step through the decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: Tensor,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Larger steps are not recorded; ``max_blocks`` are a request's."""
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._clock = clock
        self._most = _Size(max_tokens, max_requests, max_requests)
        device = kv_pool.device
        self._possible = True
        self._forward = decoder.forward
        # By size, the last used at the end; None where one was seen but not recorded.
        self._recordings: dict[_Size, tuple[Tensor, Recording] | None] = {}
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._sample_rows = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._metadata = AttentionMetadata(
            query_start=torch.zeros(max_requests + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(max_requests, dtype=torch.int32, device=device),
            block_tables=torch.zeros(max_requests, max_blocks, dtype=torch.int32, device=device),
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            max_query_len=0,
            max_context_len=0,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits as of :meth:`Decoder.forward`. They hold until the next call."""
        metadata = batch.metadata
        size = _Size(len(batch.token_ids), len(metadata.context_lens), len(batch.sample_rows))
        # Whoever puts another forward in the decoder's place, as tests do that plant faults, gets every step.
        possible = self._possible and self._decoder.forward == self._forward
        if not possible or any(there > most for there, most in zip(size, self._most, strict=True)):
            return self._plain(batch)
        seen = size in self._recordings
        recorded = self._recordings[size] = self._recordings.pop(size, None)
        if len(self._recordings) > _MOST:
            del self._recordings[next(iter(self._recordings))]
        if recorded is None and not seen and not batch.decodes:
            began = self._clock()
            logits = self._plain(batch)
            if self._clock() - began > LONGEST_S:
                del self._recordings[size]  # its next step is a first one, too
            return logits
        self._token_ids[: size.tokens] = batch.token_ids
        self._sample_rows[: size.samples] = batch.sample_rows
        self._metadata.query_start[: size.requests + 1] = metadata.query_start
        self._metadata.context_lens[: size.requests] = metadata.context_lens
        self._metadata.block_tables[: size.requests, : metadata.block_tables.shape[1]] = metadata.block_tables
        self._metadata.positions[: size.tokens] = metadata.positions
        self._metadata.slot_mapping[: size.tokens] = metadata.slot_mapping
        if recorded is None:
            return self._record(size, metadata)
        logits, recording = recorded
        recording.replay()
        self._decoder.layers_run += len(self._decoder.layers)
        return logits

    def _plain(self, batch: Batch) -> Tensor:
        return self._decoder.kernels.in_buffers(
            lambda: self._decoder.forward(batch.token_ids, self._kv_pool, batch.metadata, batch.sample_rows)
        )

    def _record(self, size: _Size, metadata: AttentionMetadata) -> Tensor:
        """Run the step that lies in the input, and keep its recording if there can be one."""
        held = self._metadata
        metadata = dataclasses.replace(
            held,
            query_start=held.query_start[: size.requests + 1],
            context_lens=held.context_lens[: size.requests],
            block_tables=held.block_tables[: size.requests],
            positions=held.positions[: size.tokens],
            slot_mapping=held.slot_mapping[: size.tokens],
            max_query_len=metadata.max_query_len,
            max_context_len=metadata.max_context_len,
        )
        token_ids, sample_rows = self._token_ids[: size.tokens], self._sample_rows[: size.samples]
        logits, recording = self._decoder.kernels.record(
            lambda: self._decoder.forward(token_ids, self._kv_pool, metadata, sample_rows)
        )
        if recording is None:
            self._possible = False
        else:
            self._recordings[size] = (logits, recording)
        return logits
