"""The flat tensors of a step, with exact values."""

from __future__ import annotations

from dataclasses import fields

import torch
from sequences import make_sequence

from engine.execution.batch import Batch, lay_out
from engine.scheduling.sequence import ScheduledChunk

CPU = torch.device("cpu")


def chunk(tokens: list[int], table: list[int], start: int, length: int, samples: bool) -> ScheduledChunk:
    return ScheduledChunk(make_sequence(tokens, table), start, length, samples)


def batch_of(chunks: list[ScheduledChunk], block_size: int) -> Batch:
    return lay_out(chunks, block_size).batch(CPU)


def test_decode_prefill_and_a_chunk_that_does_not_sample() -> None:
    batch = batch_of(
        [
            chunk([10, 11, 12, 13, 14], [7, 2], 4, 1, True),  # decode: position 4, second block
            chunk([20, 21, 22, 23, 24, 25, 26], [5, 9, 1], 2, 4, False),  # middle of a prompt, over an edge
            chunk([30, 31], [3], 0, 2, True),  # whole prompt
        ],
        4,
    )
    meta = batch.metadata
    assert batch.token_ids.tolist() == [14, 22, 23, 24, 25, 30, 31]
    assert meta.query_start.tolist() == [0, 1, 5, 7]
    assert meta.context_lens.tolist() == [5, 6, 2]
    assert meta.positions.tolist() == [4, 2, 3, 4, 5, 0, 1]
    assert meta.slot_mapping.tolist() == [8, 22, 23, 36, 37, 12, 13]
    assert meta.block_tables.tolist() == [[7, 2], [5, 9], [3, 0]]  # only blocks with tokens; padded by 0
    assert batch.sample_rows.tolist() == [0, 6]
    assert (meta.max_query_len, meta.max_context_len) == (4, 6)
    dtypes = [meta.query_start.dtype, meta.context_lens.dtype, meta.block_tables.dtype]
    assert dtypes == [torch.int32] * 3
    longs = [batch.token_ids.dtype, batch.sample_rows.dtype, meta.positions.dtype, meta.slot_mapping.dtype]
    assert longs == [torch.int64] * 4


def test_a_step_of_decodes() -> None:
    chunks = [chunk(list(range(10, 15)), [7, 2], 4, 1, True), chunk(list(range(20, 27)), [5, 9], 6, 1, True)]
    batch = batch_of(chunks, 4)
    meta = batch.metadata
    assert batch.token_ids.tolist() == [14, 26]
    assert meta.query_start.tolist() == [0, 1, 2]
    assert meta.context_lens.tolist() == [5, 7]
    assert meta.positions.tolist() == [4, 6]
    assert meta.slot_mapping.tolist() == [8, 38]
    assert meta.block_tables.tolist() == [[7, 2], [5, 9]]
    assert batch.sample_rows.tolist() == [0, 1]
    assert (meta.max_query_len, meta.max_context_len, lay_out(chunks, 4).decodes) == (1, 7, True)
    mixed = batch_of([*chunks, chunk([1, 2], [3], 0, 2, False)], 4)
    for alone, among in ((batch, mixed), (meta, mixed.metadata)):
        for field in fields(alone):
            value, other = (getattr(of, field.name) for of in (alone, among))
            assert getattr(value, "dtype", None) == getattr(other, "dtype", None), field.name


def test_nothing_samples() -> None:
    batch = batch_of([chunk([1, 2, 3], [0], 0, 2, False)], 16)
    assert batch.sample_rows.shape == (0,)
    assert batch.sample_rows.dtype == torch.int64


def test_absent_blocks_of_a_table_become_valid_ones() -> None:
    batch = batch_of([chunk(list(range(9)), [-1, -1, 5], 8, 1, True)], 4)
    assert batch.metadata.block_tables.tolist() == [[0, 0, 5]]
    assert batch.metadata.slot_mapping.tolist() == [20]


def test_drafts_are_rows_behind_their_chunk_with_its_blocks() -> None:
    drafting = chunk([10, 11, 12, 13], [7, 2], 2, 2, True)
    drafting.drafts = [14, 15]
    layout = lay_out([chunk([1], [4], 0, 1, True), drafting, chunk([2, 3], [5], 0, 2, False)], 4)
    batch = layout.batch(CPU)
    meta = batch.metadata
    assert batch.token_ids.tolist() == [1, 12, 13, 14, 15, 2, 3]
    assert meta.query_start.tolist() == [0, 1, 3, 4, 5, 7]
    assert meta.context_lens.tolist() == [1, 4, 5, 6, 2]
    assert meta.positions.tolist() == [0, 2, 3, 4, 5, 0, 1]
    assert meta.slot_mapping.tolist() == [16, 30, 31, 8, 9, 20, 21]
    assert meta.block_tables.tolist() == [[4, 0], [7, 0], [7, 2], [7, 2], [5, 0]]
    assert batch.sample_rows.tolist() == [0, 2, 3, 4]
    assert not layout.decodes


def test_a_step_of_decodes_with_drafts_decodes_only() -> None:
    drafting = chunk([10, 11, 12, 13], [7], 3, 1, True)
    drafting.drafts = [14]
    assert lay_out([drafting], 8).decodes
