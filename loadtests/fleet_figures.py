"""What measurements of a fleet's routing make of the accounts of its ingress and engine replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadtests.report import Figure

State = Mapping[str, Any]
"""Of one replica; see ``inspect`` of both deployments."""

Sample = tuple[float, Mapping[str, int]]
"""When (seconds), and the attempts that each replica had been chosen for by then."""


def least_share(before: Mapping[str, int], after: Mapping[str, int], new: Iterable[str]) -> float:
    """Of the attempts between two counts the least that one of the ``new`` replicas got, over an even share."""
    got = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    total = sum(got.values())
    return min(got.get(name, 0) for name in new) * len(got) / total if total else 0.0


def seconds_to_share(samples: Sequence[Sample], new: Sequence[str], bar: float) -> float:
    """Seconds from the first sample until each new replica's share since then is ``bar``, and stays so."""
    began, before = samples[0]
    since = math.inf
    for at, counts in samples[1:]:
        if least_share(before, counts, new) < bar:
            since = math.inf
        elif since == math.inf:
            since = at
    return since - began


def differing_indexes(ingresses: Sequence[State], replicas: Iterable[str]) -> int:
    """Replicas of which not all ingresses hold the same blocks, all of them in step."""
    wrong = 0
    for replica in replicas:
        digests = {str(ingress["index"].get(replica, {}).get("digest")) for ingress in ingresses}
        wrong += len(digests) != 1 or "None" in digests
    return wrong


def seconds_to_step(index: Mapping[str, Mapping[str, Any]]) -> float:
    """From the first channel of an ingress until it knew every replica's blocks."""
    if not index or any(state["synced"] is None for state in index.values()):
        return math.inf
    first: float = min(state["opened"] for state in index.values())
    last: float = max(state["synced"] for state in index.values())
    return last - first


def left_figures(what: str, engines: Iterable[State], ingresses: Iterable[State]) -> list[Figure]:
    """What is still booked, live or referenced when every stream has ended."""
    engines, ingresses = list(engines), list(ingresses)
    left = {
        "tokens booked": sum(sum(ingress["booked_tokens"].values()) for ingress in ingresses),
        "live requests": sum(state["live_requests"] for state in [*engines, *ingresses]),
        "blocks referenced": sum(state["referenced_blocks"] for state in engines),
    }
    return [Figure(f"{what}: {name} left", value, "", 0, at_most=True) for name, value in left.items()]
