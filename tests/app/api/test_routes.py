"""The smaller routes: the page, /ping, /version, /tokenize, /detokenize, cross-origin requests, wrong paths."""

from __future__ import annotations

import asyncio
import json
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from local_server import MODEL, LocalServer, wait_until
from starlette.types import Message

from app.api.authentication import Gate
from app.api.keys import KeyFile, digest_of
from app.api.openai_service import OpenAIService
from app.api.routes import make_api


@pytest.fixture
def http(server: LocalServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def test_ping_and_version(http: httpx.Client) -> None:
    for method in ("GET", "POST"):
        answer = http.request(method, "/ping")
        assert (answer.status_code, answer.content) == (200, b"")
    assert http.get("/version").json() == {"version": metadata.version("quire")}


def test_the_page_allows_nothing_of_other_origins(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "https://" not in page.text
    assert "/v1/chat/completions" in page.text


def test_a_prompt_becomes_the_tokens_that_completions_uses(http: httpx.Client) -> None:
    body = http.post("/tokenize", json={"prompt": "one, two<|im_end|>", "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["token_strs"][-1] == "<|im_end|>"
    assert body["max_model_len"] == http.get("/v1/models").json()["data"][0]["max_model_len"]
    usage = http.post("/v1/completions", json={"prompt": "one, two<|im_end|>", "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == body["count"]
    back = http.post("/detokenize", json={"model": MODEL, "tokens": body["tokens"]}).json()
    assert back == {"prompt": "one, two<|im_end|>"}


def test_tokens_are_counted_within_the_limits_of_a_caller(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{id: a, sha256: {digest_of('key')}, requests_per_minute: 2}}\n")
    monkeypatch.setattr(server.api, "gate", Gate(KeyFile(str(path), {})))
    header = {"x-api-key": "key"}
    answers = [
        http.post(f"/{route}", json=body, headers=header)
        for route, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})) * 2
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    wait_until(lambda: server.service.num_live == 0)


def test_messages_become_the_tokens_that_chat_uses(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    body = http.post("/tokenize", json={"messages": messages}).json()
    assert body["token_strs"] is None
    usage = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == body["count"]


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("tokenize", {}, "give either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": []}, "give either prompt or messages"),
        ("tokenize", {"prompt": 3}, "prompt is 3 but must be a string"),
        ("tokenize", {"messages": []}, "messages is a list of 0 but must be a list of at least 1"),
        ("tokenize", {"prompt": "a", "temperature": 0}, "'temperature' is not a known parameter"),
        ("tokenize", {"prompt": "a" * 200_000}, "exceeds the context length of 512 tokens"),
        ("detokenize", {}, "tokens is missing or null but must be a list of token ids"),
        ("detokenize", {"tokens": [1, "2"]}, "tokens[1] is '2' but must be a token id"),
        ("detokenize", {"tokens": [1, -1]}, "tokens[1] is -1 but is not in the vocabulary"),
        ("detokenize", {"tokens": [10**30]}, "is not in the vocabulary"),
        ("detokenize", {"tokens": [1] * 513}, "513 tokens exceed the context length of 512 tokens"),
        ("detokenize", {"tokens": [49152]}, "tokens[0] is 49152 but is not in the vocabulary"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, route: str, body: dict[str, object], message: str) -> None:
    answer = http.post(f"/{route}", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_another_model_is_not_found(http: httpx.Client) -> None:
    for route, field in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
        answer = http.post(f"/{route}", json={"model": "other", **field})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "; use /v1/chat/completions"),
        ("/models", "; use /v1/models"),
        ("/nothing", "there is no route '/nothing'"),
    ],
)
def test_a_path_without_v1_names_the_right_one(http: httpx.Client, path: str, hint: str) -> None:
    answer = http.post(path, json={}) if "completions" in path else http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(hint)


def test_a_prompt_is_checked_once(server: LocalServer, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).status_code == 200
    assert server.client.last is not None
    assert server.client.last.checked == server.client.limits()


def test_no_other_origin_is_allowed_by_default(http: httpx.Client) -> None:
    answer = http.get("/version", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_the_options_origins_are_allowed_and_can_change(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set_options(monkeypatch, cors_origins="https://a.example, https://b.example")
    preflight = {"origin": "https://b.example", "access-control-request-method": "POST"}
    answer = http.options("/v1/chat/completions", headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://b.example")
    denied = http.options("/v1/chat/completions", headers={**preflight, "origin": "https://c.example"})
    assert denied.status_code == 400
    server.set_options(monkeypatch, cors_origins="*")
    answer = http.get("/version", headers={"origin": "https://c.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
    exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert {"x-request-id", "x-quire-instance", "retry-after"} < exposed
    assert {f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")} < exposed


def test_a_page_of_another_origin_makes_the_server_do_nothing_unasked(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    simple = {"content-type": "text/plain", "origin": "https://a.example"}

    def ask(headers: dict[str, str]) -> int:
        return http.post("/v1/completions", content=body, headers=headers).status_code

    assert ask(simple) == 200  # of no browser
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert ask({**simple, "sec-fetch-site": site}) == status
    # Whoever answered the preflight, perhaps a gateway, has allowed these:
    for asked in ({"content-type": "application/json"}, {"authorization": "Bearer a"}, {"x-api-key": "a"}):
        assert ask({**simple, "sec-fetch-site": "cross-site", **asked}) == 200
    server.set_options(monkeypatch, cors_origins="https://a.example")
    assert ask({**simple, "sec-fetch-site": "cross-site"}) == 200
    assert ask({**simple, "sec-fetch-site": "cross-site", "origin": "https://b.example"}) == 403


def test_the_api_starts_before_there_is_a_service() -> None:
    def no_service() -> OpenAIService:
        raise AssertionError("Serve starts the API first and sets the service afterwards")

    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "lifespan.shutdown" if sent else "lifespan.startup"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(make_api(no_service)({"type": "lifespan"}, receive, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
