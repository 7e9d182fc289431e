"""A typed front of ``triton.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(*, varying: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for a kernel whose ``varying`` integer arguments change from step to step.

    Triton compiles a kernel anew when an integer argument becomes 1 or stops being a multiple of 16. That is
    welcome for strides, which never change, and a stall of a second in the middle of serving for the rest.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(varying))

    return decorate


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: ``TRITON_INTERPRET=1`` was set before their import."""
    return bool(triton.knobs.runtime.interpret)
