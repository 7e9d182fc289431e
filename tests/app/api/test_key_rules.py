"""What a key may do over HTTP: routes, contexts, priorities, models; and what the audit log says of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from local_server import MODEL, LocalServer, wait_until

from app.api import request_body
from app.api.audit_log import audit_to
from app.api.authentication import Gate
from app.api.key_limits import KeyLimits
from app.api.keys import KeyFile, digest_of
from app.api.routes import make_api
from app.metrics.fleet_figures import FleetFigures, ModelFigures
from app.metrics.request_figures import RequestFigures
from app.metrics.samples import Process

KEYS = """keys:
  - {id: narrow, sha256: %s, max_context_tokens: 50, min_priority: -3, concurrent_streams: 1}
  - {id: other, sha256: %s, models: [another-model]}
  - {id: operator, sha256: %s, admin: true}
"""


@pytest.fixture
def keys(server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gate:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS % tuple(map(digest_of, ("narrow", "other", "operator"))))
    gate = Gate(KeyFile(str(path), {}))
    monkeypatch.setattr(server.api, "gate", gate)
    return gate


def used(server: LocalServer) -> list[float]:
    """Of the key ``narrow``: requests, tokens of prompts, cached ones, of outputs."""
    wait_until(lambda: server.service.num_live == 0)  # a request is counted after its response
    samples = server.service.figures.samples()
    names = ("key_requests", "key_prompt_tokens", "key_cached_tokens", "key_output_tokens")
    return [cast(float, samples[name].get(("narrow",), 0)) for name in names]


@pytest.mark.usefixtures("keys")
def test_every_route_needs_a_key_but_health_and_ping(server: LocalServer, http: httpx.Client) -> None:
    api = make_api(lambda: server.api)._api  # type: ignore[attr-defined]
    asked = {
        (method, route.path.replace("{name:path}", MODEL)) for route in api.routes for method in route.methods
    }
    assert len(asked) >= 11
    for method, path in sorted(asked):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}):
            status = http.request(method, path, json={}, headers=headers).status_code
            assert (status == 401) is (path not in ("/health", "/ping")), (method, path)


@pytest.mark.usefixtures("keys")
def test_a_key_may_use_so_long_a_context_and_no_more(server: LocalServer, http: httpx.Client) -> None:
    before = used(server)

    def ask(**fields: Any) -> httpx.Response:
        body = {"prompt": list(range(1000, 1040)), "ignore_eos": True, **fields}
        return http.post("/v1/completions", json=body, headers={"x-api-key": "narrow"})

    assert ask(max_tokens=10).json()["usage"]["completion_tokens"] == 10
    refused = ask(max_tokens=11)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "max_context_tokens" in refused.json()["error"]["message"]
    messages = [{"role": "user", "content": "Count."}]
    body = {"messages": messages, "ignore_eos": True}
    usage = http.post("/v1/chat/completions", json=body, headers={"x-api-key": "narrow"}).json()["usage"]
    assert usage["total_tokens"] == 50, "without max_tokens the answer ends at the limit"
    wanted = [3, 40 + usage["prompt_tokens"], 0, 10 + usage["completion_tokens"]]
    assert [after - count for after, count in zip(used(server), before, strict=True)] == wanted


@pytest.mark.usefixtures("keys")
def test_a_keys_own_priority_counts(http: httpx.Client) -> None:
    def ask(priority: int) -> httpx.Response:
        body = {"prompt": [5], "max_tokens": 1, "priority": priority}
        return http.post("/v1/completions", json=body, headers={"x-api-key": "narrow"})

    assert ask(-3).status_code == 200
    assert "at least -3" in ask(-4).json()["error"]["message"]


@pytest.mark.usefixtures("keys")
def test_a_key_of_other_models_gets_nothing_here(http: httpx.Client) -> None:
    headers = {"x-api-key": "other"}
    for route, body in (("v1/completions", {"prompt": "a"}), ("tokenize", {"prompt": "a"})):
        for model in ({}, {"model": MODEL}):
            refused = http.post(f"/{route}", json={**body, **model}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert http.get("/v1/models", headers=headers).json()["data"] == []
    assert http.get(f"/v1/models/{MODEL}", headers=headers).status_code == 403
    assert len(http.get("/v1/models", headers={"x-api-key": "narrow"}).json()["data"]) == 1


@pytest.mark.usefixtures("keys")
def test_the_audit_log_has_a_line_for_each_request(http: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit_to(str(path), "ingress:1")
    try:
        http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers={"x-api-key": "narrow"})
        wait_until(lambda: path.stat().st_size > 0)  # its line follows the response
        path.rename(tmp_path / "yesterday")
        http.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "narrow"})
    finally:
        audit_to(None, "")
    http.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "narrow"})
    (first,), (second,) = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in (tmp_path / "yesterday", path)
    )
    assert (first["key"], first["route"], first["outcome"], first["address"]) == (
        "narrow",
        "completions",
        "ok",
        "127.0.0.1",
    )
    assert (first["prompt_tokens"], first["output_tokens"]) == (1, 1)
    assert second["route"] == "tokenize"


@pytest.mark.usefixtures("keys")
def test_no_request_fails_for_a_line_that_the_audit_log_loses(
    http: httpx.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder has gone, and comes back; its disk is full."""
    folder = tmp_path / "audit"
    folder.mkdir()

    def ask() -> int:
        return http.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "narrow"}).status_code

    try:
        audit_to(str(folder / "log"), "ingress:1")
        folder.rename(tmp_path / "yesterday")
        assert [ask(), ask()] == [200, 200]
        folder.mkdir()
        assert ask() == 200
        assert (folder / "log").read_text().count("\n") == 1
        if Path("/dev/full").exists():
            audit_to("/dev/full", "ingress:1")
            assert ask() == 200
            assert "No space left on device" in caplog.messages[-1]
    finally:
        audit_to(None, "")
    lost = [message for message in caplog.messages if "audit log" in message]
    assert len(lost) == 2 + Path("/dev/full").exists()


