"""Fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_stats import SCALING
from local_server import CONTEXT, MODEL, POOL, LocalServer, serve_locally
from small_model import save_small

from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.metrics.engine_figures import engine_samples
from app.metrics.fleet_figures import FleetFigures, ModelFigures
from app.metrics.samples import pack
from engine.config import EngineConfig


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Path:
    """A random model that computes little, for tests that need much text but no sense in it."""
    return save_small(tmp_path_factory.mktemp("small"), bundled_model, 1, 8192)


@pytest.fixture(scope="session")
def bundled_tokenizer(bundled_model: Path) -> PromptTokenizer:
    return PromptTokenizer(TokenizerParts.read(bundled_model))


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch, bundled_tokenizer: PromptTokenizer) -> None:
    """Ingress replicas share the bundled model's tokenizer: each takes a quarter of a second."""
    monkeypatch.setattr("app.ingress_model.PromptTokenizer", lambda parts: bundled_tokenizer)


@pytest.fixture(scope="session")
def server(bundled_model: Path) -> Iterator[LocalServer]:
    """The bundled model in this process, with a pool smaller than its context: two seconds to load.

    Weights of 8 bits halve the time of the tests.
    """
    config = EngineConfig(
        model=str(bundled_model),
        dtype="float32",
        weights="int8",
        block_size=16,
        num_blocks=POOL // 16,
        max_model_len=CONTEXT,
        token_budget=256,
        num_threads=1,
    )
    with serve_locally(bundled_model, config, MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[httpx.Client]:
    """A client of ``server``."""
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture
def fleet(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> LocalServer:
    """The server with its engine's figures, and a channel to it."""

    def engines() -> dict[str, list[float]]:
        return {"quire#engine#a1b2": pack(engine_samples(server.client.engine.stats(), SCALING, 0))}

    own = server.api._figures[0].own
    monkeypatch.setattr(
        server.api, "fleet_figures", FleetFigures([ModelFigures(server.service.model, own, engines)])
    )
    monkeypatch.setattr(server.service, "channel_states", lambda: {"quire#engine#a1b2": "open"})
    return server
