"""Random schemas and the bundled model at temperature 1: whatever it finishes is valid.

``QUIRE_SCHEMAS`` says how many schemas; see ``docs/structured_output.md``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from structured_engines import finished_values, random_schema

COUNT = int(os.environ.get("QUIRE_SCHEMAS", "16"))


@pytest.mark.timeout(3600)  # of hundreds, on a busy machine
def test_what_a_model_finishes_is_valid(bundled_model: Path) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(COUNT)]
    assert finished_values(bundled_model, schemas) >= 0.7 * COUNT  # the others ran out of tokens
