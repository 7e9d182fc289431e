"""Tiny random models, and engines over them, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_checkpoints import save_tiny

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, TokenDelta
from engine.sampling_params import SamplingParams

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", {"sliding_window": 11}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {}),
}
"""One of each family that the decoder knows; the Mistral one attends to a window of 11 tokens."""

EOS = 1


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


def tiny_engine_config(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 128,
        "token_budget": 64,
        "num_threads": 1,
        "check_invariants": True,
    }
    return EngineConfig(model=str(folder), **{**defaults, **options})


def make_request(name: str, tokens: list[int], **params: Any) -> Request:
    """A request that is greedy unless ``params`` say otherwise; its id decides its place among equals."""
    return Request(name, list(tokens), SamplingParams(**{"temperature": 0.0, **params}), arrival=1.0)


def run_to_end(engine: Engine, *requests: Request) -> dict[str, list[TokenDelta]]:
    """Add ``requests``, step until nothing is left, and return each one's deltas."""
    deltas: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return deltas


def made(deltas: list[TokenDelta]) -> list[int]:
    """The tokens of one request's deltas, whose offsets must follow each other."""
    tokens: list[int] = []
    for delta in deltas:
        assert delta.index - deltas[0].index == len(tokens)
        tokens += delta.token_ids
    return tokens
