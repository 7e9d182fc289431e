"""A streaming chat user for Locust.

Statistics besides the request itself: ``TTFT`` (milliseconds to the first token), ``TPOT`` (milliseconds per
later token) and ``tokens/s`` (of one stream, the wait for its first token included; Locust labels every
column as milliseconds). A request fails unless its stream is whole: status 200, no error chunk, a finish
reason, ``[DONE]``.

Options come from the environment: QUIRE_LOAD_SEED, QUIRE_LOAD_MAX_TOKENS, QUIRE_LOAD_MODEL.
"""

from __future__ import annotations

import itertools
import os
import time

from locust import FastHttpUser, between, events, task

from loadtests.chat_stream import ChatStream
from loadtests.workloads import ChatTraffic

PATH = "/v1/chat/completions"
SEED = int(os.environ.get("QUIRE_LOAD_SEED", "0"))
MAX_TOKENS = int(os.environ.get("QUIRE_LOAD_MAX_TOKENS", "64"))
MODEL = os.environ.get("QUIRE_LOAD_MODEL", "")

_users = itertools.count()


class ChatUser(FastHttpUser):  # type: ignore[misc]
    """Chats, reads the answer, thinks for a moment, goes on."""

    wait_time = between(0.2, 1.0)
    network_timeout = 120.0
    connection_timeout = 30.0

    def on_start(self) -> None:
        self.traffic = ChatTraffic(SEED, next(_users))

    @task  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        """One turn."""
        body = {
            "messages": self.traffic.next_messages(),
            "max_tokens": MAX_TOKENS,
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"model": MODEL} if MODEL else {}),
        }
        stream = ChatStream()
        with self.client.post(PATH, json=body, stream=True, catch_response=True) as response:
            if response.status_code == 200:
                fault = stream.read(response.stream)
            else:
                fault = f"status {response.status_code}: {(response.text or str(response.error))[:300]}"
            response.request_meta["response_time"] = (time.perf_counter() - stream.began) * 1000
            response.request_meta["response_length"] = len(stream.text.encode())
            if fault is None:
                response.success()
            else:
                response.failure(fault)
        if fault is None:
            self.traffic.answered(stream.text)
            self._report(stream)
        else:
            self.traffic.failed()

    def _report(self, stream: ChatStream) -> None:
        self._fire("TTFT", (stream.first_token - stream.began) * 1000)
        if stream.num_tokens > 1:
            seconds = stream.last_token - stream.first_token
            self._fire("TPOT", seconds * 1000 / (stream.num_tokens - 1))
        self._fire("tokens/s", stream.num_tokens / (stream.last_token - stream.began))
        self._fire("output tokens", stream.num_tokens)

    def _fire(self, name: str, value: float) -> None:
        events.request.fire(
            request_type="STREAM",
            name=name,
            response_time=value,
            response_length=0,
            exception=None,
            context=self.context(),
        )
