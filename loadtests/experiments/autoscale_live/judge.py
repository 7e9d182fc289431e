"""What was seen of the fleet, as figures: pure functions of the recording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from loadtests.client import Outcome
from loadtests.experiments.autoscale_live.plan import REPLICAS
from loadtests.experiments.autoscale_live.watch import EngineLook, ServeLook
from loadtests.experiments.fleet import longest_pause
from loadtests.report import Figure, most

GONE_S = 15.0
REACTION_S = 3.0


@dataclass(slots=True)
class Recording:
    """One run; times of ``time.perf_counter``. ``events`` are moments with a name."""

    began: float
    serve: Sequence[ServeLook] = ()
    engines: Sequence[EngineLook] = ()
    rises: list[float] = field(default_factory=list)  # more clients came
    killed: float = math.nan  # the controller
    watched_s: float = 0.0  # since then, before anything else happened
    left: float = math.nan  # the clients were told to leave
    events: list[tuple[float, str]] = field(default_factory=list)
    streams: list[list[Outcome]] = field(default_factory=list)  # the turns of each
    asked: list[Outcome] = field(default_factory=list)  # by clients


def figures(run: Recording) -> list[Figure]:
    """All of the run whose controller is killed in its middle."""
    serve = run.serve
    turns = [turn for stream in run.streams for turn in stream]
    stopped = stops(serve)
    until = run.killed + run.watched_s
    complete = sum(all(turn.whole for turn in one) for one in run.streams)
    gone = max((end - last for last, end in stopped.values()), default=0.0)
    kill, within = "controller killed under load", f"within {run.watched_s:.0f} s"
    return [
        most("streams cut", sum(not turn.complete for turn in turns)),
        Figure("streams complete", complete, "", len(run.streams)),
        Figure("longest pause of a stream", longest_pause(turns), " s"),
        Figure("requests of clients", len(run.asked), "", 1),
        most("requests of clients that failed", sum(not one.whole for one in run.asked)),
        Figure("preemptions", max((look.preemptions for look in run.engines), default=0)),
        Figure("replicas at the peak", max(len(look.running) for look in serve), "", REPLICAS),
        most("replicas in the end", len(serve[-1].running), 1),
        most("target in the end", serve[-1].target, 1),
        *(
            most(
                f"up {n}: first request queued to new target",
                reaction(at, serve, run.engines),
                REACTION_S,
                " s",
            )
            for n, at in enumerate(run.rises, 1)
        ),
        most("ups after the load has gone", ups(serve, run.left)),
        Figure("replicas stopped for less load", len(stopped), "", REPLICAS - 1),
        most("longest from running to gone", gone, GONE_S, " s"),
        most(f"{kill}: replicas stopped {within}", stopped_between(serve, run.killed, until)),
        most(f"{kill}: changes of the target {within}", changes(serve, run.killed, until)),
    ]


def reaction(rise: float, serve: Sequence[ServeLook], engines: Sequence[EngineLook]) -> float:
    """Seconds from the first request that waits in an engine after ``rise`` to a higher target.

    Counted from the look before the one that saw it, so rather too much; infinite if either was never seen.
    """
    began = waits_since(rise, engines)
    before = _at(serve, rise)
    if before is None or began == math.inf:
        return math.inf
    raised = next((look.at for look in serve if look.at > rise and look.target > before.target), math.inf)
    return max(raised - began, 0.0)


def waits_since(rise: float, engines: Sequence[EngineLook]) -> float:
    """The last moment after ``rise`` at which no request was known to wait; infinite if none ever did."""
    since = rise
    for look in engines:
        if look.at > rise:
            if look.waiting:
                return since
            since = look.at
    return math.inf


def stops(serve: Sequence[ServeLook]) -> dict[str, tuple[float, float]]:
    """Of each replica that left the running ones for good: when it was last seen there, and first seen gone.

    A new controller does not call replicas running before it has found them again: these have not left.
    """
    last: dict[str, float] = {}
    ended: dict[str, float] = {}
    for look in serve:
        last.update(dict.fromkeys(look.running, look.at))
        for name in look.ended:
            ended.setdefault(name, look.at)
    left = last.keys() - (serve[-1].states.keys() - _stopping(serve[-1]) - serve[-1].ended if serve else set())
    return {name: (last[name], ended.get(name, math.inf)) for name in left}


def stopped_between(serve: Sequence[ServeLook], began: float, ended: float) -> int:
    """Replicas that ran at ``began`` and were told to stop, or ended, by ``ended``."""
    before = _at(serve, began)
    ran = before.running if before is not None else frozenset()
    gone: set[str] = set()
    for look in serve:
        if began < look.at <= ended:
            gone |= ran & (look.ended | _stopping(look))
    return len(gone)


def changes(serve: Sequence[ServeLook], began: float, ended: float) -> int:
    """How often the target was another one than at the look before."""
    before = _at(serve, began)
    targets = [look.target for look in serve if began < look.at <= ended]
    if before is not None:
        targets.insert(0, before.target)
    return sum(one != other for one, other in pairwise(targets))


def ups(serve: Sequence[ServeLook], began: float) -> int:
    """How often the target rose since."""
    targets = [look.target for look in serve if look.at > began]
    return sum(other > one for one, other in pairwise(targets))


def _at(serve: Sequence[ServeLook], moment: float) -> ServeLook | None:
    return next((look for look in reversed(serve) if look.at <= moment), None)


def _stopping(look: ServeLook) -> frozenset[str]:
    return frozenset(name for name, state in look.states.items() if state == "STOPPING")
