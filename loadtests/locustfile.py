"""A streaming chat user for Locust.

Statistics besides the request itself: ``TTFT`` (milliseconds to the first token), ``TPOT`` (milliseconds per
later token) and ``tokens/s`` (of one stream, the wait for its first token included; Locust labels every
column as milliseconds). A request fails unless its stream is whole.

Options come from the environment: QUIRE_LOAD_SEED, QUIRE_LOAD_MAX_TOKENS, QUIRE_LOAD_MODEL (else the first one
that the server lists).
"""

from __future__ import annotations

import itertools
import os

import httpx
from locust import User, between, events, task

from loadtests.client import INSTANCE, Outcome, stream_blocking
from loadtests.workloads import ChatTraffic

PATH = "/v1/chat/completions"
SEED = int(os.environ.get("QUIRE_LOAD_SEED", "0"))
MAX_TOKENS = int(os.environ.get("QUIRE_LOAD_MAX_TOKENS", "64"))
MODEL = os.environ.get("QUIRE_LOAD_MODEL", "")

_users = itertools.count()


class ChatUser(User):  # type: ignore[misc]
    """Chats, reads the answer, thinks for a moment, goes on."""

    wait_time = between(0.2, 1.0)

    def on_start(self) -> None:
        self.traffic = ChatTraffic(SEED, next(_users))
        self.http = httpx.Client(base_url=self.host, timeout=httpx.Timeout(120.0, connect=30.0))
        models = self.http.get("/v1/models").raise_for_status()
        self.model = MODEL or models.json()["data"][0]["id"]
        self.instance = models.headers.get(INSTANCE, "")

    def on_stop(self) -> None:
        self.http.close()

    @task  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        """One turn."""
        outcome = Outcome(model=self.model, asked=MAX_TOKENS)
        messages = self.traffic.next_messages()
        stream_blocking(self.http, PATH, outcome, self.instance, messages=messages, temperature=0.7)
        if outcome.fault:
            self.traffic.failed()
        else:
            self.traffic.answered(outcome.text)
            self._report(outcome)
        fault = RuntimeError(outcome.fault) if outcome.fault else None
        self._fire("POST", PATH, outcome.ended - outcome.began, len(outcome.text.encode()), fault)

    def _report(self, outcome: Outcome) -> None:
        self._fire("STREAM", "TTFT", outcome.first - outcome.began)
        if outcome.tokens > 1:
            self._fire("STREAM", "TPOT", (outcome.last - outcome.first) / (outcome.tokens - 1))
        self._fire("STREAM", "tokens/s", outcome.tokens / (outcome.last - outcome.began) / 1000)
        self._fire("STREAM", "output tokens", outcome.tokens / 1000)

    def _fire(
        self, kind: str, name: str, seconds: float, length: int = 0, fault: Exception | None = None
    ) -> None:
        events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1000,
            response_length=length,
            exception=fault,
            context=self.context(),
        )
