"""A typed front of ``triton.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(*, varying: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for a kernel whose ``varying`` integer arguments change from step to step.

    Triton compiles a kernel again when an integer argument becomes 1 or stops being a multiple of 16. That
    helps for strides, which never change; for other arguments it would stall serving for a second.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(varying))

    return decorate


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: ``TRITON_INTERPRET=1`` was set before their import."""
    return bool(triton.knobs.runtime.interpret)