@pytest.mark.usefixtures("keys")
def test_only_an_administrators_key_resets_the_cache(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reset(key: str) -> httpx.Response:
        return http.post("/admin/reset_prefix_cache", headers={"x-api-key": key})

    assert reset("operator").status_code == 404
    server.set_options(monkeypatch, admin_routes=True)
    audit_to(str(tmp_path / "audit"), "ingress:1")
    try:
        refused = reset("narrow")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
        assert "'admin: true'" in refused.json()["error"]["message"]
        freed = reset("operator").json()["freed_blocks"]
    finally:
        audit_to(None, "")
    first, second = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert (first["key"], first["route"], first["outcome"]) == ("narrow", "reset_prefix_cache", "admin_only")
    assert (second["key"], second["outcome"], second["address"]) == ("operator", "ok", "127.0.0.1")
    assert (second["replicas"], second["freed_blocks"]) == (1, freed)


@pytest.mark.usefixtures("keys")
def test_only_an_administrators_key_sees_what_others_have_used(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = RequestFigures()
    figures.key_requests.update({"narrow": 2, "other": 3, "third": 4})
    fleet = FleetFigures([ModelFigures("m", lambda: Process("i", figures.samples(), "m"))])
    monkeypatch.setattr(server.api, "fleet_figures", fleet)

    def seen(key: str) -> set[str]:
        text = http.get("/metrics", headers={"x-api-key": key}).text
        assert "quire_ended_requests_total" in text
        return {line for line in text.splitlines() if line.startswith("quire_key_requests_total{")}

    line = 'quire_key_requests_total{{model_name="m",replica="i",key="{}"}} {}'.format
    assert seen("narrow") == {line("narrow", 2)}
    assert seen("other") == set()  # it may not see this model
    assert seen("operator") == {line("narrow", 2), line("other", 3), line("third", 4)}


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("more", "sequences"),
    [
        ({"best_of": 4}, 4),
        ({"n": 2, "best_of": 4}, 4),
        ({"best_of": 4, "stop": "zzzz"}, 4),  # the text decides, here
        ({"n": 2, "best_of": 4, "stop": "zzzz", "prompt": [[1000, 1001, 1002]] * 2}, 8),
        ({"use_beam_search": True, "beam_width": 4, "temperature": 0}, 4),
        ({"n": 2}, 2),
    ],
)
def test_a_key_pays_for_every_sequence_that_is_generated(
    server: LocalServer, http: httpx.Client, keys: Gate, tmp_path: Path, more: dict[str, Any], sequences: int
) -> None:
    key = next(key for key in keys.keys.ring().by_digest.values() if key.id == "narrow")
    limited = key.model_copy(update={"tokens_per_minute": 1000})
    limits = KeyLimits(limited, clock=lambda: 0.0)
    path, before = tmp_path / "audit", used(server)
    prompts = len(more["prompt"]) if "prompt" in more else 1
    body = {"prompt": [1000, 1001, 1002], "max_tokens": 10, "ignore_eos": True, **more}
    audit_to(str(path), "ingress:1")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gate, "limits_of", lambda gate, key: limits)
            response = http.post("/v1/completions", json=body, headers={"x-api-key": "narrow"})
        wait_until(lambda: path.stat().st_size > 0)
    finally:
        audit_to(None, "")
    assert response.status_code == 200, response.text
    returned = 10 * len(response.json()["choices"])
    assert response.json()["usage"]["completion_tokens"] == returned
    assert used(server)[3] - before[3] == 10 * sequences
    assert dict(limits.headers())[b"x-ratelimit-remaining-tokens"] == b"%d" % (
        1000 - 3 * prompts - 10 * sequences
    )
    line = json.loads(path.read_text())
    assert (line["output_tokens"], line["generated_tokens"]) == (returned, 10 * sequences)


