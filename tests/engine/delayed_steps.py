"""Delays the steps of a running engine, so that no request is over before a test looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.engine_thread import EngineThread
from engine.request import TokenDelta


@contextmanager
def delayed_steps(thread: EngineThread, wait: Callable[[], object]) -> Iterator[None]:
    """Until the block ends, ``wait`` is called before each step."""
    engine = thread._engine
    assert engine is not None
    step = engine.step

    def wait_and_step() -> list[TokenDelta]:
        wait()
        return step()

    engine.step = wait_and_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]
