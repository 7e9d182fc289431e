"""An overloaded server as a client sees it: refused at once, told when to come again, nothing done for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from local_server import COUNT, MODEL, LocalServer, is_idle, wait_until

from app.api.errors import overloaded
from app.fleet.overload import OverloadControl
from app.fleet.refusal import Refusal
from app.routing.waiting import ExpectedWait

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
REQUESTS = (("completions", COUNT), ("completions", {**COUNT, "stream": True}), ("chat/completions", CHAT))


class Door:
    """A server's overload control; the wait, 8 s at first, is set here and has lasted for as long as it may."""

    def __init__(self) -> None:
        self.wait = 8.0
        self.now = 100.0
        self.overload = OverloadControl(
            lambda: ExpectedWait(self.wait, 1), max_wait_s=1.5, max_replicas=1, clock=lambda: self.now
        )
        self.overload.update()
        self.now += 1.5

    def relieve(self) -> None:
        self.wait = 0.0
        self.now += 1.0


@pytest.fixture
def door(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> Door:
    door = Door()
    monkeypatch.setattr(server.service, "overload", door.overload)
    return door


@pytest.fixture
def nothing_done(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes each step toward an engine that a request takes; none may be taken."""
    done: list[str] = []

    def noted(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            return method(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("encode_texts", "encode_chat"):
        noted(server.tokenizer, name)
    noted(server.client, "generate")
    noted(server.service, "_limits")
    yield done
    assert done == []
    wait_until(lambda: server.service.num_live == 0 and is_idle(server))


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_refusal_says_why_and_when_to_come_again(
    door: Door, nothing_done: list[str], http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    response = http.post(f"/v1/{path}", json=body)
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/json"
    seconds = int(response.headers["retry-after"])
    assert 7 <= seconds <= 10
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "overloaded")
    for part in ("8.0 s", "limit of 1.5 s", "max_wait_s", f"again in {seconds} s"):
        assert part in error["message"]
    assert "startup_s" not in error["message"]
    assert door.overload.inspect()["refused"] == 1


def test_a_limit_that_grants_replicas_time_to_start_is_named_with_it() -> None:
    message = str(overloaded(Refusal(70.0, 62.0, 8, startup_s=60.0)))
    assert "limit of 62 s (max_wait_s, plus startup_s=60 while replicas may be starting)" in message


def test_what_is_wrong_with_a_request_comes_first(
    door: Door, nothing_done: list[str], http: httpx.Client
) -> None:
    for body, status in (({"prompt": 7}, 400), ({**COUNT, "model": "gpt-5"}, 404)):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == status
        assert "retry-after" not in response.headers
    assert door.overload.inspect()["refused"] == 0


def test_other_routes_answer(door: Door, http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", f"/v1/models/{MODEL}"):
        assert http.get(path).status_code == 200


def test_the_door_opens_again(door: Door, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=COUNT).status_code == 429
    door.relieve()
    assert http.post("/v1/completions", json=COUNT).status_code == 200


def test_too_many_live_requests_are_told_when_to_come_again(
    door: Door, http: httpx.Client, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request of another test may still be there, whose answer its client has had already.
    wait_until(lambda: not server.service.num_live)
    monkeypatch.setattr(server.service.admission.live, "count", 1)
    server.set_options(monkeypatch, max_live_choices=1)
    unlimited = OverloadControl(lambda: ExpectedWait(20.0, 1))
    for overload, least, most in ((unlimited, 20, 30), (OverloadControl(), 1, 2)):
        monkeypatch.setattr(server.service, "overload", overload)
        response = http.post("/v1/completions", json=COUNT)
        assert response.status_code == 503
        assert least <= int(response.headers["retry-after"]) <= most
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "unavailable")
        assert (
            "1 choices are in progress, and at most 1 are allowed at one ingress (max_live_choices)"
            in error["message"]
        )


def test_openais_client_knows_it_and_comes_again_when_told(
    door: Door, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        door.relieve()

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.RateLimitError) as refused:
            sdk.completions.create(model=MODEL, **COUNT)
        assert (refused.value.code, refused.value.type) == ("overloaded", "rate_limit_error")
        monkeypatch.setattr(openai._base_client, "time", SimpleNamespace(sleep=sleep))
        patient = sdk.with_options(max_retries=1)
        assert patient.completions.create(model=MODEL, **COUNT).choices[0].finish_reason == "length"
    assert len(slept) == 1
    assert 7 <= slept[0] <= 10