@pytest.mark.parametrize("how", [{"best_of": 4}, {"use_beam_search": True, "beam_width": 4, "temperature": 0}])
@pytest.mark.usefixtures("keys")
def test_a_key_pays_for_what_was_ranked_when_its_client_leaves(
    server: LocalServer, how: dict[str, Any]
) -> None:
    before = used(server)
    fields = {"prompt": [1000, 1001, 1002], "max_tokens": 40, "ignore_eos": True, **how}
    body = json.dumps(fields).encode()
    address = httpx.URL(server.url)
    server.client.last = None
    with server.slow_steps(), socket.create_connection((address.host, address.port)) as connection:
        lines = [
            "POST /v1/completions HTTP/1.1",
            "host: a",
            "x-api-key: narrow",
            f"content-length: {len(body)}",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        wait_until(lambda: server.client.last is not None and server.client.last.journal.generated >= 64)
    assert server.client.last is not None
    paid = [after - count for after, count in zip(used(server), before, strict=True)]
    assert paid[:2] == [1, 3]
    assert paid[3] == server.client.last.journal.generated
    assert 64 <= paid[3] < 4 * 40


def test_the_body_of_a_key_beyond_its_limits_is_not_parsed(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{id: k, sha256: {digest_of('k')}, requests_per_minute: 1}}\n")
    monkeypatch.setattr(server.api, "gate", Gate(KeyFile(str(path), {})))
    parsed: list[int] = []
    whole = request_body.parse_json_object

    def noted(body: bytes) -> dict[str, Any]:
        parsed.append(len(body))
        return whole(body)

    monkeypatch.setattr(request_body, "parse_json_object", noted)
    headers = {"x-api-key": "k"}
    assert (
        http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers=headers).status_code == 200
    )
    assert len(parsed) == 1
    long = json.dumps({"messages": [{"role": "user", "content": "a" * 100_000}]})
    for route in ("v1/completions", "v1/chat/completions", "v1/responses", "v1/messages", "tokenize"):
        refused = http.post(f"/{route}", content=long, headers=headers)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "requests_per_minute" in refused.text
    assert len(parsed) == 1
