"""The paged engine: a library of its own. ``from engine import LLM, SamplingParams``.

Names are imported at first use, so that ``import engine`` is light and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.engine_thread import EngineThread
    from engine.llm import LLM, RequestResult, SequenceResult
    from engine.sampling_params import SamplingParams

__all__ = ["LLM", "Engine", "EngineConfig", "EngineThread", "RequestResult", "SamplingParams", "SequenceResult"]

_MODULES = {
    "LLM": "engine.llm",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineThread": "engine.engine_thread",
    "RequestResult": "engine.llm",
    "SamplingParams": "engine.sampling_params",
    "SequenceResult": "engine.llm",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(module), name)
