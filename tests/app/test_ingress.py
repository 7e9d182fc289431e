from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from local_server import LocalServer, serve_locally

from app.request_body import MAX_BODY_BYTES
from engine.config import EngineConfig

MODEL = "smollm2-135m-instruct"
CONTEXT = 512
POOL = 24 * 16
CAPITAL = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
ANSWER = "The capital of France is Paris."
COUNT = {"prompt": "one, two, three, four,", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(bundled_model: Path) -> Iterator[LocalServer]:
    folder = bundled_model
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        num_blocks=24,
        max_model_len=CONTEXT,
        token_budget=256,
        num_threads=1,
    )
    with serve_locally(folder, config, MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


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


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def is_idle(server: LocalServer) -> bool:
    stats = server.client.engine.stats().scheduler
    return (
        server.client.engine.num_live == 0
        and server.client.status()["live_requests"] == 0
        and stats.referenced_blocks == 0
        and stats.running + stats.waiting == 0
    )


# --- what is right -----------------------------------------------------------------------------------------


def test_health_and_models(http: httpx.Client) -> None:
    health = http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert http.get(f"/v1/models/{MODEL}").json() == model


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
    assert len(server.client.aborted) == aborted + 1
    wait_until(lambda: is_idle(server))


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
    aborted = len(server.client.aborted)
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        next(response.iter_bytes())
        assert not is_idle(server)
    wait_until(lambda: is_idle(server))
    with httpx.Client(base_url=server.url) as other, pytest.raises(httpx.ReadTimeout):
        other.post("/v1/completions", json=body, timeout=0.3)
    wait_until(lambda: is_idle(server))
    assert len(server.client.aborted) == aborted + 2


def test_more_requests_than_allowed_are_put_off(server: LocalServer, http: httpx.Client) -> None:
    server.service.max_live_requests = 0
    try:
        response = http.post("/v1/completions", json=COUNT)
    finally:
        server.service.max_live_requests = 4096
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "max_live_requests" in response.json()["error"]["message"]


def test_before_any_engine_has_answered_requests_wait_and_then_get_a_503(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.client, "limits", lambda: None)
    monkeypatch.setattr(server.service, "unavailable_after_s", 0.1)
    assert http.get("/health").status_code == 503
    response = http.post("/v1/completions", json=COUNT)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert response.json()["error"]["code"] == "unavailable"


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


# --- bad input ---------------------------------------------------------------------------------------------

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BAD: list[tuple[str, dict[str, Any], int, str | None, str | None, list[str]]] = [
    (COMPLETIONS, {}, 400, "prompt", "empty_prompt", []),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty_prompt", []),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty_prompt", []),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt", "empty_prompt", ["prompt[0]"]),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt", "empty_prompt", ["prompt[1]"]),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt", "invalid_value", ["5", "string"]),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt", "invalid_value", ["object"]),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "invalid_value", ["prompt[1]", "'a'"]),
    (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt", "invalid_value", ["1.5"]),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt", "invalid_value", ["true"]),
    (COMPLETIONS, {"prompt": ["a"] * 257}, 400, "prompt", "invalid_value", ["257", "256"]),
    (COMPLETIONS, {"prompt": [49152]}, 400, "prompt", "invalid_value", ["49152", "49151"]),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "invalid_value", ["-1"]),
    (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt", "invalid_value", ["49151"]),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt", "invalid_value", ["surrogate"]),
    (COMPLETIONS, {"prompt": [7] * 513}, 400, "prompt", "context_length_exceeded", ["513", "512"]),
    (COMPLETIONS, {"prompt": "a " * 100_000}, 400, "prompt", "context_length_exceeded", ["512"]),
    (
        COMPLETIONS,
        {"prompt": [7] * 100, "max_tokens": 413},
        400,
        "max_tokens",
        "context_length_exceeded",
        ["100", "413", "512"],
    ),
    (
        COMPLETIONS,
        {"prompt": [7] * 100, "max_tokens": 400},
        400,
        "prompt",
        "kv_pool_exceeded",
        ["400", str(POOL)],
    ),
    (CHAT, {"messages": CAPITAL, "max_tokens": 10**30}, 400, "max_tokens", "context_length_exceeded", ["512"]),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a " * 2000}]},
        400,
        "messages",
        "context_length_exceeded",
        [],
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a " * 450}]},
        400,
        "messages",
        "kv_pool_exceeded",
        [str(POOL)],
    ),
    (CHAT, {"messages": CAPITAL, "min_tokens": 5000}, 400, "min_tokens", "context_length_exceeded", ["5000"]),
    (CHAT, {}, 400, "messages", "invalid_value", ["list"]),
    (CHAT, {"messages": []}, 400, "messages", "invalid_value", ["list"]),
    (
        CHAT,
        {"messages": [{"role": "robot", "content": "a"}]},
        400,
        "messages[0].role",
        "invalid_value",
        ["'robot'"],
    ),
    (COMPLETIONS, {"prompt": "a", "model": "gpt-5"}, 404, "model", "model_not_found", ["'gpt-5'", MODEL]),
    (CHAT, {"messages": CAPITAL, "model": "gpt-5"}, 404, "model", "model_not_found", ["'gpt-5'"]),
    (COMPLETIONS, {"prompt": "a", "model": 5}, 400, "model", "invalid_value", ["5", "string"]),
    *(
        (COMPLETIONS, {"prompt": "a", name: value}, 400, name, "invalid_value", [name, limit])
        for name, value, limit in [
            ("max_tokens", 0, "1"),
            ("max_tokens", -5, "1"),
            ("max_tokens", 1.5, "integer"),
            ("max_tokens", "5", "integer"),
            ("max_tokens", True, "integer"),
            ("max_completion_tokens", 0, "1"),
            ("min_tokens", -1, "0"),
            ("min_tokens", 17, "16"),
            ("temperature", -0.1, "0"),
            ("temperature", 2.1, "2"),
            ("temperature", "hot", "number"),
            ("temperature", True, "number"),
            ("temperature", 10**400, "large"),
            ("top_p", 0, "0"),
            ("top_p", 1.1, "1"),
            ("top_p", [], "number"),
            ("min_p", -1, "0"),
            ("min_p", 2, "1"),
            ("top_k", -1, "0"),
            ("top_k", 1.0, "integer"),
            ("seed", 2**63, "between"),
            ("seed", "a", "integer"),
            ("stop", 5, "string"),
            ("stop", [5], "string"),
            ("stop", "", "1 to"),
            ("stop", ["a"] * 17, "16"),
            ("stop", ["x" * 257], "256"),
            ("stop_token_ids", [49152], "49151"),
            ("stop_token_ids", [-1], "0"),
            ("stop_token_ids", 5, "list"),
            ("stop_token_ids", list(range(129)), "128"),
            ("ignore_eos", 1, "true or false"),
            ("stream", "yes", "true or false"),
            ("user", 5, "string"),
            ("cache_salt", 5, "string"),
            ("cache_salt", "x" * 257, "256"),
        ]
    ),
    *(
        (CHAT, {"messages": CAPITAL, name: value}, 400, name, "unsupported_parameter", [name, "not supported"])
        for name, value in [
            ("n", 2),
            ("best_of", 2),
            ("logprobs", True),
            ("logprobs", 0),
            ("top_logprobs", 2),
            ("logit_bias", {"5": 1}),
            ("presence_penalty", 0.5),
            ("frequency_penalty", -0.5),
            ("repetition_penalty", 1.1),
            ("response_format", {"type": "json_object"}),
            ("tools", [{"type": "function"}]),
            ("tool_choice", "required"),
            ("suffix", "b"),
            ("echo", True),
        ]
    ),
    (CHAT, {"messages": CAPITAL, "temprature": 0.5}, 400, "temprature", "unknown_parameter", ["'temprature'"]),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": False, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
        "invalid_value",
        ["stream"],
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
        400,
        "stream_options",
        "unknown_parameter",
        ["'usage'"],
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        400,
        "stream_options.include_usage",
        "invalid_value",
        ["true or false"],
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "param", "code", "words"), BAD)
def test_bad_input_gets_an_openai_shaped_error(
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
    code: str | None,
    words: list[str],
    stream: bool,
) -> None:
    response = http.post(path, content=json.dumps({"stream": stream, **body}))
    check_error(response, status, param, code, words)


