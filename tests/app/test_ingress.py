from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from local_server import CONTEXT, COUNT, MODEL, LocalServer, is_idle, wait_until

from app.api.prompt_tokenizer import INLINE_CHARS, MAX_THREADS
from app.fleet.fleet_limits import FleetLimits
from app.ingress import IngressReplica

CAPITAL = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def sdk(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event; every one must be JSON but the last, which is [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_health_and_models(http: httpx.Client) -> None:
    health = http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["instance"] == "here"
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert http.get(f"/v1/models/{MODEL}").json() == model


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("POST", "/v1/completions", COUNT, 200),
        ("POST", "/v1/completions", {**COUNT, "stream": True}, 200),
        ("POST", "/v1/completions", {}, 400),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
    ],
)
def test_every_answer_names_its_server(
    http: httpx.Client, method: str, path: str, body: Any, status: int
) -> None:
    response = http.request(method, path, json=body)
    assert response.status_code == status
    assert response.headers.get_list("x-quire-instance") == ["here"]


def test_an_internal_error_names_its_server(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.api, "models", lambda: 1 / 0)
    # On a connection of its own, because the server closes it after such an error.
    response = httpx.get(f"{server.url}/v1/models", timeout=60)
    assert (response.status_code, response.headers["x-quire-instance"]) == (500, "here")


def test_chat_answers_and_stops_by_itself(http: httpx.Client) -> None:
    body = http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": CAPITAL, "temperature": 0}
    ).json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["id"].startswith("chatcmpl-")
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (27, 8, 35)


def test_chat_stream_has_openais_shape(http: httpx.Client) -> None:
    request = {"messages": CAPITAL, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    first, *middle, last = events_of(http.post("/v1/chat/completions", json=request))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in middle) == ANSWER
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in [first, *middle]]
    assert reasons == [None] * len(middle) + ["stop"]
    assert all(chunk["usage"] is None for chunk in [first, *middle])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in [first, *middle, last]}) == 1


def test_without_include_usage_there_is_none(http: httpx.Client) -> None:
    chunks = events_of(http.post("/v1/completions", json={**COUNT, "stream": True}))
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_continuous_usage_counts_every_token(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(http.post("/v1/completions", json={**COUNT, "stream": True, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, 9), 8]


def test_streamed_and_whole_text_are_equal_for_every_form_of_prompt(
    server: LocalServer, http: httpx.Client
) -> None:
    backend = server.tokenizer.decoder._backend
    ids = backend.encode(COUNT["prompt"]).ids
    other = backend.encode("The sky is").ids
    whole = http.post("/v1/completions", json=COUNT).json()["choices"][0]["text"]
    assert whole
    for prompt, count in ((ids, 1), ([ids, other, ids], 3), (["The sky is", COUNT["prompt"]], 2)):
        body = http.post("/v1/completions", json={**COUNT, "prompt": prompt}).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(count))
        assert body["choices"][0 if count != 2 else 1]["text"] == whole
        assert body["usage"]["completion_tokens"] == 8 * count
        streamed = [""] * count
        for chunk in events_of(http.post("/v1/completions", json={**COUNT, "prompt": prompt, "stream": True})):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == [choice["text"] for choice in body["choices"]]


def test_cached_tokens_are_exact_and_kept_apart_by_salt(http: httpx.Client) -> None:
    prompt = list(range(1000, 1040))  # two full blocks of 16 and 8 more

    def cached(salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("one"), cached("two"), cached("two")] == [0, 32, 0, 32]


def test_a_seed_repeats_and_another_differs(http: httpx.Client) -> None:
    def text(seed: int) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "seed": seed}
        return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_frees_the_engine(
    server: LocalServer, http: httpx.Client, stream: bool
) -> None:
    wait_until(lambda: is_idle(server))
    aborted = len(server.client.aborted)
    body = {"messages": CAPITAL, "temperature": 0, "stop": ["zzz", "France is P"], "stream": stream}
    response = http.post("/v1/chat/completions", json=body)
    if stream:
        chunks = events_of(response)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        text = response.json()["choices"][0]["message"]["content"]
        reason = response.json()["choices"][0]["finish_reason"]
        assert response.json()["usage"]["completion_tokens"] == 6
    assert (text, reason) == ("The capital of ", "stop")
    wait_until(lambda: is_idle(server))
    assert len(server.client.aborted) == aborted + 1


def test_stop_token_ids_are_not_shown(server: LocalServer, http: httpx.Client) -> None:
    (paris,) = server.tokenizer.decoder._backend.encode(" Paris").ids
    body = {"messages": CAPITAL, "temperature": 0, "stop_token_ids": [paris]}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital of France is", "stop")


