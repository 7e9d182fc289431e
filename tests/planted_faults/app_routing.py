"""Faults in the router: who holds which blocks, and which are on their way."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_INDEX = ("app/routing/test_kv_index.py", "app/routing/test_kv_index_model.py")
_CLAIMS = ("app/routing/test_claim_tree.py", "app/routing/test_claims.py", *_INDEX)
_CORDON = ("app/routing/test_cordon.py",)
_COST = ("app/routing/test_cost.py", "app/routing/test_choice.py")
_SUBSET = ("app/routing/test_subset.py",)
_SUBSET_CLIENT = ("app/fleet/test_subset_of_replicas.py",)
_LEDGER = ("app/routing/test_ledger.py", "app/routing/test_ledger_index.py")

ROUTING: list[Fault] = [
    Fault(
        "app/routing/replica_state.py",
        "        return self.route is not None and not self.suspected and not self.stalled",
        "        return self.route is not None and not self.suspected",
        ("app/test_watchdog.py",),
        "requests are routed to an engine that makes no progress",
    ),
    Fault(
        "app/routing/kv_index.py",
        "            if sequence == feed.sequence + 1:",
        "            if sequence > feed.sequence:",
        _INDEX,
        "a gap in the events of a replica goes unnoticed",
    ),
    Fault(
        "app/routing/kv_index.py",
        "        if feed is None or epoch < feed.epoch:",
        "        if feed is None:",
        _INDEX,
        "events of an old epoch are applied",
    ),
    Fault(
        "app/routing/kv_index.py",
        "        if sequence < feed.floor:\n            self.counters.late += 1\n            return False\n",
        "",
        _INDEX,
        "a snapshot from before the deltas that wait is taken",
    ),
    Fault(
        "app/routing/kv_index.py",
        "        if delta.cleared:\n            self._empty(replica, feed)\n",
        "",
        _INDEX,
        "a replica that has cleared its cache seems to hold it",
    ),
    Fault(
        "app/routing/kv_index.py",
        "        self._exact &= ~(1 << feed.slot)\n        self._empty(replica, feed)\n",
        "",
        _INDEX,
        "a replica that is out of step counts with what it held",
    ),
    Fault(
        "app/routing/claim_tree.py",
        "        if not (run.paths or run.children):",
        "        if not run.paths:",
        _CLAIMS,
        "a path that ends takes along those that go on behind it",
    ),
    Fault(
        "app/routing/claims.py",
        "        self._end(claims[-1])\n        return True",
        "        for claim in list(claims):\n            self._end(claim)\n        return True",
        _CLAIMS,
        "a request that is withdrawn takes its siblings' claims along",
    ),
    Fault(
        "app/routing/claims.py",
        "        while self._deadlines and self._deadlines[0][0] <= now:",
        "        while self._deadlines and self._deadlines[0][0] < now:",
        _CLAIMS,
        "a claim outlives its deadline",
    ),
    Fault(
        "app/routing/prefix_walk.py",
        "            elif starts[bit] == 0 or place - starts[bit] >= window:",
        "            elif place - starts[bit] >= window:",
        _INDEX,
        "with a window, a short prefix that is there from its beginning is no hit",
    ),
    Fault(
        "app/routing/timed_set.py",
        "        return frozenset(replica for replica, one in held.items() if one.until > now)",
        "        return frozenset(held)",
        _CORDON,
        "a cordon never ends by itself",
    ),
    Fault(
        "app/routing/timed_set.py",
        "before[replica].since if replica in before and before[replica].until > now else now",
        "now",
        _CORDON,
        "a cordon that is repeated begins anew each time",
    ),
    Fault(
        "app/routing/waiting.py",
        " + 1 + load.running  #",
        " + 1  #",
        ("app/routing/test_waiting_in_time.py",),
        "nobody is expected to wait where all that is free is kept for running sequences",
    ),
    Fault(
        "app/routing/cost.py",
        "                admission = view.admission_s(excess, sequences)",
        "                pass",
        _COST,
        "waiting for a slot or for blocks costs nothing",
    ),
    Fault(
        "app/routing/cost.py",
        "                eviction = evicted * reuse * view.token_cost",
        "                eviction = evicted * view.token_cost",
        _COST,
        "blocks that nobody will reuse cost as much as others",
    ),
    Fault(
        "app/routing/cost.py",
        "            wait += view.started_until - now",
        "            pass",
        _COST,
        "work that has been started counts as done",
    ),
    Fault(
        "app/routing/cost.py",
        "min(load.waiting_tokens / rate, SILENT_S)",
        "load.waiting_tokens / rate",
        _COST,
        "an engine that hangs seems to empty itself",
    ),
    Fault(
        "app/routing/cost.py",
        "max(load.running, state.acknowledged_rows)",
        "load.running",
        _COST,
        "a report that lags hides the requests that were sent since",
    ),
    Fault(
        "app/routing/replica_state.py",
        "            if not booking.prefilled:\n                self.pending_prefill -= booking.prefill\n",
        "            self.pending_prefill -= booking.prefill\n",
        _LEDGER,
        "a report takes off a prompt whose first token has come already",
    ),
    Fault(
        "app/routing/replica_state.py",
        "        self.booked_tokens -= booking.decode\n",
        "",
        _LEDGER,
        "a booking that has ended leaves its tokens",
    ),
    Fault(
        "app/routing/ledger.py",
        "            if booking is not None and not booking.prefilled:",
        "            if booking is not None:",
        _LEDGER,
        "each token releases the prefill part of a booking",
    ),
    Fault(
        "app/routing/ledger.py",
        "            placed_before = self._release(attempt)",
        "            placed_before = False",
        _LEDGER,
        "an attempt that is booked again holds two bookings",
    ),
    Fault(
        "app/routing/fleet_estimates.py",
        "        elif not load.running:\n            history.forget()\n",
        "",
        ("app/routing/test_fleet_estimates.py",),
        "an engine that was slow once gets no requests, so nobody finds out that it is slow no longer",
    ),
    Fault(
        "app/routing/fleet_estimates.py",
        "        count = self._counts[place] = min(self._counts[place] + 1, 64)\n",
        "        count = self._counts[place] = 64\n",
        ("app/routing/test_fleet_estimates.py", "app/routing/test_routing_admission.py"),
        "for a hundred requests answers are expected to be long, and prefixes are copied rather than waited for",
    ),
    Fault(
        "app/routing/fleet_estimates.py",
        "        self._outgrow(before, after)\n        self._average()\n",
        "",
        ("app/routing/test_fleet_estimates.py",),
        "answers that end first stand for those that still run, and waits are underestimated",
    ),
    Fault(
        "app/routing/ledger.py",
        "                self._estimates.outputs.learn(generated, booking.grown)\n",
        "                self._estimates.outputs.learn(generated)\n",
        _LEDGER,
        "the length of an answer counts twice",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "                    ledger.grow(record.attempt, before, after)\n",
        "                    pass\n",
        ("app/fleet/test_engine_client_sequences.py",),
        "nobody is told of answers that still run, and those that end first stand for all",
    ),
    Fault(
        "app/routing/subset.py",
        "times * max(self.size * self._ingresses / len(replicas), COVER)",
        "times * self.size * self._ingresses / len(replicas)",
        _SUBSET,
        "a replica that is in the subset of no ingress gets no requests",
    ),
    Fault(
        "app/routing/subset.py",
        "if key < limit or at < size",
        "if key < limit",
        _SUBSET,
        "an ingress may have no replica at all",
    ),
    Fault(
        "app/routing/fleet.py",
        "            names = self._members.intersection(names)\n",
        "            pass\n",
        _SUBSET,
        "replicas that have left the subset go on getting requests",
    ),
    Fault(
        "app/channel/channel_set.py",
        "        closing = self._leaving.keys() | self._surplus\n",
        "        closing = self._leaving.keys()\n",
        _SUBSET_CLIENT,
        "channels of a subset that was wider stay open",
    ),
    Fault(
        "app/channel/channel_set.py",
        "        known = members | self.fleet.known\n",
        "        known = members\n",
        _SUBSET_CLIENT,
        "requests move because a subset becomes smaller",
    ),
    Fault(
        "app/channel/channel_set.py",
        "        self._narrowing = self._loop.call_later(WIDE_S, self.fleet.narrow_subset)\n",
        "        pass\n",
        _SUBSET_CLIENT,
        "a subset that was once too small stays wide for ever",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "        return {*self._ledger.routable(), *self._elsewhere()}\n",
        "        return set(self._ledger.routable())\n",
        _SUBSET_CLIENT,
        "replicas outside an ingress's subset keep their prefixes when all caches are emptied",
    ),
]
