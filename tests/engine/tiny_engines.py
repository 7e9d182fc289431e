"""Engines over tiny random models, requests to them, and what these make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", {"sliding_window": 11}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {}),
    "Gemma": ("Gemma", {}),
    "Gemma2": ("Gemma2", {"sliding_window": 11}),
    "Olmo2": ("Olmo2", {}),
}
"""One of each family that the decoder knows. All layers of Mistral's, and one of Gemma 2's, see 11 tokens."""

EOS = 1


def tiny_engine_config(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 128,
        "token_budget": 64,
        "num_threads": 1,
        "speculation": 0,
        "check_invariants": True,
    }
    return EngineConfig(model=str(folder), **{**defaults, **options})


def make_request(name: str, tokens: list[int], **params: Any) -> Request:
    """A request that is greedy unless ``params`` say otherwise; its id decides its place among equals."""
    return Request(name, list(tokens), SamplingParams(**{"temperature": 0.0, **params}), arrival=1.0)


def add(engine: Engine, request: Request) -> Sequence:
    """Add ``request``; return its first sequence."""
    engine.add(request)
    return engine.scheduler.state.sequences[request.request_id, 0]


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
