"""Several models at one ingress: each request gets the one that it names, as far as its key allows."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import LocalServer
from prometheus_client.parser import text_string_to_metric_families

from app.api.api_server import ApiServer
from app.api.authentication import Gate
from app.api.errors import CANNOT_START_S, fault_of, too_many_live
from app.api.keys import KeyFile, digest_of
from app.api.openai_service import OpenAIService
from app.api.routes import make_api
from app.fleet.cache_reset import CacheReset
from app.fleet.generation import CannotStartError, UnavailableError
from app.option_groups import IngressOptions

NAMES = ("small", "Other/Large", "sleeper")
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
REPLIES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Answer:
    """What came back."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.text = response.text
        self.body = json.loads(response.text) if response.text.startswith("{") else {}


@pytest.fixture
def api(server: LocalServer) -> ApiServer:
    """Two models with the same engine, and a third one that is not loaded."""
    made = ApiServer(NAMES, IngressOptions(admin_routes=True), several=True)
    for name in NAMES[:2]:
        options = made.options.model_copy(update={"tool_parser": "mistral"} if name == "small" else {})
        made.add(
            OpenAIService(
                server.client,
                server.tokenizer,
                name,
                options,
                made.live,
                made.bodies.threads.run,
                engine_wait_s=60.0,
            )
        )
    return made


