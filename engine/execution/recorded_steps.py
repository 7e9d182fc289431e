"""Steps are recorded once and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.execution.batch import Batch, Layout
from engine.execution.step_input import StepInput
from engine.models.decoder import Decoder
from kernels import Recording
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
        # What the last step returned, with its kind and number of samples. The next one mostly returns the same
        # tensor, so kernels that draw from it need not look up its address again.
        self._last: tuple[_Kind, int, Tensor] | None = None
        # One more than the most: see Kernels.record().
        self._input = StepInput(max_tokens + 1, max_requests + 1, max_blocks, kv_pool.device)

    def prepare(self) -> None:
        """Make all recordings now."""
        for samples, screened in ((True, False), (False, False), (True, True)):
            if not screened or self._decoder.screened_rows:
                self._recorded(_Kind(samples, screened))

    def forward(self, layout: Layout, choices: Choices | None = None) -> Tensor:
        """Logits as of :meth:`Decoder.forward`. They hold until the next call."""
        size = _Size(len(layout.token_ids), len(layout.context_lens), len(layout.sample_rows))
        kind = self._kind(size, choices)
        if not self._replays(size, kind):
            return self._plain(layout.batch(self._kv_pool.device))
        self._input.put(layout)
        return self._replay(size, kind, choices, layout.max_context_len)

    def _kind(self, size: _Size, choices: Choices | None) -> _Kind:
        screened = choices is not None and 0 < size.samples <= self._decoder.screened_rows
        return _Kind(size.samples > 0, screened)

    def _replays(self, size: _Size, kind: _Kind) -> bool:
        # If another forward replaces the decoder's, as in tests that plant faults, it gets every step.
        if self._decoder.forward != self._forward or any(map(int.__gt__, size, self._most)):
            return False
        return self._recorded(kind) is not None

    def _replay(self, size: _Size, kind: _Kind, choices: Choices | None, longest_context: int) -> Tensor:
        """A step whose input is in place."""
        recorded = self._recorded(kind)
        assert recorded is not None
        logits, recording = recorded
        if choices is not None and kind.screened:
            self._input.put_choices(choices)
        layers = len(self._decoder.layers)
        parts = 1 if runs_whole(size.tokens, longest_context) else layers
        for _ in recording.replay(size if kind.samples else size[:2], parts):
            self._decoder.layers_run += layers // parts
        if self._last is None or self._last[:2] != (kind, size.samples):
            self._last = kind, size.samples, logits[: size.samples]
        return self._last[2]

    def _plain(self, batch: Batch) -> Tensor:
        return self._decoder.kernels.in_buffers(
            lambda: self._decoder.forward(batch.token_ids, self._kv_pool, batch.metadata, batch.sample_rows)
        )

    def _recorded(self, kind: _Kind) -> tuple[Tensor, Recording] | None:
        if kind not in self._recordings:
            self._recordings[kind] = self._record(kind)
        return self._recordings[kind]

    def _record(self, kind: _Kind) -> tuple[Tensor, Recording] | None:
        held = self._input.metadata

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
            rows, choices = self._input.sample_rows[:count], None
            if kind.screened:
                choices = Choices(self._input.choices.temperature[:count], self._input.choices.keys[:count])
            return self._decoder.forward(self._input.token_ids[:tokens], self._kv_pool, metadata, rows, choices)

        return self._decoder.kernels.record(run, self._most if kind.samples else self._most[:2])


def runs_whole(rows: int, longest_context: int) -> bool:
    """Whether a step is so short on any machine that one call may run all of its layers."""
    return rows <= WHOLE_ROWS and rows * longest_context <= WHOLE_ATTENTION
