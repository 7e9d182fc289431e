"""Faults in the HTTP surface."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_SSE = ("app/api/test_sse.py",)
_TEXT = ("app/api/test_text.py",)
_CHOICES = ("app/api/test_stream_choices.py",)
_TENANT = ("app/api/test_tenant.py",)
_JSON = ("app/api/test_json_pieces.py",)
_BODY = ("app/api/test_request_body.py",)
_TYPES = ("app/api/test_openai_types.py",)
_LIVE = ("app/api/test_live_requests.py",)
_INPUT = ("app/api/test_bad_input.py",)
_TEMPLATE = ("app/api/test_chat_template.py",)
_TOKENIZER = ("app/api/test_tokenizer_parts.py",)

API: list[Fault] = [
    Fault(
        "app/api/chat_template.py",
        "            _check(name)\n        Namespace.__init__",
        "            pass\n        Namespace.__init__",
        _TEMPLATE,
        "a template sets private attributes",
    ),
    Fault(
        "app/api/chat_template.py",
        "if value is not None}",
        "if True}",
        _TEMPLATE,
        "a template sees keys that nobody gave",
    ),
    Fault(
        "app/api/tokenizer_parts.py",
        '_OTHER_FILES = ("config.json", ',
        "_OTHER_FILES = (",
        _TOKENIZER,
        "a model gets the tokenizer that the same files make in another family",
    ),
    Fault(
        "app/api/key_limits.py",
        "        return most - prompt if max_tokens is None else max_tokens",
        "        return max_tokens",
        ("app/api/test_key_limits.py", "app/api/test_key_rules.py"),
        "a request without max_tokens exceeds the longest context of its key",
    ),
    Fault(
        "app/api/key_limits.py",
        "        self.streams -= stream\n",
        "",
        ("app/api/test_key_limits.py",),
        "streams of a key are counted for ever",
    ),
    Fault(
        "app/api/openai_service.py",
        "        if key is not None and not key.may_use(self._model):",
        "        if False:",
        ("app/api/test_key_rules.py",),
        "a key uses models that it is not for",
    ),
    Fault(
        "app/api/request_body.py",
        "        if own > MAX_HELD_BYTES - total:",
        "        if total > MAX_HELD_BYTES:",
        ("app/api/test_request_body.py",),
        "one client fills what all may hold of large bodies",
    ),
    Fault(
        "app/api/keys.py",
        "            await asyncio.to_thread(self.reread)",
        "            self.reread()",
        ("app/api/test_keys.py",),
        "a key file is reread on the event loop",
    ),
    Fault(
        "app/api/tenant.py",
        '    return request.headers.get(CLIENT_ADDRESS, request.client.host if request.client is not None else "")',
        '    return request.client.host if request.client is not None else ""',
        _TENANT,
        "all clients behind the proxy share one share of large bodies",
    ),
    Fault(
        "app/api/sse.py",
        "                if not self._begun:\n                    await fault",
        "                if self._sent < 0:\n                    await fault",
        _SSE,
        "an error after the headers and before the first event sends a second response start",
    ),
    Fault(
        "app/api/sse.py",
        "        await asyncio.gather(working, watching, return_exceptions=True)\n",
        "",
        _SSE,
        "a response returns before its work has ended",
    ),
    Fault(
        "app/api/sse.py",
        "        if quiet < KEEP_ALIVE_S:\n            return KEEP_ALIVE_S - quiet\n",
        "",
        _SSE,
        "keep-alive comments come soon after an event",
    ),
    Fault(
        "app/api/sse.py",
        "        if self._sending:  # to a client that reads slowly\n            return KEEP_ALIVE_S\n",
        "",
        _SSE,
        "comments pile up for a client that does not read",
    ),
    Fault(
        "app/api/sse.py",
        "                await self._begin(send)\n                await send(",
        "                await send(",
        _SSE,
        "an error overtakes headers that leave slowly",
    ),
    Fault(
        "app/api/sse.py",
        "                    if not self._begun or self._beginning.locked():",
        "                    if not self._begun:",
        _SSE,
        "an event overtakes headers that leave slowly",
    ),
    Fault(
        "app/api/sse.py",
        "                fault = fault_of(error)\n                self._sending = True\n",
        "                fault = fault_of(error)\n",
        _SSE,
        "an error that leaves slowly is followed by headers of a stream",
    ),
    Fault(
        "app/api/request_body.py",
        "            async with asyncio.timeout(WITHIN_S):",
        "            async with asyncio.timeout(None):",
        _BODY,
        "clients that send slowly hold the memory of all large bodies",
    ),
    Fault(
        "app/api/key_limits.py",
        "        self.size = max(per_minute, 1.0)",
        "        self.size = per_minute",
        ("app/api/test_key_limits.py",),
        "a key whose share is less than one request a minute is never admitted",
    ),
    Fault(
        "app/api/routes.py",
        "    return InstanceHeader(api, lambda: get_service().instance)",
        "    return api",
        ("app/test_ingress.py",),
        "an answer does not say which server gave it",
    ),
    Fault(
        "app/api/sse.py",
        "            await working  # its error, if any, is the server's\n",
        "            pass\n",
        _SSE,
        "an error of sending is swallowed",
    ),
    Fault(
        "app/api/text.py",
        "                k = failure[k - 1]",
        "                k = 0",
        _TEXT,
        "a stop string that begins within a failed match of itself is missed",
    ),
    Fault(
        "app/api/text.py",
        "                return text[:begin]",
        "                return text[: end + 1]",
        _TEXT,
        "the stop string is shown",
    ),
    Fault(
        "app/api/text.py",
        "                longest = max(longest, k)",
        "                longest = k",
        _TEXT,
        "of two stop strings that end together, the last one listed wins",
    ),
    Fault(
        "app/api/text.py",
        "and self.num_tokens > self._min_tokens:",
        "and self.num_tokens >= self._min_tokens:",
        _TEXT,
        "a stop string may end within min_tokens",
    ),
    Fault(
        "app/api/text.py",
        '        hidden = 1 if finish_reason == "stop" and token_ids else 0',
        "        hidden = 0",
        _TEXT,
        "the end-of-sequence token is shown",
    ),
    Fault(
        "app/api/text.py",
        '        return self._decode(b"", True)',
        '        return ""',
        _TEXT,
        "half a character at the end of the output disappears",
    ),
    Fault(
        "app/api/tenant.py",
        'text = "\\0".join([key, *values] if key else values)',
        'text = "\\0".join([key, *values[:1]] if key else values[:1])',
        _TENANT,
        "of a tenant header that comes twice, the first alone counts",
    ),
    Fault(
        "app/api/choices.py",
        "            if output.stopped:\n                reason = ",
        "            if output.stopped and reason is None:\n                reason = ",
        _CHOICES,
        "a stop string found in the last token is reported as the length limit",
    ),
    Fault(
        "app/api/choices.py",
        "        for task in tasks:\n            task.cancel()\n        await asyncio.gather(*tasks, return_exceptions=True)",
        "        await asyncio.gather(*tasks, return_exceptions=True)",
        _CHOICES,
        "an error of one prompt leaves the others running",
    ),
    Fault(
        "app/api/request_body.py",
        "                    if len(body) + len(chunk) > MAX_BODY_BYTES:\n                        raise _too_large()\n",
        "",
        _INPUT,
        "a body of unknown length may have any size",
    ),
    Fault(
        "app/api/json_pieces.py",
        "parse_constant=_refuse_constant",
        "",
        _JSON,
        "NaN passes for JSON",
    ),
    Fault(
        "app/api/json_pieces.py",
        "        if self._left < 0:",
        "        if self._left < -self._max_values:",
        _JSON,
        "a body may have twice as many values",
    ),
    Fault(
        "app/api/json_pieces.py",
        "                    at = self.skip(comma + 1)\n",
        '                    at = self.skip(comma + 1)\n                    if text.startswith("]", at):\n'
        "                        return items, at + 1\n",
        _JSON,
        "a comma after the last of many numbers passes",
    ),
    Fault(
        "app/api/request_body.py",
        "            error.start += begin - pending\n",
        "            error.start += begin\n",
        _BODY,
        "a wrong byte is reported at the place that it has in its piece's rest",
    ),
    Fault(
        "app/api/request_body.py",
        "            self._held[sender] -= held\n",
        "            pass\n",
        _BODY,
        "bodies are counted for ever",
    ),
    Fault(
        "app/api/request_body.py",
        "            if len(body) <= INLINE_BYTES:\n                return parse(parse_json_object(body))\n",
        "            parse_json_object(body)\n",
        _BODY,
        "small bodies are parsed twice, once of them on the loop",
    ),
    Fault(
        "app/api/chat_messages.py",
        "    if len(messages) > MAX_MESSAGES:",
        "    if len(messages) > 10 * MAX_MESSAGES:",
        _BODY,
        "ten times as many messages are rendered",
    ),
    Fault(
        "app/api/chat_messages.py",
        '    if role == "assistant" and content in (None, []):',
        "    if content in (None, []):",
        _TYPES,
        "a user's message may have no content",
    ),
    Fault(
        "app/api/chat_messages.py",
        '"content", "name") or key in own:',
        '"content", "name") or key in OUTPUT_ONLY:',
        _TYPES,
        "any message may have what only servers send",
    ),
    Fault(
        "app/api/live_requests.py",
        "        return min(sum(min(count, own) for count in self._of_clients.values()) / self.count, 1.0)",
        "        return 1.0",
        _LIVE,
        "a flood of one client refuses all",
    ),
    Fault(
        "app/api/live_requests.py",
        "        return min(sum(min(count, own) for count in self._of_clients.values()) / self.count, 1.0)",
        "        return min(own / self.count, 1.0)",
        _LIVE,
        "overload control never refuses one of many clients",
    ),
    Fault(
        "app/api/live_requests.py",
        "        if client and own > own_most:",
        "        if False:",
        _LIVE,
        "one client fills an ingress",
    ),
    Fault(
        "app/api/live_requests.py",
        "            counter[client] -= amount",
        "            pass",
        _LIVE,
        "what a client has had counts for ever",
    ),
    Fault(
        "app/api/openai_service.py",
        "        if options.priority < best:",
        "        if False:",
        _LIVE,
        "any client may go ahead of all others",
    ),
]
