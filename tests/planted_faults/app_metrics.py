"""Faults in the metrics and the live page."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_FIGURES = ("app/metrics/test_fleet_figures.py",)
_RAY = ("app/metrics/test_ray_export.py",)
_ROUTE = ("app/api/test_metrics_route.py",)
_CHANNEL = ("app/channel/test_figures.py",)
_LATENCY = ("engine/scheduling/test_latency_stats.py",)
_HISTOGRAM = ("engine/test_histogram.py",)
_VIEW = ("app/dashboard/test_fleet_view.py",)
_MAPS = ("app/dashboard/test_block_maps.py",)
_MAP = ("engine/kv/test_block_map.py",)
_GROUPS = ("engine/kv/test_block_groups.py",)
_FLOW = ("app/routing/test_prefix_flow.py",)
_FEED = ("app/dashboard/test_live_feed.py",)
_CHOICE = ("app/routing/test_choice.py",)

_TRACE = ("app/api/test_request_trace.py",)

_SIBLINGS = ("app/metrics/test_siblings.py",)

METRICS: list[Fault] = [
    Fault(
        "app/metrics/siblings.py",
        "if len(answers) == 1 else -math.inf",
        "if answers else -math.inf",
        _SIBLINGS,
        "an ingress with others does not ask them",
    ),
    Fault(
        "app/metrics/siblings.py",
        "if method in POLLED and self._clock() < self._alone_until:",
        "if self._clock() < self._alone_until:",
        _SIBLINGS,
        "a request that an ingress which has just come has answered is not found for seconds",
    ),
    Fault(
        "app/api/request_trace.py",
        "first_step = attempt.began if attempt.tokens_before else arrived",
        "first_step = attempt.began",
        _TRACE,
        "the queue begins when the call is made, not when the request arrives",
    ),
    Fault(
        "app/api/request_trace.py",
        "self._context_of(carrier)",
        "None",
        _TRACE,
        "the client's trace does not go on",
    ),
    Fault(
        "app/fleet/in_flight.py",
        "self.moving = self.notes.planned = True",
        "self.moving = True",
        _TRACE,
        "a planned move is logged as a failure",
    ),
    Fault(
        "engine/scheduling/latency_stats.py",
        "sequence.group.stats = stats",
        "pass",
        _LATENCY,
        "ranked results tell no times",
    ),
    Fault(
        "app/channel/engine_channel.py",
        "waiting.stats = record.stats",
        "pass",
        _TRACE,
        "times of records that wait are lost",
    ),
    Fault(
        "engine/histogram.py",
        "bisect_left(self._bounds, value)] += times",
        "bisect_left(self._bounds, value)] += 1",
        _HISTOGRAM,
        "tokens that come together count as one",
    ),
    Fault(
        "engine/scheduling/latency_stats.py",
        "if sequence.number == 0:",
        "if True:",
        _LATENCY,
        "each sequence of a moved request counts as a request",
    ),
    Fault(
        "engine/scheduling/latency_stats.py",
        "if sequence.first_token_at and reason in _WHOLE:",
        "if sequence.first_token_at:",
        _LATENCY,
        "requests whose clients left shorten the time of decoding",
    ),
    Fault(
        "app/metrics/fleet_figures.py",
        "[process for key, process in told.items() if key not in known]",
        "list(told.values())",
        _FIGURES,
        "the ingress that is asked counts twice",
    ),
    Fault(
        "app/metrics/fleet_figures.py",
        "for key, process in told.items() if key not in known]",
        "for process in others if (process.name, process.model) not in known]",
        _FIGURES,
        "an engine that two ingresses report counts twice",
    ),
    Fault(
        "app/metrics/exposition.py",
        "accumulate(value.counts)",
        "value.counts",
        _FIGURES,
        "buckets are not cumulative",
    ),
    Fault(
        "app/metrics/ray_export.py",
        "self._last[key] = total",
        "self._last[key] = more",
        _RAY,
        "counters grow by their totals",
    ),
    Fault(
        "app/api/request_record.py",
        "self.figures.inter_token.add((now - before[1]) / new, new)",
        "self.figures.inter_token.add(now - before[1])",
        ("app/api/test_request_record.py::test_tokens_that_arrive_together_share_the_interval",),
        "tokens that come together count as one slow one",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "channel.figures_due = self._clock() + FIGURES_S",
        "channel.figures_due = 0.0",
        _CHANNEL,
        "figures travel with every frame",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "        self.engine_figures.pop(route.replica, None)\n",
        "",
        _CHANNEL,
        "figures of replicas that have gone stay for good",
    ),
    Fault(
        "app/routing/policies.py",
        "term = TERMS[saved.index(max(saved))]",
        "term = TERMS[saved.index(min(saved))]",
        _CHOICE,
        "the reason is the term that spoke against the replica",
    ),
    Fault(
        "app/routing/policies.py",
        "        if keys:\n",
        "        if not keys:\n",
        _CHOICE,
        "a prompt that is sent again goes to any of the replicas that are equal",
    ),
    Fault(
        "app/routing/prefix_flow.py",
        '"" if first is None or first.salt else',
        '"" if first is None else',
        _FLOW,
        "the page shows prompts that their sender keeps apart",
    ),
    Fault(
        "app/routing/prefix_flow.py",
        "deque(maxlen=MAX_PLACEMENTS)",
        "deque()",
        _FLOW,
        "what is remembered of prompts grows without end under load",
    ),
    Fault(
        "app/dashboard/prefix_flows.py",
        "_row(group, words and group.tenant == tenant)",
        "_row(group, words)",
        _FLOW,
        "an administrator reads other tenants' prompts",
    ),
    Fault(
        "app/dashboard/prefix_flows.py",
        "if group.blocks and (everyones or group.tenant == tenant)",
        "if group.blocks",
        _FLOW,
        "a tenant learns which prompts others send",
    ),
    Fault(
        "app/api/api_server.py",
        "if found := list(filter(may_see, self.lives(name))):",
        "if found := self.lives(name):",
        ("app/api/test_dashboard.py",),
        "a request of another tenant hides one of the same ID",
    ),
    Fault(
        "app/dashboard/recent_requests.py",
        "        while len(self._ended) > MAX_ENDED or self._parts > MAX_PARTS:",
        "        while len(self._ended) > MAX_ENDED:",
        ("app/dashboard/test_recent_requests.py",),
        "requests of thousands of prompts are remembered by the thousand",
    ),
    Fault(
        "app/dashboard/fleet_view.py",
        "    counts = [max(count, 0) for count in counts]  # of a process that has left\n",
        "",
        _VIEW,
        "an ingress that leaves makes counts negative",
    ),
    Fault(
        "app/dashboard/live_feed.py",
        "for model, found in sent.items() if may_see(model))",
        "for model, found in sent.items())",
        _FEED,
        "a key follows the load of models that are not for it",
    ),
    Fault(
        "app/dashboard/live_feed.py",
        "(self.of_keys[key] + 1 if key else 0)",
        "0",
        _FEED,
        "one key takes all places at the live page",
    ),
    Fault(
        "app/dashboard/live_feed.py",
        "            while self.viewers:\n",
        "            while True:\n",
        _FEED,
        "the fleet is watched although nobody looks",
    ),
    Fault(
        "app/dashboard/block_maps.py",
        "if now - at >= EVERY_S and task.done():",
        "if task.done():",
        _MAPS,
        "each viewer asks the engine",
    ),
    Fault(
        "app/dashboard/block_maps.py",
        "await asyncio.shield(self._asked[key][1])",
        "await self._asked[key][1]",
        _MAPS,
        "a viewer that leaves cancels the others' answer",
    ),
    Fault(
        "app/dashboard/block_maps.py",
        "now, key = self._clock(), (model, replica, by)",
        "now, key = self._clock(), (model, replica, GroupBy.STATE)",
        _MAPS,
        "a viewer gets the grouping that another has asked for",
    ),
    Fault(
        "app/dashboard/block_maps.py",
        "if tenant is None or not found.tenants:",
        "if True:",
        _MAPS,
        "a tenant reads the IDs of others' requests off the block map",
    ),
    Fault(
        "engine/kv/block_groups.py",
        "beginnings[node] = group if beginnings.get(node, group) == group else SEVERAL",
        "beginnings[node] = group",
        _GROUPS,
        "the beginning of two prefixes belongs to one of them",
    ),
    Fault(
        "engine/kv/block_groups.py",
        "cells[at] = number if cells[at] in (NONE, number) else SEVERAL",
        "cells[at] = number",
        _GROUPS,
        "a block of two requests belongs to the last one",
    ),
    Fault(
        "engine/kv/block_groups.py",
        "if block != NO_BLOCK and not block % each:",
        "if block != NO_BLOCK:",
        _GROUPS,
        "a sampled map shows blocks in cells of others",
    ),
    Fault(
        "engine/kv/block_groups.py",
        "            if not left:\n                break\n",
        "",
        _GROUPS,
        "a map of a large pool holds up its replica for as long as it has blocks",
    ),
    Fault(
        "app/channel/engine_attempt.py",
        'return engine_id.rpartition("@")[0] or engine_id',
        "return engine_id",
        ("app/channel/test_channel.py::test_the_engines_name_of_an_attempt_has_the_requests_id",),
        "the block map names attempts instead of requests",
    ),
    Fault(
        "engine/kv/block_map.py",
        "-(-(pool.num_blocks + host.num_blocks) // (MAX_CELLS - 1))",
        "-(-pool.num_blocks // (MAX_CELLS - 1))",
        _MAP,
        "host blocks make a map larger than it may be",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "        if replica not in self._reachable():\n"
        '            raise UnavailableError(f"no channel to a replica {replica!r} is open")\n',
        "",
        ("app/fleet/test_engine_client_sequences.py",),
        "a replica that is not there is asked",
    ),
    Fault(
        "app/metrics/ray_export.py",
        " and not metric.by_key",
        "",
        ("app/metrics/test_ray_export.py",),
        "whoever reaches Ray's port learns which keys use the server",
    ),
]