def test_ignore_eos_and_min_tokens_go_on(http: httpx.Client) -> None:
    for option in ({"ignore_eos": True}, {"min_tokens": 20}):
        body = {"messages": CAPITAL, "temperature": 0, "max_tokens": 20, **option}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 20
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_frees_the_engine(server: LocalServer, http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
    host, port = server.url.removeprefix("http://").split(":")
    wait_until(lambda: is_idle(server))
    aborted = len(server.client.aborted)
    with server.slow_steps(), http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        chunks = response.iter_bytes()  # kept: without it the connection closes
        next(chunks)
        assert not is_idle(server)
    wait_until(lambda: is_idle(server))
    with server.slow_steps(), socket.create_connection((host, int(port))) as other:
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(content)
        other.sendall(head + content)
        wait_until(lambda: not is_idle(server))
    wait_until(lambda: is_idle(server))
    assert len(server.client.aborted) == aborted + 2


def test_more_requests_than_allowed_are_put_off(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: server.service.num_live == 0)
    monkeypatch.setattr(server.service.admission.live, "count", 1)
    server.set_options(monkeypatch, max_live_choices=1)
    response = http.post("/v1/completions", json=COUNT)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "max_live_choices" in response.json()["error"]["message"]


def test_requests_that_wait_for_the_tokenizer_count_as_live(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: server.service.num_live == 0)
    server.set_options(monkeypatch, max_live_choices=2)
    free = threading.Event()
    for _ in range(MAX_THREADS):
        server.tokenizer._threads.submit("", free.wait)
    long = {**COUNT, "prompt": "word " * (INLINE_CHARS // 5 + 1), "max_tokens": 1}
    try:
        with ThreadPoolExecutor(2) as clients:
            waiting = [clients.submit(http.post, "/v1/completions", json=long) for _ in range(2)]
            wait_until(lambda: server.service.num_live == 2)
            refused = http.post("/v1/completions", json=COUNT)
            free.set()
            assert refused.status_code == 503
            assert [response.result().status_code for response in waiting] == [400, 400]  # longer than the pool
    finally:
        free.set()
    wait_until(lambda: server.service.num_live == 0)
    assert http.post("/v1/completions", json=COUNT).status_code == 200


def test_every_end_of_a_response_gives_its_slots_back(server: LocalServer, http: httpx.Client) -> None:
    stream = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}
    http.post("/v1/completions", json={**COUNT, "prompt": ["a", "b"]})
    http.post("/v1/completions", json={**COUNT, "stream": True})
    http.post("/v1/completions", json={**COUNT, "prompt": [10**9]})
    http.post("/v1/chat/completions", json={"messages": CAPITAL, "max_tokens": CONTEXT})
    wait_until(lambda: server.service.num_live == 0)
    with server.slow_steps(), http.stream("POST", "/v1/completions", json=stream) as response:
        chunks = response.iter_bytes()  # kept: without it the connection closes
        next(chunks)
        assert server.service.num_live == 1
    wait_until(lambda: server.service.num_live == 0)


# Collecting the object calls __del__ once more, outside Serve with nobody to await it.
@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")
def test_an_ingress_that_could_not_start_can_be_deleted() -> None:
    asyncio.run(IngressReplica.__new__(IngressReplica).__del__())


def test_before_any_engine_has_answered_requests_wait_and_then_get_a_503(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.client, "limits", lambda: None)
    monkeypatch.setattr(server.service, "engine_wait_s", 0.1)
    assert http.get("/health").status_code == 503
    response = http.post("/v1/completions", json=COUNT)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    error = response.json()["error"]
    assert error["code"] == "unavailable"
    assert error["message"] == (
        f"no engine replica of the model {MODEL!r} became ready within 0.1 s; "
        "engines are still loading, or cannot start (the operator sees why with `serve status`)"
    )


def test_engines_that_sleep_are_healthy_and_woken_by_a_request(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = server.client.limits()
    held: list[str] = []

    async def first_limits(timeout_s: float) -> FleetLimits | None:
        held.append("woken")
        return limits

    monkeypatch.setattr(server.client, "first_limits", first_limits)
    monkeypatch.setattr(server.client, "limits", lambda: None)
    monkeypatch.setattr(server.client, "status", lambda: {"routable": 0, "asleep": True})
    health = http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "asleep")
    assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert held == []
    assert http.post("/v1/completions", json=COUNT).status_code == 200
    assert held == ["woken"]


# --- the openai client -------------------------------------------------------------------------------------


def test_openai_client(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == ANSWER
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    stream = sdk.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage is not None
    text = sdk.completions.create(model=MODEL, prompt=["one, two,", "a, b,"], max_tokens=4, temperature=0)
    assert [choice.index for choice in text.choices] == [0, 1]
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL


def test_openai_client_understands_the_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt-5", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=9)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"
