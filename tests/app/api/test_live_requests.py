"""No client alone fills an ingress, and a flood of one does not refuse the others."""

from __future__ import annotations

import httpx
import pytest
from local_server import LocalServer

from app.api.errors import ApiError
from app.api.live_requests import LiveRequests
from app.fleet.overload import OverloadControl
from app.option_groups import IngressOptions
from app.routing.waiting import ExpectedWait
from engine.errors import InvalidRequestError

CALM = OverloadControl()


def in_overload(wait_s: float, limit_s: float = 1.0) -> OverloadControl:
    """The expected wait has been too long for as long as it may."""
    now = [100.0]
    overload = OverloadControl(
        lambda: ExpectedWait(wait_s, 1), max_wait_s=limit_s, max_replicas=1, clock=lambda: now[0]
    )
    overload.update()
    now[0] += limit_s
    overload.update()
    return overload


def test_one_client_leaves_an_eighth_of_an_ingress_to_others() -> None:
    options = IngressOptions(max_live_choices=16)
    live = LiveRequests()
    permits = [live.admit("greedy", 2, options, CALM) for _ in range(7)]
    with pytest.raises(ApiError, match=r"16 choices in progress.* 14 .*max_client_choices") as refused:
        live.admit("greedy", 2, options, CALM)
    fault = refused.value.fault
    assert (fault.status, fault.code, fault.type) == (429, "client_limit_exceeded", "rate_limit_error")
    assert fault.retry_after_s is not None
    live.admit("other", 2, options, CALM)
    with pytest.raises(ApiError, match="max_live_choices") as full:
        live.admit("third", 1, options, CALM)
    assert full.value.fault.status == 503
    permits[0].release()
    live.admit("greedy", 2, options, CALM)
    assert live.count == 16


def test_what_is_refused_holds_nothing() -> None:
    options = IngressOptions(max_live_choices=8, max_client_choices=2, max_client_tokens=100)
    live = LiveRequests()
    for _ in range(5):
        permit = live.admit("a", 2, options, CALM)
        with pytest.raises(InvalidRequestError, match=r"101 prompt tokens.* 100 .*max_client_tokens"):
            permit.add_tokens(101, options)  # no wait would help
        permit.add_tokens(100, options)
        with pytest.raises(ApiError):
            live.admit("a", 1, options, CALM)
        permit.release()
    with pytest.raises(InvalidRequestError, match=r"3 choices.* 2 .*max_client_choices"):
        live.admit("a", 3, options, CALM)
    assert live.count == 0


def test_prompt_tokens_of_a_client_have_a_limit_if_one_is_set() -> None:
    live = LiveRequests()
    unlimited = IngressOptions()
    live.admit("a", 1, unlimited, CALM).add_tokens(10**9, unlimited)
    options = IngressOptions(max_client_tokens=100)
    first, second = (live.admit("b", 1, options, CALM) for _ in range(2))
    first.add_tokens(60, options)
    with pytest.raises(ApiError, match=r"120 prompt tokens in progress.* 100 .*max_client_tokens"):
        second.add_tokens(60, options)
    second.add_tokens(40, options)
    first.release()
    live.admit("b", 1, options, CALM).add_tokens(60, options)


def test_clients_that_are_not_known_have_no_limit_of_their_own() -> None:
    options = IngressOptions(max_live_choices=8, max_client_choices=1, max_client_tokens=1)
    live = LiveRequests()
    for _ in range(8):
        live.admit("", 1, options, CALM).add_tokens(5, options)
    with pytest.raises(ApiError, match="max_live_choices"):
        live.admit("", 1, options, CALM)
    with pytest.raises(InvalidRequestError, match=r"9 choices but at most 8 .*max_live_choices"):
        live.admit("", 9, options, CALM)  # no wait would help


def test_a_flood_of_one_client_refuses_that_one_alone() -> None:
    options = IngressOptions()
    live = LiveRequests()
    for _ in range(100):
        live.admit("flood", 1, options, CALM)
    overload = in_overload(wait_s=20.0)
    with pytest.raises(ApiError, match="expected wait"):
        live.admit("flood", 1, options, overload)
    # Of the flood only as much is ahead of another client as that one has itself.
    for _ in range(3):
        live.admit("other", 1, options, overload)
    with pytest.raises(ApiError, match="expected wait"):
        live.admit("other", 20, options, overload)


def test_many_clients_are_refused_as_one_would_be() -> None:
    options = IngressOptions()
    live = LiveRequests()
    for number in range(100):
        live.admit(f"client{number}", 1, options, CALM)
    assert live.share_ahead("new", 1) == 1.0
    with pytest.raises(ApiError, match="expected wait"):
        live.admit("new", 1, options, in_overload(wait_s=1.5))


def test_no_client_gets_ahead_by_priority(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(priority: int) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1, "priority": priority})

    assert [answer(priority).status_code for priority in (0, 1, 1000)] == [200] * 3
    refused = answer(-1)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "priority"
    assert "priority is -1 but must be at least 0, which runs first here (min_priority)" in error["message"]
    server.set_options(monkeypatch, min_priority=-7)
    assert [answer(priority).status_code for priority in (-7, -8)] == [200, 400]


def test_limits_of_a_client_reach_it_as_429(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set_options(monkeypatch, max_client_choices=2, max_client_tokens=50)
    key = {"authorization": "Bearer k"}
    many = http.post("/v1/completions", json={"prompt": [5], "n": 3, "max_tokens": 1}, headers=key)
    long = http.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": 1}, headers=key)
    fine = http.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": 1})
    assert [response.status_code for response in (many, long, fine)] == [400, 400, 200]
    assert "max_client_choices" in many.json()["error"]["message"]
    assert "max_client_tokens" in long.json()["error"]["message"]
