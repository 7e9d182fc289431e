"""Users for Locust that stream, of five kinds: chats, documents, bursts, agents, and abuse.

Statistics besides the request itself: ``TTFT`` (milliseconds to the first token), ``TPOT`` (milliseconds per
later token), ``tokens/s`` of one stream, and ``cached`` (% of its prompt); Locust labels all as milliseconds.

Options come from the environment: QUIRE_LOAD_SEED, QUIRE_LOAD_MAX_TOKENS, QUIRE_LOAD_MODEL (else the first one
that the server lists), QUIRE_API_KEY, and QUIRE_LOAD_RECORDS, a file that gets a JSON line per whole stream.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from typing import Any

import httpx
from locust import User, events, task

from loadtests.client import INSTANCE, Outcome, stream_blocking
from loadtests.workloads import ChatTraffic, question, sentences

PATH = "/v1/chat/completions"
SEED = int(os.environ.get("QUIRE_LOAD_SEED", "0"))
MAX_TOKENS = int(os.environ.get("QUIRE_LOAD_MAX_TOKENS", "64"))
MODEL, KEY = os.environ.get("QUIRE_LOAD_MODEL", ""), os.environ.get("QUIRE_API_KEY", "")
RECORDS = os.environ.get("QUIRE_LOAD_RECORDS", os.devnull)
KINDS = ("chat", "document", "chat", "burst", "chat", "agent", "chat", "abuse", "chat", "chat")
"""Of the users in the order in which they come, again and again."""
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
ANSWER = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}

_users = itertools.count()


def message(text: str) -> list[dict[str, str]]:
    """A chat that consists of this one."""
    return [{"role": "user", "content": text}]


class StreamingUser(User):  # type: ignore[misc]
    """Sends what its kind does, and reports what came of the streams."""

    def on_start(self) -> None:
        number = next(_users)
        self.kind = KINDS[number % len(KINDS)]
        self.rng, self.traffic = random.Random(f"{SEED} {number}"), ChatTraffic(SEED, number)
        headers = {"authorization": f"Bearer {KEY}"} if KEY else {}
        timeout = httpx.Timeout(120.0, connect=30.0)
        self.http = httpx.Client(base_url=self.host, timeout=timeout, headers=headers)
        models = self.http.get("/v1/models").raise_for_status()
        self.model = MODEL or models.json()["data"][0]["id"]
        self.instance = models.headers.get(INSTANCE, "")

    def on_stop(self) -> None:
        self.http.close()

    def wait_time(self) -> float:
        """Seconds to the next request; bursts are some without a pause, then a rest."""
        if self.kind == "burst":
            return 0.0 if self.rng.random() < 0.8 else 4.0
        return self.rng.uniform(0.2, 1.0)

    @task  # type: ignore[untyped-decorator]
    def act(self) -> None:
        if self.kind == "chat":
            outcome = self.send(self.traffic.next_messages())
            if outcome.fault:
                self.traffic.failed()
            else:
                self.traffic.answered(outcome.text)
        elif self.kind == "document":
            self.send(message(f"{sentences(self.rng, 600)} Sum this up."))
        elif self.kind == "burst":
            self.send(message(question(self.rng)))
        elif self.kind == "agent":
            fields = self.rng.choice(({"tools": [TOOL]}, {"response_format": SCHEMA}))
            self.send(message(question(self.rng)), **fields)
        else:
            self.rng.choice((self.malformed, self.leave))()

    def send(self, messages: list[dict[str, str]], **fields: Any) -> Outcome:
        outcome = Outcome(model=self.model, asked=MAX_TOKENS)
        fields = {"temperature": 0.7, **fields}
        stream_blocking(self.http, PATH, outcome, self.instance, messages=messages, **fields)
        if not outcome.fault:
            self._report(outcome)
        self.fire("POST", PATH, outcome.ended - outcome.began, outcome.fault)
        return outcome

    def _report(self, outcome: Outcome) -> None:
        row = outcome.record(self.kind)
        self.fire("STREAM", "TTFT", row["ttft"])
        self.fire("STREAM", "TPOT", row["tpot"])
        self.fire("STREAM", "tokens/s", row["output"] / (outcome.last - outcome.began) / 1000)
        self.fire("STREAM", "cached", row["cached"] / row["prompt"] / 10)
        with open(RECORDS, "a") as file:
            file.write(json.dumps(row) + "\n")

    def malformed(self) -> None:
        """Send a body that is no JSON; a refusal in due form is no failure."""
        began = time.perf_counter()
        status = self.http.post(PATH, content=b"{", headers={"content-type": "application/json"}).status_code
        fault = "" if status in (400, 422) else f"status {status} to a malformed body"
        self.fire("ABUSE", "malformed", time.perf_counter() - began, fault)

    def leave(self) -> None:
        """Hang up after reading slowly."""
        began = time.perf_counter()
        body = {"model": self.model, "messages": message("?"), "stream": True}
        with self.http.stream("POST", PATH, json={**body, "max_tokens": 200, "ignore_eos": True}) as response:
            for _ in itertools.islice(response.iter_lines(), 4):
                time.sleep(0.1)
            fault = "" if response.status_code == httpx.codes.OK else f"status {response.status_code}"
        self.fire("ABUSE", "leave", time.perf_counter() - began, fault)

    def fire(self, kind: str, name: str, seconds: float, fault: str = "") -> None:
        error = RuntimeError(fault) if fault else None
        how = {"response_length": 0, "exception": error, "context": self.context()}
        events.request.fire(request_type=kind, name=name, response_time=seconds * 1000, **how)
