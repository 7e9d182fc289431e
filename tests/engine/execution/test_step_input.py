"""The input that recorded steps read."""

from __future__ import annotations

import pytest
import torch

from engine.execution.batch import Layout
from engine.execution.step_input import StepInput


def decodes(count: int) -> Layout:
    """A step of ``count`` requests that decode their first token."""
    rows = list(range(count))
    return Layout([7] * count, [*rows, count], [1] * count, [[row] for row in rows], [0] * count, rows, rows)


def test_a_step_after_one_that_could_not_be_written_has_its_own_rows() -> None:
    held = StepInput(8, 4, 2, torch.device("cpu"))
    held.put(decodes(3))
    prompts = Layout([1, 2, 3, 4], [0, 2, 4], [2, 2], [[0], [1]], [0, 1, 0, 1], [0, 1, 4, 5], [1, 3])
    prompts.sample_rows[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        held.put(prompts)
    held.put(decodes(3))
    assert held.metadata.query_start.tolist()[:4] == [0, 1, 2, 3]
    assert held.sample_rows.tolist()[:3] == [0, 1, 2]
