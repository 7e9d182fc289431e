"""Faults in the channel between an ingress and an engine replica."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_CHANNEL = ("app/channel/test_channel.py",)
_WIRE = ("app/channel/test_wire.py",)
_KV = ("app/channel/test_kv_resync.py", "app/channel/test_kv_section.py", "app/channel/test_kv_outbox.py")

_WATCHDOG = ("app/test_watchdog.py",)
_RELAY = ("app/channel/test_relay.py",)

CHANNEL: list[Fault] = [
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
        "                fault = not isinstance(error, UnknownEpochError | wire.WireError) and not self._failed_here",
        "                fault = True",
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
        "app/channel/channel_hub.py",
        "                record.token_ids.extend(delta.token_ids)",
        "                record.token_ids[:] = delta.token_ids",
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
        "            if hub.detach(attempt):\n                engine.abort(engine_id)",
        "            hub.detach(attempt)",
        _CHANNEL,
        "an attempt whose call is cancelled runs on",
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
