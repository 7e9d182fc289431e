"""Without a valid key nothing but /health and /ping is answered, however the key is presented."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from app.api.authentication import MAX_KEY_CHARS, STATE, Authentication, Gate, presented_key
from app.api.errors import ApiError
from app.api.keys import ENVIRONMENT, ApiKey, KeyFile, digest_of

PAIRS = f"alice:{digest_of('key-a')},bob:{digest_of('key-b')}"


async def who(request: Request) -> Response:
    limits = getattr(request.state, STATE)
    return JSONResponse(None if limits is None else limits.key.id)


def client_of(gate: Gate) -> TestClient:
    app = Starlette(
        routes=[Route(path, who) for path in ("/", "/health", "/ping", "/v1/models", "/healthy")],
        middleware=[Middleware(Authentication, gate=lambda: gate)],
    )
    return TestClient(app)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_of(Gate(KeyFile(None, {ENVIRONMENT: PAIRS}))) as client:
        yield client


def test_without_keys_everybody_may_enter() -> None:
    with client_of(Gate(KeyFile(None, {}))) as client:
        assert client.get("/v1/models").json() is None
        assert client.get("/v1/models", headers={"authorization": "Bearer EMPTY"}).json() is None


def test_only_health_and_ping_are_open(client: TestClient) -> None:
    statuses = {
        path: client.get(path).status_code for path in ("/", "/health", "/ping", "/v1/models", "/healthy")
    }
    assert statuses == {"/": 401, "/health": 200, "/ping": 200, "/v1/models": 401, "/healthy": 401}
    assert client.get("/nothing").status_code == 401  # what exists is not told either


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"authorization": "Bearer key-a"}, "alice"),
        ({"authorization": "bearer  key-b "}, "bob"),
        ({"x-api-key": "key-b"}, "bob"),
        ({"authorization": "Bearer key-a", "x-api-key": "key-a"}, "alice"),
    ],
)
def test_a_valid_key_names_its_owner(client: TestClient, headers: dict[str, str], name: str) -> None:
    assert client.get("/v1/models", headers=headers).json() == name
    assert client.get("/health", headers=headers).json() == name


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-c"},
        {"authorization": "Bearer"},
        {"authorization": "key-a"},
        {"authorization": f"Bearer {digest_of('key-a')}"},
        {"authorization": "Bearer key-a", "x-api-key": "key-b"},
        {"authorization": "Bearer key-a", "x-api-key": ""},
        {"authorization": "Basic a2V5LWE=", "x-api-key": "key-a"},
        {"x-api-key": ""},
        {"x-api-key": "k" * (MAX_KEY_CHARS + 1)},
        {"authorization": "Bearer \xe9"},
    ],
)
def test_any_other_key_is_refused_in_the_form_of_the_api(client: TestClient, headers: dict[str, str]) -> None:
    raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    answer = client.get("/v1/models", headers=list(raw.items()))
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_browser_asks_for_the_key_and_other_sites_cannot_use_it(client: TestClient) -> None:
    asked = client.get("/", headers={"sec-fetch-mode": "navigate"})
    assert asked.headers["www-authenticate"].startswith("Basic ")
    basic = {"authorization": "Basic " + base64.b64encode(b"anyone:key-a").decode()}
    assert client.get("/", headers={**basic, "sec-fetch-site": "none"}).json() == "alice"
    assert client.get("/v1/models", headers={**basic, "sec-fetch-site": "same-origin"}).json() == "alice"
    for site in ("cross-site", "same-site"):
        assert client.get("/v1/models", headers={**basic, "sec-fetch-site": site}).status_code == 401
    assert client.get("/v1/models", headers=basic).status_code == 401


def test_broken_basic_credentials_are_no_key() -> None:
    for credentials in ("%%%", base64.b64encode(b"\xff:\xff").decode(), "YQ"):
        headers = Headers({"authorization": f"Basic {credentials}", "sec-fetch-site": "none"})
        assert presented_key(headers) is None


def test_what_a_removed_key_has_used_is_forgotten(tmp_path: Path) -> None:
    def listed(*names: str) -> None:
        entries = [{"id": name, "sha256": digest_of(name)} for name in names]
        path.write_text(json.dumps({"keys": entries}))

    path = tmp_path / "keys.json"
    listed("alice", "bob")
    gate = Gate(KeyFile(str(path), {}))
    keys = gate.keys.ring().by_digest
    alice, bob = keys[digest_of("alice")], keys[digest_of("bob")]
    kept = gate.limits_of(bob)
    gate.limits_of(alice)
    assert set(gate._limits) == {"alice", "bob"}
    listed("bob")
    gate.keys.reread()
    assert gate.limits_of(bob) is kept
    assert set(gate._limits) == {"bob"}


def test_what_a_key_has_used_outlives_a_change_of_its_entry(tmp_path: Path) -> None:
    def entry(name: str, **fields: object) -> ApiKey:
        listed = [{"id": "alice", "sha256": digest_of(name), **fields}]
        path.write_text(json.dumps({"keys": listed}))
        gate.keys.reread()
        return gate.keys.ring().by_digest[digest_of(name)]

    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    gate = Gate(KeyFile(str(path), {}))
    limits = gate.limits_of(entry("alice", requests_per_minute=1, concurrent_requests=9))
    limits.admit()
    for secret, admin in (("alice", True), ("another secret", False)):
        changed = entry(secret, requests_per_minute=1, concurrent_requests=9, admin=admin)
        assert gate.limits_of(changed).key == changed
        with pytest.raises(ApiError, match=r"limit of 1 requests a minute \(requests_per_minute\)"):
            gate.limits_of(changed).admit()
    fewer = gate.limits_of(entry("alice", concurrent_requests=1))
    with pytest.raises(ApiError, match=r"1 requests at the same time \(concurrent_requests\)"):
        fewer.admit()
    limits.release(1)
    fewer.admit()


def test_limits_are_told_with_every_answer_and_belong_to_the_key() -> None:
    keys = KeyFile(None, {ENVIRONMENT: PAIRS})
    gate = Gate(keys, replicas=2)
    key = keys.ring().by_digest[digest_of("key-a")]
    limits = gate.limits_of(key)
    assert gate.limits_of(key) is limits
    assert limits.share == 0.5
    with client_of(gate) as client:
        headers = client.get("/v1/models", headers={"x-api-key": "key-b"}).headers
        assert not any(name.startswith("x-ratelimit") for name in headers)
