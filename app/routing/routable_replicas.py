"""The replicas that may get new requests, and which of them can run a given one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from app.routing.replica_state import ReplicaState
from app.routing.requirement import ReplicaProfile, Requirement
from app.routing.routing_meta import RoutingMeta


class RoutableReplicas:
    """The ledger lists them anew when a route or its state changes; its lock guards them."""

    def __init__(self) -> None:
        self.states: list[ReplicaState] = []
        self.changes = 0
        self._profiles: set[ReplicaProfile] = set()
        """Of these."""

    def relist(self, replicas: Iterable[ReplicaState]) -> None:
        """Take those of all ``replicas`` that are routable now."""
        self.changes += 1
        self.states = [state for state in replicas if state.routable]
        self._profiles = {state.profile for state in self.states if state.profile is not None}

    def able(self, members: Collection[str] | None, requirement: Requirement | None) -> list[ReplicaState]:
        """``members`` that meet ``requirement``."""
        replicas = self.states
        if members is not None:
            replicas = [state for state in replicas if state.replica in members]
        if requirement is not None:
            # There are few different profiles, often one.
            unfit = [profile for profile in self._profiles if not requirement.met_by(profile)]
            if unfit:
                replicas = [state for state in replicas if state.profile not in unfit]
            if requirement.alone:
                replicas = [state for state in replicas if not state.alone and not state.suspects]
        return replicas

    def candidates(
        self, members: Collection[str] | None, meta: RoutingMeta, likely_victims: Collection[str]
    ) -> list[ReplicaState]:
        """``members`` that can run the request.

        One that has run before returns to its replica, or goes to one that may stop soon, if no other is left.
        """
        replicas = self.able(members, meta.requirement)
        if meta.avoid:
            replicas = [state for state in replicas if state.replica != meta.avoid] or replicas
            replicas = that_stay(replicas, likely_victims)
        return replicas


def that_stay(replicas: list[ReplicaState], likely_victims: Collection[str]) -> list[ReplicaState]:
    """Without likely victims, and of these without those that a redeploy will replace; all, if none is left."""
    replicas = [state for state in replicas if state.replica not in likely_victims] or replicas
    if len({state.build.version for state in replicas}) > 1:
        newest = max(replicas, key=lambda state: state.build.started_at).build.version
        replicas = [state for state in replicas if state.build.version == newest]
    return replicas
