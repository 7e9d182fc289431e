"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from leftovers import give_back

from app.launch.model_store import resolve

MUCH = 800_000_000
"""Bytes of this process from which on what the tests before have left is given back."""


@pytest.fixture(scope="module", autouse=True)
def _no_engines_of_other_modules() -> None:
    """Without this the engines of all modules add up."""
    if psutil.Process().memory_info().rss > MUCH:
        give_back()


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched and converted once if this machine has not got it yet."""
    return resolve("smollm2-135m-instruct")
