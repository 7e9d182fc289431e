"""Faults in the channel between an ingress and an engine replica."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_CHANNEL = ("app/channel/test_channel.py",)
_WIRE = ("app/channel/test_wire.py",)
_KV = ("app/channel/test_kv_resync.py", "app/channel/test_kv_section.py", "app/channel/test_kv_outbox.py")

_WATCHDOG = ("app/test_watchdog.py",)
_RELAY = ("app/channel/test_relay.py",)
_RESUME = ("app/channel/test_resumption.py", "app/fleet/test_resumed_requests.py")

CHANNEL: list[Fault] = [
    Fault(
        "app/channel/channel_hub.py",
        "        elif channel.attempts or channel.unsent or channel.sent:",
        "        elif channel.attempts:",
        _RESUME,
        "last tokens that are on their way when a channel breaks are lost",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "resumption is not None and resumption.epoch == ended.epoch",
        "resumption is not None",
        _RESUME,
        "attempts are resumed from a channel that was not the last one",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "call_later(KEEP_S, self._forget, channel.cid)",
        "call_later(1e6, self._forget, channel.cid)",
        _RESUME,
        "an engine computes for an ingress that never comes back",
    ),
    Fault(
        "app/channel/engine_channel.py",
        "            weight += len(scores) * (3 + 2 * len(scores[0].top_ids))",
        "            pass",
        _RESUME,
        "log probabilities that nobody reads fill the memory",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "            if channel.waiting_tokens > MAX_WAITING_TOKENS:",
        "            if False:",
        _RESUME,
        "tokens that nobody reads fill the memory",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "            channel.add(wire.Record(attempt.number, 0, [], end=FinishReason.ABORT, final=True))\n",
        "",
        (*_RESUME, *_CHANNEL),
        "an ingress waits for an attempt that was aborted with its call",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "                attempt.stay()\n            self._kept",
        "                pass\n            self._kept",
        _RESUME,
        "a connection that breaks aborts what could be resumed",
    ),
    Fault(
        "app/channel/engine_channel.py",
        "        while self.sent and self.sent[0][0] < self.acknowledged:",
        "        while self.sent and self.sent[0][0] <= self.acknowledged:",
        _RESUME,
        "a frame that has not arrived is not kept",
    ),
    Fault(
        "app/channel/resumption.py",
        "        if record.index > have:\n            return None\n",
        "",
        _RESUME,
        "tokens that are missing go unnoticed by the engine",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "            self._parts.channels.forget(route, left)",
        "            pass",
        _RESUME,
        "an engine computes for a client that left while its channel was broken",
    ),
    Fault(
        "app/routing/ledger.py",
        "                booking.route = route\n",
        "                pass\n",
        _RESUME,
        "a resumed attempt stays booked on a channel that has ended",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "            if silent > self._grace_s:",
        "            if silent > self._lease_s:",
        _RELAY,
        "an ingress that was stopped for a while loses its requests",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "        channel.suspended = False\n",
        "",
        _RELAY,
        "a suspended channel never goes on",
    ),
    Fault(
        "app/channel/relay.py",
        "            if self._clock() >= until and self._waiting:",
        "            if False:",
        _RELAY,
        "a backlog of frames keeps the loop from everything else",
    ),
    Fault(
        "app/channel/relay.py",
        "            if self._clock() >= until and self._waiting:",
        "            if self._clock() >= until and self._waiting and not self._scheduled:",
        _RELAY,
        "frames that keep coming keep the loop from everything else",
    ),
    Fault(
        "app/channel/relay.py",
        "            self._channels.forget(route, stale)",
        "            pass",
        _RELAY,
        "engines compute for attempts that nobody knows",
    ),
    Fault(
        "app/channel/ingress_channel.py",
        "            fault = not isinstance(error, UnknownEpochError | wire.WireError) and not self._failed_here",
        "            fault = True",
        _RELAY,
        "engines are blamed for beats that the ingress did not send",
    ),
    Fault(
        "app/fleet/attempts.py",
        "silence.look(next(looks) if behind else None)",
        "silence.look(None)",
        _RELAY,
        "an end record that waits unread is taken for lost",
    ),
    Fault(
        "app/channel/silence.py",
        "            self.seconds += min(past, self._most)",
        "            self.seconds += past",
        _WATCHDOG,
        "a process that was stopped takes the others for silent",
    ),
    Fault(
        "app/watchdog.py",
        "            return FIRST_STEP * self.stuck_after_s",
        "            return self.stuck_after_s",
        _WATCHDOG,
        "an engine that compiles in its first step is replaced",
    ),
    Fault(
        "app/watchdog.py",
        "progress if progress is not None else self._looks",
        "progress",
        _WATCHDOG,
        "an idle engine is taken for stuck",
    ),
    Fault(
        "app/watchdog.py",
        "        self._hub.on_stall(seconds)\n",
        "",
        _WATCHDOG,
        "requests are sent to an engine that makes no progress",
    ),
    Fault(
        "app/channel/engine_channel.py",
        "        return self.suspended or self.sequence - self.acknowledged >= MAX_UNACKNOWLEDGED",
        "        return self.suspended",
        _CHANNEL,
        "frames that nobody reads pile up without bound",
    ),
    Fault(
        "app/channel/engine_channel.py",
        "        if load != self.last_load:\n",
        "        if True:\n",
        _KV,
        "an unchanged load is sent again with every step",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "            if older.epoch >= epoch:",
        "            if older.epoch > epoch:",
        _CHANNEL,
        "an epoch can be opened twice",
    ),
    Fault(
        "app/channel/channel_hub.py",
        '        if channel is None or channel.epoch != epoch or channel.closed:\n            raise UnknownEpochError(f"no',
        '        if channel is None or channel.closed:\n            raise UnknownEpochError(f"no',
        _CHANNEL,
        "an attempt of an old epoch joins a new channel",
    ),
    Fault(
        "app/channel/engine_channel.py",
        "        waiting.token_ids.extend(record.token_ids)",
        "        waiting.token_ids[:] = record.token_ids",
        _CHANNEL,
        "tokens that gather while a channel is blocked replace each other",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "            if channel.unsent and not channel.blocked:\n",
        "            if False:\n",
        _CHANNEL,
        "what was made before the end of a channel is lost",
    ),
    Fault(
        "app/channel/channel_hub.py",
        "            silent = silence.look(channel.beats)",
        "            silent = silence.look(channel.sequence)",
        _CHANNEL,
        "a lease is renewed by the replica's own frames",
    ),
    Fault(
        "app/channel/engine_attempt.py",
        "            hub.leave(attempt)",
        "            pass",
        _CHANNEL,
        "an attempt whose call is canceled runs on",
    ),
    Fault(
        "app/channel/ingress_channel.py",
        "        if frame.epoch != epoch or frame.sequence != self._frames:",
        "        if frame.epoch != epoch:",
        _KV,
        "a lost frame goes unnoticed",
    ),
    Fault(
        "app/channel/ingress_channel.py",
        "                self._next_resync = 0.0  # the next beat asks again",
        "                pass",
        _KV,
        "a request for a snapshot that failed is not repeated",
    ),
    Fault(
        "app/channel/kv_feed.py",
        "        if hello.keys is None or not hello.agrees:",
        "        if hello.keys is None:",
        _KV,
        "a replica that names blocks otherwise fills the index",
    ),
    Fault(
        "app/channel/kv_feed.py",
        "                    and self._index.verify(route.replica, section.sequence, section.xor, section.count)\n",
        "",
        _KV,
        "a digest that does not agree goes unnoticed",
    ),
]
