"""Faults in the scaling decision and what carries it out."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_DEMAND = ("app/autoscaling/test_kv_demand.py",)
_POLICY = ("app/autoscaling/test_kv_demand_policy.py",)
_OCCUPANCY = ("app/autoscaling/test_scaling_occupancy.py",)
_RECENT = ("app/autoscaling/test_recent.py",)
_BURSTS = ("app/autoscaling/test_bursts.py",)
_CLOCK = ("app/autoscaling/test_scaling_clock.py",)

AUTOSCALING: list[Fault] = [
    Fault(
        "app/autoscaling/kv_demand.py",
        "if arrived >= known[0] else arrived",
        "if arrived >= known[0] else 0.0",
        _DEMAND,
        "what a restarted counter counts is lost",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "held * scale, growth * scale, sequences * scale",
        "held * scale, growth, sequences * scale",
        _DEMAND,
        "growth is not scaled to replicas that are silent",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "    shared = (backlog - largest) / (reporting - 1) if reporting > 1 else backlog",
        "    shared = backlog / reporting",
        _DEMAND,
        "one long prompt asks for more replicas",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        '    if now - state.last_preemption < state.window_s(config):\n        return "preemptions"\n',
        "",
        _DEMAND,
        "a fleet that preempts is made smaller",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "num_slow > max(1.0, _STRAGGLERS * reporting)",
        "num_slow > 0",
        _DEMAND,
        "one straggler holds the fleet for ever",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "step_s=median_low(replica.step_seconds for replica in stats),",
        "step_s=sum(replica.step_seconds for replica in stats) / reporting,",
        _DEMAND,
        "one very slow straggler makes the fleet larger",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "step_s=median_low(replica.step_seconds for replica in stats),",
        "step_s=max(replica.step_seconds for replica in stats) if num_slow * 2 >= reporting else 0.0,",
        _DEMAND,
        "half of a fleet on a noisy node makes it larger and larger",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "min(max(self.reported, len(snapshot.replicas)), snapshot.running)",
        "snapshot.running",
        _DEMAND,
        "a replica that has just started counts as full as the others, and asks for another one",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "min(max(self.reported, len(snapshot.replicas)), snapshot.running)",
        "max(self.reported, len(snapshot.replicas))",
        _DEMAND,
        "a replica that has stopped is still counted",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "if backlog > 1.0 else steady",
        "",
        _DEMAND,
        "a few prompts at once pass for a burst",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "math.ceil(max(needs.largest, needs.prefill + reserve) - ROUNDING)",
        "math.ceil(needs.largest + reserve - ROUNDING)",
        _DEMAND,
        "memory gets a reserve that it does not need",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "    count = min(wanted, max(2 * target, target + _MOST_ADDED))",
        "    count = wanted",
        _DEMAND,
        "one decision may multiply the fleet",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "    kv = max(mean / config.kv_high, pools / config.kv_full)",
        "    kv = mean / config.kv_high",
        _DEMAND,
        "pools that fill up wait for a mean",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "    kv = max(mean / config.kv_high, pools / config.kv_full)",
        "    kv = pools / config.kv_high",
        _DEMAND,
        "a peak that is over before a replica has started needs one",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "_ratio(steady + _RISES * arrivals.rise, prompts)",
        "_ratio(steady, prompts)",
        _DEMAND,
        "a fleet shrinks to what its prompts exceed at times",
    ),
    Fault(
        "app/autoscaling/kv_demand.py",
        "    lowest = max(lowest, min(count, snapshot.limit)) if count > target else lowest\n",
        "",
        _DEMAND,
        "what a backlog started stops before it has served",
    ),
    Fault(
        "app/autoscaling/bursts.py",
        "min(lull, hold_s) + _PRICE * self._late_s * (lull > hold_s)",
        "_PRICE * self._late_s * (lull > hold_s)",
        _BURSTS,
        "a fleet is kept for a burst whatever that costs",
    ),
    Fault(
        "app/autoscaling/bursts.py",
        "        self._late_s = self._waited or self._late_s\n",
        "        self._late_s = self._waited\n",
        _BURSTS,
        "a burst that found the fleet ready is taken for one that needs none",
    ),
    Fault(
        "app/autoscaling/bursts.py",
        "        elif self._peak < _BACK * self.size and (not self._waited or self._smaller + 1 < _LULLS):\n"
        "            self._began = None\n"
        "            self._smaller += self._waited > 0.0\n",
        "",
        _BURSTS,
        "a few prompts that wait make a large burst forgotten",
    ),
    Fault(
        "app/autoscaling/bursts.py",
        " and (not self._waited or self._smaller + 1 < _LULLS):",
        ":",
        _BURSTS,
        "after a large burst no smaller one is ever prepared for",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "        fewer = max(enough, kept)\n",
        "        fewer = enough\n",
        _DEMAND,
        "nothing is kept for a burst",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "max(proposed.target, kept), most_stopped",
        "proposed.target, most_stopped",
        _DEMAND,
        "the router turns from replicas that are kept",
    ),
    Fault(
        "app/autoscaling/recent.py",
        "max(self.rate(now, width_s) - self.rate(now - width_s, width_s), 0.0)",
        "abs(self.rate(now, width_s) - self.rate(now - width_s, width_s))",
        _RECENT,
        "a fall of the load counts as a rise, and holds the fleet",
    ),
    Fault(
        "app/autoscaling/recent.py",
        "level * (now - self._amounts[-1][0]) if self._amounts else 0.0",
        "level",
        _RECENT,
        "the mean of a level depends on how often it is looked at",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "low if age <= recent_s else need + (low - need) * _fade(age / window_s)",
        "low",
        _DEMAND,
        "all idle replicas are kept for the whole window",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "low if age <= recent_s else need + (low - need) * _fade(age / window_s)",
        "need + (low - need) * _fade(age / window_s)",
        _DEMAND,
        "a pause of seconds stops replicas",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "        while lows and lows[-1][1] <= need:\n            lows.pop()\n",
        "",
        _DEMAND,
        "the window of needs forgets its maximum",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        '        if len(snapshot.replicas) < snapshot.running:\n            return "reports missing"\n',
        "",
        _DEMAND,
        "the fleet shrinks while replicas are silent",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "            self.last_down = min(self.last_down, now)\n",
        "",
        _CLOCK,
        "after the clock was set back, nothing is stopped for as long",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "        may_be_zero = not snapshot.minimum and snapshot.target <= 1",
        "        may_be_zero = not snapshot.minimum",
        (*_DEMAND, *_OCCUPANCY),
        "several replicas stop at once to leave none",
    ),
    Fault(
        "app/autoscaling/scaling_state.py",
        "self._held_by(snapshot, config) or proposed.held_by",
        "self._held_by(snapshot, config)",
        _DEMAND,
        "what a rule has against stopping replicas is ignored",
    ),
    Fault(
        "app/autoscaling/fault_counter.py",
        "        if self.count & (self.count - 1) == 0:",
        "        if True:",
        ("app/autoscaling/test_fault_counter.py",),
        "every fault of a loop is logged",
    ),
    Fault(
        "app/autoscaling/policy.py",
        "            wanted = ctx.target_num_replicas\n            self._victims = []\n",
        "            raise\n",
        _POLICY,
        "a defect in the policy stalls the controller",
    ),
    Fault(
        "app/autoscaling/policy.py",
        "            if now - last.timestamp <= stale_s:",
        "            if True:",
        _POLICY,
        "old reports count",
    ),
    Fault(
        "app/autoscaling/occupancy.py",
        "abs(ratio - 1.0) <= _TOLERANCE",
        "ratio <= 1.0",
        _OCCUPANCY,
        "the plain rule never shrinks a fleet",
    ),
]
