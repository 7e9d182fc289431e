"""What tests on a GPU share: ``pytestmark = [*GPU]``, and engines there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import tiny_engine_config

from engine.config import EngineConfig
from engine.engine import Engine

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.timeout(200),
)


def gpu_config(folder: Path, **options: Any) -> EngineConfig:
    """As :func:`tiny_engine_config`, on the GPU."""
    return tiny_engine_config(folder, **{"device": "cuda", **options})


def gpu_engine(folder: Path, **options: Any) -> Engine:
    return Engine(gpu_config(folder, **options))


def delay(seconds: float) -> None:
    """Keep the current stream busy; about as long on any recent GPU."""
    torch.cuda._sleep(int(seconds * 1.7e9))  # type: ignore[no-untyped-call]
