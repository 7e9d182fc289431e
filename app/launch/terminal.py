"""What ``python -m app`` prints: progress, where the server answers, and changes of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.config import AppConfig, ServedModel
from app.launch.preflight import Fit
from app.option_groups import ScalingOptions

PROGRESS_EVERY_S = 5.0

Say = Callable[[str], None]


class Started(NamedTuple):
    """A model that is served."""

    model: ServedModel
    fit: Fit
    ready: int  # engine replicas that accept requests
    pool_tokens: Sequence[int]  # the different sizes of their KV pools, the largest first; empty if unknown


class Progress:
    """Prints every few seconds how many replicas are ready."""

    def __init__(self, replicas: int, say: Say) -> None:
        self._replicas = replicas
        self._say = say
        self._next = 0.0
        self._began: float | None = None

    def update(self, ready: int, now: float) -> None:
        """``now`` is in seconds on any clock; prints at most once every ``PROGRESS_EVERY_S``."""
        if now < self._next:
            return
        self._next = now + PROGRESS_EVERY_S
        self._began = now if self._began is None else self._began
        if ready < self._replicas:
            waited = f" after {now - self._began:.0f} s" if now > self._began else ""
            self._say(f"  waiting for engine replicas: {ready} of {self._replicas} ready{waited}")
        else:
            self._say("  waiting for proxy, ingress, and channels")


class ReplicaWatch:
    """Prints when engine replicas start or stop."""

    def __init__(self, ready: int, say: Say) -> None:
        self._ready = ready
        self._say = say

    def update(self, ready: int | None) -> None:
        """``ready`` engine replicas run; ``None`` if unknown, which prints nothing."""
        if ready is not None and ready != self._ready:
            self._say(f"engine replicas: {self._ready} -> {ready}")
            self._ready = ready


def replicas_line(options: ScalingOptions, ready: int) -> str:
    """How many engine replicas there are, how many are ready, how many there may be, and what decides."""
    first = str(options.initial_replicas)
    if ready < options.initial_replicas:
        first += f" ({ready} ready so far)"
    if not options.scales:
        return first
    if options.scaling_policy == "occupancy":
        target = f"{options.occupancy_target:.0%} of the KV blocks in use"
    else:
        target = f"first token within {options.ttft_target_s:g} s, {options.tpot_target_s:g} s per token"
    window = options.scale_down_after_s
    down = "twice the startup time" if window is None else f"{window:g} s"
    shadow = "; shadow mode: reported only" if options.scaling_shadow else ""
    return (
        f"{first}, {options.lower_limit} to {options.upper_limit} with demand "
        f"({target}; down after {down} of lower need{shadow})"
    )


def shared_cores(models: Sequence[ServedModel], cores: int) -> list[str]:
    """A warning where engine replicas without GPUs outnumber the ``cores`` of this machine."""
    most = sum(model.options.scaling.upper_limit for model in models)
    if most <= cores:
        return []
    share = f"{cores} cores" if cores > 1 else "1 core"
    scales = any(model.options.scaling.scales for model in models)
    options = " or ".join(dict.fromkeys(model.options.scaling.limiting_option for model in models))
    cure = f"{options} or raise tpot_target_s" if scales else options
    return [
        f"warning: {most} engine replicas would share {share}: more than {cores} do not shorten a step; "
        f"lower {cure}"
    ]


def announce(
    url: str,
    proxy: str,
    dashboard: str,
    options: AppConfig,
    served: Sequence[Started],
    keys_required: bool,
    say: Say,
) -> None:
    """Print where the server answers, what it serves, and how to try it.

    ``dashboard`` is the address of Ray's; empty without one.
    """
    from app.launch import placement  # here, so that the launcher refuses a wrong option before Ray is loaded

    nodes = placement.cluster_nodes()
    first = served[0].model
    name = first.name
    say(f"Quire serves {', '.join(one.model.name for one in served)} at {url}/v1 through {proxy}")
    ingresses = options.ingress.ingress_replicas
    if first.one_of_several:
        for model, fit, ready, pools in served:
            threads = placement.threads_of_an_engine(model, nodes)
            share = f"{threads} CPU threads" if threads > 1 else "1 CPU thread"
            line = replicas_line(model.options.scaling, ready)
            say(f"  {model.name}: engine replicas {line}, each with {share}")
            for line in fit_lines(fit, pools):
                say(f"  {line}")
        say(f"  ingress replicas {ingresses}")
    else:
        line = replicas_line(options.scaling, served[0].ready)
        say(f"  engine replicas {line}, ingress replicas {ingresses}")
        for line in fit_lines(served[0].fit, served[0].pool_tokens):
            say(line)
    say(f"  in a browser: {url}/ to chat, {url}/dashboard for the fleet, {url}/docs for the API")
    if keys_required:
        say("  where the browser asks for a user name and a password: any name, and an API key as the password")
    if dashboard:
        say(f"  Ray's dashboard http://{dashboard}")
    key = " -H 'authorization: Bearer KEY'" if keys_required else ""
    say(
        f"  try: curl -N {url}/v1/chat/completions{key} -H 'content-type: application/json' -d "
        f'\'{{"model": "{name}", "stream": true, "temperature": 0, "messages": '
        '[{"role": "system", "content": "You are a helpful assistant."}, '
        '{"role": "user", "content": "What is the capital of France?"}]}\''
    )


def fit_lines(fit: Fit, pools: Sequence[int]) -> list[str]:
    """What one engine replica holds; ``pools`` are the sizes that they have, empty if unknown."""
    # The format of the weights is not known here, because `weights=auto` depends on them; each engine logs it.
    planned = fit.pool
    most = next(iter(pools), planned.tokens if planned else None)
    if most is None:
        return [f"  weights and KV in {fit.dtype}"]
    size = f"{most:,} tokens" if len(pools) < 2 else f"{min(pools):,} to {most:,} tokens"
    if not pools:
        size = f"an estimated {size}"
    if planned is not None and len(pools) < 2:
        size += f" ({most // planned.block_size:,} blocks)"
    line = f"  KV in {fit.dtype}, {size} in each replica"
    if planned is not None and any(tokens != planned.tokens for tokens in pools):
        line += f", not the {planned.tokens:,} planned before the start"
    lines = [line]
    if most < fit.context_length:
        lines.append(
            f"  warning: requests are limited to the {most:,} tokens of the KV pool, below the "
            f"context length of {fit.context_length:,}; raise kv_memory"
        )
    return lines
