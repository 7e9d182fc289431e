"""Chooses a replica by the policy, from views that it keeps current, and learns from what it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.autoscaling.fault_counter import FaultCounter
from app.routing.cost import RoutingRequest, view_of
from app.routing.fleet_estimates import FleetEstimates
from app.routing.guarded_index import GuardedIndex
from app.routing.load import LoadReport, average
from app.routing.policies import POLICY_FUNCTIONS, ROUTING_REASONS, Policy, RoutingDecision, least_booked
from app.routing.replica_state import ReplicaState, ReplicaView


class Chooser:
    """Invariant: a replica's view, if there is one, is current. The ledger's lock guards it.

    Failed choices count in ``faults``; ``reasons`` has the number of choices by reason.
    """

    def __init__(
        self, policy: Policy, estimates: FleetEstimates, index: GuardedIndex, faults: FaultCounter
    ) -> None:
        self._estimates = estimates
        self._index = index
        self._faults = faults
        self.reasons = dict.fromkeys(ROUTING_REASONS, 0)
        self._outdated: list[ReplicaState] = []
        """Replicas whose views must be remade."""
        self._unlearned: tuple[RoutingRequest, RoutingDecision] | None = None
        self.configure(policy)

    def configure(self, policy: Policy) -> None:
        """Choose by this policy from now on."""
        self._choose = POLICY_FUNCTIONS[policy]
        self.by_prefix = policy is Policy.PREFIX

    def choose(self, replicas: Sequence[ReplicaState], request: RoutingRequest, now: float) -> RoutingDecision:
        """Choose a replica. If the choice raises, take the least booked: a defect must not fail requests."""
        decision = self._decide(replicas, request, now)
        self.reasons[decision.reason] += 1
        return decision

    def outdate(self, state: ReplicaState) -> None:
        """What a replica's view was made from has changed."""
        state.view = None
        self._outdated.append(state)

    def catch_up(self) -> None:
        """Learn from the last decision and remake outdated views, so that the next choice need not."""
        self._learn_last_decision()
        for state in self._outdated:
            if state.view is None:
                self._refresh(state)
        self._outdated.clear()

    def _decide(self, replicas: Sequence[ReplicaState], request: RoutingRequest, now: float) -> RoutingDecision:
        try:
            self._learn_last_decision()
            views = self._views_of(replicas, now)
            held = [0] * len(views)
            if request.keys and self.by_prefix:
                found = self._index.longest(request.keys, now)
                held = [found.get(view.replica, 0) for view in views]
            decision = self._choose(views, held, request, self._estimates, now)
        except Exception:  # noqa: BLE001  (as in GuardedIndex)
            self._faults.add()
            place = least_booked(replicas, range(len(replicas)), request._replace(keys=()))
            return RoutingDecision(place, reason="fault")
        if self.by_prefix:
            self._unlearned = request, decision
        return decision

    def _views_of(self, replicas: Sequence[ReplicaState], now: float) -> list[ReplicaView]:
        """Current views. A replica that has not reported, or has no prefill rate, counts as an average one."""
        views = [view for state in replicas if (view := state.view)]
        if len(views) < len(replicas):
            for state in replicas:
                if state.view is None:
                    self._refresh(state)
            views = [view for state in replicas if (view := state.view)]
        if len(views) < len(replicas):
            mean = average([state.load for state in replicas if state.load is not None])
            views = [state.view or self._assumed(state, mean, now) for state in replicas]
        return views

    def _refresh(self, state: ReplicaState) -> None:
        """Remake a replica's view; there is none while its load or its prefill rate is unknown."""
        load = state.load
        if load is not None and load.prefill_rate:
            state.view = view_of(
                state, load, state.reported_at, self._estimates, self._estimates.outputs.tokens
            )

    def _assumed(self, state: ReplicaState, mean: LoadReport, now: float) -> ReplicaView:
        """The view of a replica of which too little is known; an average load is as of ``now``."""
        output = self._estimates.outputs.tokens
        if state.load is None:
            return view_of(state, mean, now, self._estimates, output)
        load = replace(state.load, prefill_rate=mean.prefill_rate)
        return view_of(state, load, state.reported_at, self._estimates, output)

    def _learn_last_decision(self) -> None:
        if self._unlearned is None:
            return
        (request, decision), self._unlearned = self._unlearned, None
        output = request.sequences * request.output
        self._estimates.learn_prompt(request.keys, decision.shared_blocks, output, request.retry)