@pytest.fixture
def keys(api: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    entries = {
        "large": "[Other/Large], admin: true",
        "both": "[Other/Large, small], admin: true",
        "none": "[gone], admin: true",
        "plain": "[Other/Large]",
        "nothing": "[gone]",
    }
    lines = [
        f"  - {{id: {name}, sha256: {digest_of(name)}, models: {rest}}}\n" for name, rest in entries.items()
    ]
    path.write_text("keys:\n" + "".join(lines))
    api.gate = Gate(KeyFile(str(path), {}))


def ask(api: ApiServer, method: str, path: str, body: Any = None, key: str = "") -> Answer:
    async def send() -> Answer:
        transport = httpx.ASGITransport(app=make_api(lambda: api))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as http:
            headers = {"x-api-key": key} if key else {}
            return Answer(await http.request(method, path, json=body, headers=headers))

    return asyncio.run(send())


def test_a_key_beyond_its_rate_is_counted_at_a_model_that_it_may_use(api: ApiServer, tmp_path: Path) -> None:
    """Its body has not been read, so the model that it names is not known."""
    path = tmp_path / "keys.yaml"
    rules = f"{{id: k, sha256: {digest_of('k')}, models: [Other/Large], requests_per_minute: 1}}"
    path.write_text(f"keys:\n  - {rules}\n")
    api.gate = Gate(KeyFile(str(path), {}))
    body = {"model": "Other/Large", "prompt": [5, 6], "max_tokens": 1}
    assert [ask(api, "POST", "/v1/completions", body, "k").status for _ in range(3)] == [200, 429, 429]
    refused = {each.model: each.figures.refused["rate_limit_exceeded"] for each in api.services}
    assert refused == {"small": 0, "Other/Large": 2}


@pytest.mark.parametrize("path", ASKED)
def test_every_route_chooses_by_model(api: ApiServer, path: str) -> None:
    for model in NAMES[:2]:
        answer = ask(api, "POST", path, {"model": model, **ASKED[path]})
        assert answer.status == 200, answer.text
        if path in REPLIES:
            assert answer.body["model"] == model
    answer = ask(api, "POST", path, {"model": "neither", **ASKED[path]})
    assert answer.status == 404
    assert "this server has 'small', 'Other/Large', 'sleeper'" in answer.body["error"]["message"]
    assert answer.body.get("type") == ("error" if path.startswith("/v1/messages") else None)
    answer = ask(api, "POST", path, {"model": "sleeper", **ASKED[path]})
    assert answer.status == 503
    assert "'sleeper' cannot be served now" in answer.body["error"]["message"]


def test_requests_are_counted_for_their_model(api: ApiServer) -> None:
    small, large = api.services
    ask(api, "POST", "/v1/completions", {"model": "small", **ASKED["/v1/completions"]})
    ask(api, "POST", "/v1/completions", ASKED["/v1/completions"])
    ask(api, "POST", "/v1/completions", {"model": "Other/Large", **ASKED["/v1/completions"]})
    assert small.figures.ended["completions", "ok"] == 2  # the first is for requests that name none
    assert large.figures.ended["completions", "ok"] == 1
    found = {
        sample.labels["model_name"]: sample.value
        for family in text_string_to_metric_families(ask(api, "GET", "/metrics").text)
        for sample in family.samples
        if sample.name == "quire_ended_requests_total"
    }
    assert found == {"small": 2, "Other/Large": 1}


def test_refusals_are_counted_for_their_model(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise too_many_live(1, 1, 1)

    monkeypatch.setattr(api.live, "admit", refuse)
    assert ask(api, "POST", "/tokenize", {"model": "Other/Large", "prompt": "Hi"}).status == 503
    assert [service.figures.refused["unavailable"] for service in api.services] == [0, 1]


def test_models_are_listed_and_found(api: ApiServer) -> None:
    listed = ask(api, "GET", "/v1/models").body["data"]
    assert [model["id"] for model in listed] == ["small", "Other/Large"]
    assert ask(api, "GET", "/v1/models/Other/Large").body == listed[1]
    assert ask(api, "GET", "/v1/models/neither").status == 404


@pytest.mark.usefixtures("keys")
def test_a_key_sees_its_models_only(api: ApiServer) -> None:
    body = ASKED["/v1/completions"]
    listed = ask(api, "GET", "/v1/models", key="large").body["data"]
    assert [model["id"] for model in listed] == ["Other/Large"]
    answer = ask(api, "POST", "/v1/completions", body, "large")
    assert (answer.status, answer.body["model"]) == (200, "Other/Large")
    assert (
        ask(api, "POST", "/v1/completions", body, "both").body["model"] == "small"
    )  # as the server lists them
    answer = ask(api, "POST", "/v1/completions", {**body, "model": "small"}, "large")
    assert (answer.status, answer.body["error"]["code"]) == (403, "model_not_allowed")
    answer = ask(api, "POST", "/v1/completions", {**body, "model": "neither"}, "large")
    assert answer.status == 404
    assert (
        answer.body["error"]["message"] == "the model 'neither' does not exist; this server has 'Other/Large'"
    )
    for named in ({}, {"model": "small"}, {"model": "neither"}):
        assert ask(api, "POST", "/v1/completions", {**body, **named}, "none").status == 403


@pytest.mark.usefixtures("keys")
def test_a_key_learns_of_the_load_of_its_models_only(api: ApiServer) -> None:
    health = {key: ask(api, "GET", "/health", key=key) for key in ("plain", "nothing", "large")}
    assert (health["plain"].body["status"], list(health["plain"].body["models"])) == ("ok", ["Other/Large"])
    assert health["plain"].body["replicas"] == 1
    assert list(health["large"].body["models"]) == list(NAMES)
    assert health["nothing"].body == ask(api, "GET", "/health").body  # as without a key

    def named(key: str) -> set[str]:
        return set(re.findall(r'model_name="([^"]+)"', ask(api, "GET", "/metrics", key=key).text))

    assert [named(key) for key in ("plain", "nothing", "large")] == [
        {"Other/Large"},
        set(),
        {"small", "Other/Large"},
    ]


def test_health_says_which_models_work(
    api: ApiServer, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ask(api, "GET", "/health")
    assert (answer.status, answer.body["status"], answer.body["routable"]) == (200, "degraded", 2)
    assert {name: model["status"] for name, model in answer.body["models"].items()} == {
        "small": "ok",
        "Other/Large": "ok",
        "sleeper": "unavailable",
    }
    brief = json.loads(bytes(api.health(brief=True).body))
    assert brief["models"] == [
        {"status": "ok", "routable": 1},
        {"status": "ok", "routable": 1},
        {"status": "unavailable"},
    ]
    assert brief.keys() == {"status", "instance", "routable", "asleep", "models"}
    api._names = NAMES[:2]
    assert ask(api, "GET", "/health").body["status"] == "ok"
    monkeypatch.setattr(server.client, "status", lambda: {"routable": 0, "asleep": True})
    assert ask(api, "GET", "/health").body["status"] == "asleep"
    monkeypatch.setattr(server.client, "status", lambda: {"routable": 0})
    answer = ask(api, "GET", "/health")
    assert (answer.status, answer.body["status"], ask(api, "GET", "/ping").status) == (503, "unavailable", 503)


def test_health_says_what_its_node_lacks_and_stays_well(api: ApiServer) -> None:
    assert "lack" not in ask(api, "GET", "/health").body
    api._lack = lambda: "no room"
    answer = ask(api, "GET", "/health")
    assert (answer.status, answer.body["lack"]) == (200, "no room")
    assert "lack" not in json.loads(bytes(api.health(brief=True).body)), "nothing of that without a key"


def test_caches_are_emptied_by_model_or_all(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answering(name: str) -> Any:
        async def reset() -> CacheReset:
            asked.append(name)
            if name == "small":
                raise UnavailableError("no engine replica")
            return CacheReset({"a": 3}, {})

        return reset

    for service in api.services:
        monkeypatch.setattr(service, "reset_prefix_cache", answering(service.model))
    path = "/admin/reset_prefix_cache"
    assert ask(api, "POST", f"{path}?model=Other/Large").body == {"replicas": 1, "freed_blocks": 3}
    assert asked == ["Other/Large"]
    assert ask(api, "POST", f"{path}?model=small").status == 503
    assert ask(api, "POST", f"{path}?model=neither").status == 404
    asked.clear()
    assert ask(api, "POST", path).body == {"replicas": 1, "freed_blocks": 3}
    assert sorted(asked) == ["Other/Large", "small"]


def test_each_model_has_its_own_parser(api: ApiServer) -> None:
    small, large = (service._family() for service in api.services)
    assert type(small) is type(large)
    assert small.markers != large.markers


def test_a_model_that_cannot_start_tells_clients_when_to_ask_again_and_no_path() -> None:
    fault = fault_of(CannotStartError("ConfigError: /home/ann/model has no config.json"))
    assert (fault.status, fault.retry_after_s, fault.retriable) == (503, CANNOT_START_S, False)
    assert "ann" not in fault.message
