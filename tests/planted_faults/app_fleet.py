"""Faults in the ingress's view of the engines: client, attempts, moves, wake, overload."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_CLIENT = (
    "app/fleet/test_engine_client.py",
    "app/fleet/test_engine_client_calls.py",
    "app/fleet/test_engine_client_routes.py",
    "app/fleet/test_engine_client_sequences.py",
)
_UNLIKE = ("app/fleet/test_equal_replicas.py",)
_DRAIN = ("app/fleet/test_drain.py",)
_FAULTS = ("app/fleet/test_fault_counts.py", "app/fleet/test_engine_client_routes.py")
_OVERLOAD = ("app/fleet/test_overload.py", "app/fleet/test_overload_in_time.py")

_QUEUE = ("app/fleet/test_delta_queue.py",)
_BUDGET = ("app/fleet/test_resubmission_budget.py",)
_LAG = ("app/fleet/test_loop_lag.py",)

FLEET: list[Fault] = [
    Fault(
        "app/fleet/delta_queue.py",
        "            if delta.final:\n",
        "            if False:\n",
        _QUEUE,
        "a final delta is read before those of other sequences",
    ),
    Fault(
        "app/fleet/delta_queue.py",
        "index=deltas[0].index",
        "index=last.index",
        _QUEUE,
        "joined tokens have the offset of the last one",
    ),
    Fault(
        "app/fleet/resubmission_budget.py",
        "        if self._spent + 1.0 > size:",
        "        if False:",
        _BUDGET,
        "requests are sent again without bound",
    ),
    Fault(
        "app/fleet/resubmission_budget.py",
        "size * past / REFILL_S",
        "0.0 * past",
        _BUDGET,
        "a budget that is spent never comes back",
    ),
    Fault(
        "app/fleet/loop_lag.py",
        "        elif now - self._since >= HOLD_S:",
        "        else:",
        _LAG,
        "a single pause makes an ingress refuse requests",
    ),
    Fault(
        "app/fleet/overload.py",
        "max(late_s, self._backlog_s())",
        "late_s",
        _LAG,
        "frames that wait unread refuse nobody",
    ),
    Fault(
        "app/channel/channel_set.py",
        "        return since is None or self._loop.time() - since < drain_timeout_s",
        "        return True",
        _FAULTS,
        "planned stops count as deaths",
    ),
    Fault(
        "app/channel/channel_set.py",
        "        return since is None or self._loop.time() - since < drain_timeout_s",
        "        return since is None",
        _FAULTS,
        "a death that comes with the removal from the members does not count",
    ),
    Fault(
        "app/fleet/faults.py",
        "        for request in suspects or requests:",
        "        for request in requests:",
        _FAULTS,
        "neighbours are blamed for what a suspect did",
    ),
    Fault(
        "app/routing/ledger.py",
        "            if requirement.alone:",
        "            if False:",
        _FAULTS,
        "suspects share a replica",
    ),
    Fault(
        "app/fleet/faults.py",
        "            self._fleet.ledger.clear_suspect(attempt)",
        "            pass",
        _FAULTS,
        "a cleared suspect keeps its replica to itself",
    ),
    Fault(
        "app/fleet/faults.py",
        "    return request.death_age, -request.arrived",
        "    return 0, request.arrived",
        _FAULTS,
        "the likeliest cause waits until all others are cleared",
    ),
    Fault(
        "app/fleet/attempts.py",
        "        await asyncio.wait((interrupted,), timeout=CHANNEL_END_S)",
        "        await asyncio.sleep(0)",
        _FAULTS,
        "an engine's death does not count where its calls return first",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "        if fault and self._parts.channels.was_lost(",
        "        if self._parts.channels.was_lost(",
        _FAULTS,
        "what the ingress brought about counts as a death",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "        if self._tokenizer and hello.model.tokenizer != self._tokenizer:",
        "        if False:",
        _UNLIKE,
        "a replica gets token ids of another tokenizer",
    ),
    Fault(
        "app/fleet/in_flight.py",
        "self.request.params, self.model, alone=self.suspect)",
        "self.request.params, None, alone=self.suspect)",
        _UNLIKE,
        "a request that moves goes on with another model",
    ),
    Fault(
        "app/fleet/drain.py",
        "            if work and work + tokens > limit:",
        "            if False:",
        _DRAIN,
        "a leaving replica gives away all its streams at once",
    ),
    Fault(
        "app/fleet/drain.py",
        " and now - since < PATIENCE_S",
        "",
        _DRAIN,
        "a request that gets nowhere keeps a replica from stopping",
    ),
    Fault(
        "app/routing/ledger.py",
        "    replicas = [state for state in replicas if state.replica not in likely_victims] or replicas\n",
        "",
        _DRAIN,
        "streams move to replicas that stop next",
    ),
    Fault(
        "app/routing/ledger.py",
        "    if len({state.build.version for state in replicas}) > 1:",
        "    if False:",
        _DRAIN,
        "streams move to replicas that a redeploy will replace",
    ),
    Fault(
        "app/fleet/drain.py",
        "            if ledger.routable(others, request.requirement()):",
        "            if True:",
        _UNLIKE,
        "a leaving replica gives away a stream that no other may continue",
    ),
    Fault(
        "app/routing/requirement.py",
        "(self.same_model(profile) and self.fits(profile.limits))",
        "self.same_model(profile)",
        _UNLIKE,
        "the limits of a replica take no part in the choice",
    ),
    Fault(
        "app/fleet/fleet_limits.py",
        "        if replica in self._limits:\n            self._dead",
        "        if False:\n            self._dead",
        _UNLIKE,
        "a request is refused for good because the replica that could run it is restarted",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "            if booking is None or booking.route != route:",
        "            if booking is None:",
        _CLIENT,
        "a record of an old route is accepted",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "        if request.params.seed is None:",
        "        if False:",
        _CLIENT,
        "each replica draws a seed of its own",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "            if not in_flight.complete:\n                in_flight.runner.cancel()",
        "            pass",
        _CLIENT,
        "the request of a client that has left runs on",
    ),
    Fault(
        "app/fleet/faults.py",
        "            if request.deaths >= MAX_DEATHS:",
        "            if False:",
        _FAULTS,
        "a request that kills its replicas kills them all",
    ),
    Fault(
        "app/fleet/in_flight.py",
        "        if replica is not None:\n            self.avoid = replica\n",
        "",
        _CLIENT,
        "an attempt goes to the replica that has just failed",
    ),
    Fault(
        "app/fleet/in_flight.py",
        "            and record.index == len(self.outputs[sequence])",
        "            and record.index >= len(self.outputs[sequence])",
        _CLIENT,
        "a gap in the tokens goes unnoticed",
    ),
    Fault(
        "app/fleet/in_flight.py",
        "            generated_before=len(self.outputs[0]) if single else 0,",
        "            generated_before=0,",
        _CLIENT,
        "a request that moves begins to count anew",
    ),
    Fault(
        "app/fleet/attempts.py",
        "                return AttemptFailure(str(error), fault=False)",
        "                return AttemptFailure(str(error), fault=True)",
        _CLIENT,
        "finding no route counts as a replica's failure",
    ),
    Fault(
        "app/fleet/drain.py",
        "        if not due or not ledger.routable(others):\n            return\n",
        "        others = others or self.fleet.members\n",
        ("app/routing/test_cordon.py",),
        "a cordon moves requests although no other replica can take them",
    ),
    Fault(
        "app/fleet/scale_from_zero.py",
        "            if not self._waiting:\n                self.stop()",
        "            pass",
        ("app/fleet/test_scale_from_zero.py",),
        "a fleet is woken for requests that have gone",
    ),
    Fault(
        "app/fleet/overload.py",
        " * min(replicas / self._max_replicas, 1.0)",
        "",
        _OVERLOAD,
        "replicas that may still come do not count",
    ),
    Fault(
        "app/fleet/overload.py",
        "        if wait <= self._limit_s:\n            return None\n",
        "",
        _OVERLOAD,
        "an overload refuses requests while the wait is within the limit",
    ),
    Fault(
        "app/fleet/overload.py",
        "            if expected is not None and math.isnan(expected.seconds):\n",
        "            if False:\n",
        _OVERLOAD,
        "a wait that is not a number counts",
    ),
    Fault(
        "app/fleet/overload.py",
        "        if over is not self._over:\n            self._over, self._since = over, now",
        "        if over is not self._over:\n            self._over = over",
        _OVERLOAD,
        "a burst counts as a long overload",
    ),
    Fault(
        "app/fleet/in_flight.py",
        "        tokens = self.num_tokens if self.complete else self.request.text_end.tokens\n",
        "        tokens = self.num_tokens if self.complete else None\n",
        ("app/fleet/test_engine_client_sequences.py",),
        "a request that a stop string ends teaches nothing",
    ),
]
