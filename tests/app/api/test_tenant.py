"""Tenants share no prefixes, whatever their clients send, and an operator can empty the prefix caches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from local_server import COUNT, LocalServer
from starlette.datastructures import Headers
from starlette.requests import Request

from app.api.key_limits import KeyLimits
from app.api.keys import ApiKey
from app.api.tenant import address_of, client_of, secret, sender_of, tenant_of
from app.config import CACHE_SECRET, HAPROXY
from app.fleet.cache_reset import CacheReset
from app.fleet.generation import Delta, GenerateRequest
from app.launch import serving
from engine.errors import ClientLimitError

SECRET = "Bearer sk-very-secret"
_first_tokens = itertools.count(100)


@pytest.fixture
def prompt() -> list[int]:
    """Two full blocks of 16 and 8 more that no other test has sent."""
    return [next(_first_tokens)] * 40


@pytest.fixture
def tenants(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.set_options(monkeypatch, tenant_header="Authorization")


def cached(http: httpx.Client, prompt: list[int], headers: dict[str, str], salt: str | None = None) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    response = http.post("/v1/completions", json=body, headers=headers)
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_is_a_digest_of_the_headers_value() -> None:
    headers = Headers({"authorization": SECRET})
    tenant = tenant_of(headers, "AUTHORIZATION")
    assert len(tenant) == 32
    assert int(tenant, 16) > 0
    assert tenant == tenant_of(Headers({"Authorization": SECRET}), "authorization")
    assert tenant != tenant_of(Headers({"authorization": SECRET + "x"}), "authorization")
    assert tenant_of(headers, None) == tenant_of(headers, "x-tenant") == ""


def test_a_second_header_leads_away_from_every_other_tenant() -> None:
    def of(*values: str) -> str:
        return tenant_of(Headers(raw=[(b"x-tenant", value.encode()) for value in values]), "x-tenant")

    assert len({of("a"), of("b"), of("a", "b"), of("b", "a"), of("a,b"), of("a", ""), of("")}) == 7
    assert tenant_of(Headers(raw=[(b"x-tenant", b"\xff")]), "x-tenant")


def test_a_secret_changes_every_tenant_and_joins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def tenants() -> set[str]:
        secret.cache_clear()
        headers = [Headers({"x-tenant": value}) for value in "ab"]
        values = [tenant_of(one, "x-tenant", key) for one in headers for key in ("", "k")]
        assert len(set(values)) == 4
        return set(values)

    found = []
    for value in ("", "one", "two", "s" * 100):
        monkeypatch.setenv(CACHE_SECRET, value)
        found.append(tenants())
    assert len(set.union(*found)) == 16
    monkeypatch.undo()
    secret.cache_clear()


def test_a_client_is_what_the_request_says_of_itself() -> None:
    def of(key: str | None, user: str = "") -> str:
        return client_of(Headers({} if key is None else {"authorization": key}), user)

    assert of(None) == ""
    assert len({of(None), of("k"), of("k", "u"), of("k", "v"), of("l", "u"), of(None, "u")}) == 6
    assert len({of(None), *(client_of(Headers({"x-api-key": key}), "") for key in "kl")}) == 3
    assert len(of("k", "any text: \u00e4\u2013\0")) == 32


@pytest.fixture
def behind_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in serving.HAPROXY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_an_address_that_no_haproxy_has_set_is_a_made_up_one(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [(b"x-quire-client", b"10.0.0.2")]
    request = Request({"type": "http", "headers": headers, "client": ("10.0.0.1", 5), "state": {}})
    monkeypatch.delenv(HAPROXY, raising=False)
    assert (sender_of(request, None), address_of(request)) == ("10.0.0.1", "10.0.0.1")


@pytest.mark.usefixtures("behind_haproxy")
def test_the_sender_of_a_body_is_the_key_the_tenant_or_the_address() -> None:
    def of(headers: dict[str, str], header: str | None = None, key: str = "") -> str:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        limits = KeyLimits(ApiKey(id=key, sha256="0" * 64)) if key else None
        state = {"key_limits": limits}
        return sender_of(
            Request({"type": "http", "headers": raw, "client": ("10.0.0.1", 5), "state": state}), header
        )

    assert of({}) == "10.0.0.1"
    assert of({"x-quire-client": "10.0.0.2"}) == "10.0.0.2"  # that of the proxy's client
    assert of({"authorization": "Bearer made up"}) == "10.0.0.1"  # a client could change it each time
    keys = {of({}, key="a"), of({"x-quire-client": "10.0.0.2"}, key="a")}
    assert keys == {tenant_of(Headers({}), None, "a")}
    assert of({"x-tenant": "a"}, "x-tenant") == tenant_of(Headers({"x-tenant": "a"}), "x-tenant")


@pytest.mark.usefixtures("behind_haproxy")
def test_no_user_and_no_made_up_key_gives_another_budget(server: LocalServer, http: httpx.Client) -> None:
    def of(address: str, user: str = "", key: str = "") -> tuple[str, str]:
        headers = {"x-quire-client": address} | ({"authorization": f"Bearer {key}"} if key else {})
        body = {"prompt": [5], "max_tokens": 1} | ({"user": user} if user else {})
        http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        assert server.client.last is not None
        return server.client.last.client, server.client.last.sender

    found = [of("10.0.0.1"), of("10.0.0.1", "u"), of("10.0.0.1", "v"), of("10.0.0.1", "v", "k")]
    assert len({client for client, _ in found}) == 4
    assert {sender for _, sender in found} == {"10.0.0.1"}
    assert of("10.0.0.2")[1] == "10.0.0.2"  # two that say nothing of themselves


def test_a_client_beyond_its_budget_gets_a_429(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: GenerateRequest) -> AsyncIterator[Delta]:
        raise ClientLimitError("too long", 2)
        yield

    monkeypatch.setattr(server.client, "generate", refuse)
    answer = http.post("/v1/completions", json=COUNT)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    error = {"message": "too long", "type": "rate_limit_error", "param": None, "code": "client_limit_exceeded"}
    assert answer.json() == {"error": error}


@pytest.mark.usefixtures("tenants")
def test_prefixes_are_shared_within_a_tenant_only(http: httpx.Client, prompt: list[int]) -> None:
    one, two = {"authorization": "Bearer one"}, {"AUTHORIZATION": "Bearer two"}
    assert [cached(http, prompt, one), cached(http, prompt, one)] == [0, 32]
    assert [cached(http, prompt, two), cached(http, prompt, two)] == [0, 32]
    assert [cached(http, prompt, {}), cached(http, prompt, {})] == [0, 32]


@pytest.mark.usefixtures("tenants")
def test_a_salt_divides_a_tenants_blocks_and_never_reaches_anothers(
    http: httpx.Client, prompt: list[int]
) -> None:
    one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    digest = tenant_of(Headers(one), "authorization")
    assert [cached(http, prompt, one), cached(http, prompt, one, "s"), cached(http, prompt, one, "s")] == [
        0,
        0,
        32,
    ]
    for salt in ("", "s", digest, "Bearer one"):
        assert cached(http, prompt, two, salt) == 0


def test_without_the_option_the_header_divides_nothing(http: httpx.Client, prompt: list[int]) -> None:
    assert cached(http, prompt, {"authorization": "Bearer one"}) == 0
    assert cached(http, prompt, {"authorization": "Bearer two"}) == 32


@pytest.mark.usefixtures("tenants")
def test_the_value_is_in_no_error_and_in_no_log(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for body in ({"prompt": "a", "max_tokens": 1}, {"prompt": ""}, {"prompt": [10**9]}, {"x": 1}):
        response = http.post("/v1/completions", json=body, headers={"authorization": SECRET})
        assert "secret" not in response.text
    assert "secret" not in caplog.text


# ---- POST /admin/reset_prefix_cache


@pytest.fixture
def admin(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> str:
    server.set_options(monkeypatch, admin_routes=True)
    return "/admin/reset_prefix_cache"


def test_the_route_does_not_exist_unless_it_is_switched_on(http: httpx.Client) -> None:
    response = http.post("/admin/reset_prefix_cache")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "there is no route '/admin/reset_prefix_cache'"


def test_a_reset_frees_the_cached_blocks(
    server: LocalServer, http: httpx.Client, admin: str, prompt: list[int]
) -> None:
    cached(http, prompt, {})
    blocks = server.client.engine.stats().scheduler.cached_blocks
    assert blocks >= 2
    response = http.post(admin)
    assert (response.status_code, response.json()) == (200, {"replicas": 1, "freed_blocks": blocks})
    assert cached(http, prompt, {}) == 0
    assert http.post("/v1/completions", json=COUNT).status_code == 200


def test_a_replica_that_did_not_reset_is_an_error_that_names_it(
    server: LocalServer, http: httpx.Client, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset() -> CacheReset:
        return CacheReset({"abc": 7}, {"def": "no answer within 30 s"})

    monkeypatch.setattr(server.client, "reset_prefix_cache", reset)
    response = http.post(admin)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "reset_failed"
    assert error["message"] == "1 replicas freed 7 blocks, 1 failed: def: no answer within 30 s"
