"""A request that can run, and values of its fields with which none can."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.request import CacheNamespace, Request
from engine.sampling_params import SamplingParams

GOOD = Request("a", [1, 2, 3], SamplingParams(max_tokens=5))

BAD: dict[str, list[Any]] = {
    "request_id": [None, 5, b"a", ["a"], "\ud800"],
    "token_ids": [
        *(None, 5, "ab", (1, 2), {1}, np.array([1, 2]), [1.0], [True], ["a"], [None], [[1]], []),
        *([1, 2.5], [np.int64(1)], [-1], [100], [1, 10**30], [1, float("nan")]),
    ],
    "params": [None, {}, "greedy", SamplingParams],
    "namespace": [
        None,
        "salt",
        {},
        CacheNamespace(salt=["x"]),
        CacheNamespace(tenant=5),
        CacheNamespace(salt="\ud800"),
    ],
    "priority": [None, 1.0, True, "1", 10**400, -(10**400), np.int64(1)],
    "arrival": [None, "now", float("nan"), float("inf"), True],
    "generated_before": [None, 1.0, True, -1, 3, 10**30],
    "outputs": [None, [(1,)], ((1,), [2]), ((1.0,),), ((100,),), ((-1,),), ((True,),), 5],
}
