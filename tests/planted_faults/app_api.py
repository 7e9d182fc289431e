"""Faults in the HTTP surface."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_SSE = ("app/api/test_sse.py",)
_TEXT = ("app/api/test_text.py",)
_CHOICES = ("app/api/test_stream_choices.py",)
_TENANT = ("app/api/test_tenant.py",)
_INPUT = ("app/api/test_bad_input.py",)

API: list[Fault] = [
    Fault(
        "app/api/sse.py",
        "                if not self._begun:\n                    await fault",
        "                if not self._has_events:\n                    await fault",
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
        "        if self._has_events:\n            return None\n",
        "",
        _SSE,
        "keep-alive comments come between the events of a stream that has begun",
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
        "                return text[: end + 1 - match_length]",
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
        'hashlib.blake2b("\\0".join(values).encode("latin-1")',
        'hashlib.blake2b(values[0].encode("latin-1")',
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
        "            if len(body) > MAX_BODY_BYTES:\n                raise _too_large()\n",
        "",
        _INPUT,
        "a body of unknown length may have any size",
    ),
    Fault(
        "app/api/request_body.py",
        ", parse_constant=_refuse_constant)",
        ")",
        _INPUT,
        "NaN passes for JSON",
    ),
]