def check_error(
    response: httpx.Response, status: int, param: str | None, code: str | None, words: list[str]
) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    for word in words:
        assert word in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"prompt"', b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 100_000],
)
def test_malformed_bodies(http: httpx.Client, content: bytes) -> None:
    check_error(http.post(COMPLETIONS, content=content), 400, None, "invalid_json", ["body"])


def test_a_body_that_is_too_large_is_refused_with_and_without_its_length(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, content=b" " * (MAX_BODY_BYTES + 1))
    check_error(response, 413, None, "request_too_large", [str(MAX_BODY_BYTES)])
    pieces = (b" " * 2**20 for _ in range(9))
    check_error(http.post(COMPLETIONS, content=pieces), 413, None, "request_too_large", [])


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v2/nothing", 404, ["/v2/nothing"]),
        ("GET", COMPLETIONS, 405, ["GET"]),
        ("DELETE", "/health", 405, ["DELETE"]),
        ("POST", "/v1/models", 405, ["POST"]),
    ],
)
def test_wrong_routes_and_methods(
    http: httpx.Client, method: str, path: str, status: int, words: list[str]
) -> None:
    check_error(http.request(method, path), status, None, None, words)


def test_an_unknown_model_is_not_retrieved(http: httpx.Client) -> None:
    check_error(http.get("/v1/models/org/gpt-5"), 404, "model", "model_not_found", ["'org/gpt-5'"])


def test_bad_input_left_nothing_behind(server: LocalServer, http: httpx.Client) -> None:
    wait_until(lambda: is_idle(server))
    assert http.post("/v1/completions", json=COUNT).status_code == 200
