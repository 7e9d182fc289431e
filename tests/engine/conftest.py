"""Fixtures of the tests of the engine: tiny random models, and engines over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logit_bits import SAMPLING, Alone, Bits, run
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


@pytest.fixture(scope="session")
def known_alone() -> dict[tuple[str, int], tuple[list[int], Bits]]:
    """What ``alone`` has computed, by model and seed."""
    return {}


@pytest.fixture
def alone(
    make_engine: Callable[..., Engine], known_alone: dict[tuple[str, int], tuple[list[int], Bits]]
) -> Alone:
    """Tokens and logits of the target run alone; each is computed once, for all tests that compare with it."""

    def compute(model: str, seed: int = SAMPLING["seed"]) -> tuple[list[int], Bits]:
        if (model, seed) not in known_alone:
            known_alone[model, seed] = run(make_engine(model), seed=seed)
        return known_alone[model, seed]

    return compute
