"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.model_store import resolve


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched and converted once if this machine has not got it yet."""
    return resolve("smollm2-135m-instruct")
