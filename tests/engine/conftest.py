"""Fixtures of the tests of the engine: tiny random models, and engines over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_checkpoints import save_tiny
from tiny_engines import EOS, TINY_MODELS, tiny_engine_config

from engine.engine import Engine


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each entry of ``TINY_MODELS``."""
    folders = {}
    for name, (family, changes) in TINY_MODELS.items():
        folders[name] = tmp_path_factory.mktemp(f"tiny-{name}")
        save_tiny(folders[name], family, eos_token_id=EOS, bos_token_id=0, **changes)
    return folders


@pytest.fixture
def make_engine(tiny_models: dict[str, Path]) -> Callable[..., Engine]:
    """Build a float32 engine over a tiny model that checks its invariants after every step."""

    def make(model: str = "Llama", **options: Any) -> Engine:
        return Engine(tiny_engine_config(tiny_models[model], **options))

    return make
