"""The ways to choose a replica that are compared live: values of the application's option ``routing``."""

from __future__ import annotations

import importlib
from enum import StrEnum

from app.config import ROUTERS


class LiveArm(StrEnum):
    """By the option's value: all that the application has."""

    PREFIX = "prefix"
    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AFFINITY = "prefix_affinity"


COMPARED = (LiveArm.PREFIX, LiveArm.POWER_OF_TWO)
"""Those that the bars are about."""


def missing(arm: LiveArm) -> str | None:
    """Why an arm cannot run in this environment; ``None`` if it can."""
    try:
        importlib.import_module(ROUTERS[arm].partition(":")[0])
    except ImportError as error:
        return f"its router cannot be imported: {error}"
    return None
