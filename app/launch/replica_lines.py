"""What ``python -m app`` says on the terminal of engine replicas: how many, what for, who comes and goes."""

from __future__ import annotations

from collections.abc import Callable

from app.config import AppConfig

PROGRESS_EVERY_S = 5.0

Say = Callable[[str], None]


class Progress:
    """Says every few seconds how many replicas are ready."""

    def __init__(self, replicas: int, say: Say) -> None:
        self._replicas = replicas
        self._say = say
        self._next = 0.0
        self._began: float | None = None

    def update(self, ready: int, now: float) -> None:
        """``now`` in seconds on any clock; says nothing if it said something in the last few."""
        if now < self._next:
            return
        self._next = now + PROGRESS_EVERY_S
        self._began = now if self._began is None else self._began
        if ready < self._replicas:
            waited = f" after {now - self._began:.0f} s" if now > self._began else ""
            self._say(f"  waiting for engine replicas: {ready} of {self._replicas} ready{waited}")
        else:
            self._say("  waiting for the way to them: proxy, ingress, channels")


class ReplicaWatch:
    """Says when engine replicas come and go."""

    def __init__(self, ready: int, say: Say) -> None:
        self._ready = ready
        self._say = say

    def update(self, ready: int | None) -> None:
        """``ready`` engine replicas run; None, where nobody knows, says nothing."""
        if ready is not None and ready != self._ready:
            self._say(f"engine replicas: {self._ready} -> {ready}")
            self._ready = ready


def replicas_line(options: AppConfig) -> str:
    """How many engine replicas there are, may come to be, and by what."""
    if not options.scales:
        return str(options.engine_replicas)
    if options.scaling_policy == "occupancy":
        target = f"{options.occupancy_target:.0%} of the KV blocks in use"
    else:
        target = f"first token within {options.ttft_target_s:g} s, {options.tpot_target_s:g} s a token"
    shadow = "; shadow: decided, but not done" if options.scaling_shadow else ""
    return (
        f"{options.first_replicas}, {options.least_replicas} to {options.most_replicas} by demand "
        f"({target}; fewer after {options.scale_down_after_s:g} s of less need{shadow})"
    )


def shared_cores(options: AppConfig, cores: int) -> list[str]:
    """A warning where engine replicas without GPUs outnumber the ``cores`` of this machine."""
    most = options.most_replicas
    if most <= cores:
        return []
    share = f"{cores} cores" if cores > 1 else "1 core"
    cure = "max_replicas or raise tpot_target_s" if options.scales else options.replicas_option
    return [
        f"warning: {most} engine replicas would share {share}: more than {cores} make no step shorter; "
        f"lower {cure}"
    ]
