"""Why a request is refused, and when its client should try again."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

LONGEST_BASE_S, LONGEST_RETRY_S = 40, 60
"""Maximum of ``Retry-After`` in seconds, before and after the random part. OpenAI's clients honor up to 120."""


class Refusal(NamedTuple):
    """Why a request is refused: ``wait_s``, the expected wait with all replicas, exceeds ``limit_s``.

    ``startup_s`` is the part of the limit that allows for replicas to start. With ``behind`` the ingress itself
    does not keep up: ``wait_s`` is its lag, or how long requests wait to begin.
    """

    wait_s: float
    limit_s: float
    retry_after_s: int
    startup_s: float = 0.0
    behind: bool = False


def retry_after_s(seconds: float, rng: random.Random) -> int:
    """Whole seconds until about ``seconds`` have passed; at least 1.

    Up to half of it is added at random for each refusal: otherwise requests that were refused together would
    return together, even those of one client.
    """
    base = min(max(math.ceil(min(seconds, LONGEST_BASE_S)), 1), LONGEST_BASE_S)
    return min(base + rng.randint(0, max(base // 2, 1)), LONGEST_RETRY_S)
