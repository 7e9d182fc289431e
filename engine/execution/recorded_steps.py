"""Steps are recorded once and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.batch import Batch
from engine.models.decoder import Decoder
from kernels import AttentionMetadata, Recording
from kernels.interface import Choices

WHOLE_ROWS, WHOLE_ATTENTION = 32, 1 << 18
"""Limits of a step that is replayed in one call: rows, and rows times the longest context. The watchdog sees no
progress during a call, so larger steps are replayed layer by layer, which adds little to such long ones."""


class _Size(NamedTuple):
    """What decides how much a step's calls do."""

    tokens: int
    requests: int
    samples: int


class _Kind(NamedTuple):
    """What decides which calls a step makes."""

    samples: bool
    screened: bool  # only the logits that decide its choices matter


class RecordedSteps:
    """Runs steps by replaying what the decoder does.

    All steps of a kind make the same calls to the device. Only the contents of their input differ, and the
    numbers of tokens, requests and samples. So the input is copied to persistent tensors, and three recordings
    serve all steps: one for those that sample, one for those whose choices need only some logits, and one for
    the others, which end with the last layer's keys and values. Each is made when it is
    first needed. The decoder remains the definition of a step, and a replay computes the same bits. With
    kernels that cannot record, every step runs through the decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: Tensor,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
    ) -> None:
        """Larger steps are not replayed; ``max_blocks`` are a request's."""
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._most = _Size(max_tokens, max_requests, max_requests)
        self._forward = decoder.forward
        self._recordings: dict[_Kind, tuple[Tensor, Recording] | None] = {}
        """``None`` where the kernels cannot record."""
        device = kv_pool.device
        tokens, requests = max_tokens + 1, max_requests + 1  # see Kernels.record()
        self._token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._sample_rows = torch.zeros(requests, dtype=torch.int64, device=device)
        self._choices = Choices(
            temperature=torch.zeros(requests, dtype=torch.float32, device=device),
            keys=torch.zeros(requests, dtype=torch.int64, device=device),
        )
        self._metadata = AttentionMetadata(
            query_start=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(requests, dtype=torch.int32, device=device),
            block_tables=torch.zeros(requests, max_blocks, dtype=torch.int32, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
            max_query_len=0,
            max_context_len=0,
        )

    def prepare(self) -> None:
        """Make all recordings now."""
        for samples, screened in ((True, False), (False, False), (True, True)):
            if not screened or self._decoder.screened_rows:
                self._recorded(_Kind(samples, screened))

    def forward(self, batch: Batch, choices: Choices | None = None) -> Tensor:
        """Logits as of :meth:`Decoder.forward`. They hold until the next call."""
        metadata = batch.metadata
        size = _Size(len(batch.token_ids), len(metadata.context_lens), len(batch.sample_rows))
        # If another forward replaces the decoder's, as in tests that plant faults, it gets every step.
        if self._decoder.forward != self._forward or any(map(int.__gt__, size, self._most)):
            return self._plain(batch)
        kind = _Kind(size.samples > 0, choices is not None and 0 < size.samples <= self._decoder.screened_rows)
        recorded = self._recorded(kind)
        if recorded is None:
            return self._plain(batch)
        held = self._metadata
        _put(batch.token_ids, self._token_ids)
        _put(batch.sample_rows, self._sample_rows)
        if choices is not None and kind.screened:
            _put(choices.temperature, self._choices.temperature)
            _put(choices.keys, self._choices.keys)
        _put(metadata.query_start, held.query_start)
        _put(metadata.context_lens, held.context_lens)
        _put(metadata.block_tables, held.block_tables)
        _put(metadata.positions, held.positions)
        _put(metadata.slot_mapping, held.slot_mapping)
        logits, recording = recorded
        layers = len(self._decoder.layers)
        parts = 1 if runs_whole(size.tokens, metadata.max_context_len) else layers
        for _ in recording.replay(size if kind.samples else size[:2], parts):
            self._decoder.layers_run += layers // parts
        return logits[: size.samples]

    def _plain(self, batch: Batch) -> Tensor:
        return self._decoder.kernels.in_buffers(
            lambda: self._decoder.forward(batch.token_ids, self._kv_pool, batch.metadata, batch.sample_rows)
        )

    def _recorded(self, kind: _Kind) -> tuple[Tensor, Recording] | None:
        if kind not in self._recordings:
            self._recordings[kind] = self._record(kind)
        return self._recordings[kind]

    def _record(self, kind: _Kind) -> tuple[Tensor, Recording] | None:
        held = self._metadata

        def run(sizes: Sequence[int]) -> Tensor:
            tokens, requests, *sampled = sizes
            metadata = dataclasses.replace(
                held,
                query_start=held.query_start[: requests + 1],
                context_lens=held.context_lens[:requests],
                block_tables=held.block_tables[:requests],
                positions=held.positions[:tokens],
                slot_mapping=held.slot_mapping[:tokens],
            )
            count = sum(sampled)
            rows, choices = self._sample_rows[:count], None
            if kind.screened:
                choices = Choices(self._choices.temperature[:count], self._choices.keys[:count])
            return self._decoder.forward(self._token_ids[:tokens], self._kv_pool, metadata, rows, choices)

        return self._decoder.kernels.record(run, self._most if kind.samples else self._most[:2])


def runs_whole(rows: int, longest_context: int) -> bool:
    """Whether a step is so short on any machine that one call may run all of its layers."""
    return rows <= WHOLE_ROWS and rows * longest_context <= WHOLE_ATTENTION


def _put(value: Tensor, held: Tensor) -> None:
    """Let ``held`` begin with ``value``."""
    place = tuple(map(slice, value.shape))
    if held.device.type == "cpu":  # torch takes three times as long for so few elements
        held.numpy()[place] = value.numpy()
    else:
        held[place] = value
