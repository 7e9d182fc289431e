"""Whatever a client sends gets an OpenAI-shaped error that names the parameter and the limit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import COUNT, MODEL, POOL, LocalServer, is_idle, serve_locally, wait_until
from tokenizers import Regex, Tokenizer, pre_tokenizers

from app.api.request_body import MAX_BODY_BYTES
from clients.neighbors import malformed
from engine.config import EngineConfig

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BOTH: list[tuple[str, dict[str, Any]]] = [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": CAPITAL})]
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
            ("top_k", -2, "-1"),
            ("top_k", 1.0, "integer"),
            ("seed", 2**63, "between"),
            ("seed", "a", "integer"),
            ("seed", 10**4000, "bits"),
            ("stop", 5, "string"),
            ("stop", [5], "string"),
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
            ("n", 0, "1"),
            ("n", 65, "64"),
            ("n", True, "integer"),
            ("n", "2", "integer"),
            ("best_of", 0, "1"),
            ("best_of", 65, "64"),
            ("use_beam_search", 1, "true or false"),
            ("beam_width", 0, "1"),
            ("beam_width", 4, "use_beam_search"),
            ("length_penalty", 0.5, "use_beam_search"),
            ("length_penalty", "long", "number"),
            ("early_stopping", True, "use_beam_search"),
            ("early_stopping", "soon", "never"),
            ("early_stopping", 1, "never"),
            ("presence_penalty", 2.5, "2"),
            ("repetition_penalty", 1e-300, "0.01"),
            ("logit_bias", {"49152": 1}, "49151"),
            ("logit_bias", {"5": 101}, "100"),
            ("allowed_token_ids", [49152], "49151"),
            ("prompt_logprobs", 21, "20"),
            ("priority", 1001, "between -1000"),
            ("priority", -1001, "1000"),
            ("priority", 10**30, "1000"),
            ("priority", 1.0, "integer"),
            ("priority", True, "integer"),
            ("priority", "high", "integer"),
        ]
    ),
    *(
        (path, {**prompt, **asked}, 400, param, "invalid_value", words)
        for path, prompt in BOTH
        for asked, param, words in [
            ({"n": 3, "best_of": 2}, "best_of", ["2", "between 3 and 64"]),
            (
                {"n": 1, "best_of": 2, "stream": True},
                "best_of",
                ["best_of is 2", "known only at the end", "stream"],
            ),
            ({"use_beam_search": True, "stream": True}, "use_beam_search", ["known only at the end", "stream"]),
            ({"use_beam_search": True, "stop": "x", "stream": False}, "stop", ["use_beam_search"]),
            ({"use_beam_search": True, "temperature": 0.5, "stream": False}, "temperature", ["0.5", "0 or 1"]),
            ({"use_beam_search": True, "top_p": 0.5, "stream": False}, "top_p", ["0.5", "beam"]),
            ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width", ["2", "between 3 and 64"]),
            ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", ["11", "10"]),
        ]
    ),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 3}, 400, "n", "invalid_value", ["100", "3", "300", "256"]),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 100, "best_of": 3, "stream": False},
        400,
        "best_of",
        "invalid_value",
        ["100", "3", "300", "256"],
    ),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 65, "use_beam_search": True, "beam_width": 4, "stream": False},
        400,
        "beam_width",
        "invalid_value",
        ["65", "4", "260", "256"],
    ),
    (
        COMPLETIONS,
        {"prompt": [7] * 100, "max_tokens": 100, "use_beam_search": True, "beam_width": 20, "stream": False},
        400,
        "beam_width",
        "kv_pool_exceeded",
        ["20 beams", "24"],
    ),
    *(
        (CHAT, {"messages": CAPITAL, name: value}, 400, name, "unsupported_parameter", [name, "not supported"])
        for name, value in [
            ("functions", [{"name": "f"}]),
            ("suffix", "b"),
            ("echo", True),
        ]
    ),
    (
        CHAT,
        {"messages": CAPITAL, "response_format": {"type": "xml"}},
        400,
        "response_format",
        "invalid_value",
        ["'xml'", "json_schema"],
    ),
    (COMPLETIONS, {"prompt": "a", "tools": [{}]}, 400, "tools", "unsupported_parameter", ["a list of 1"]),
    (
        CHAT,
        {"messages": CAPITAL, "tools": [{}]},
        400,
        "tools",
        "unsupported_parameter",
        ["tools[0].type", "null"],
    ),
    (CHAT, {"messages": CAPITAL, "tool_choice": "required"}, 400, "tool_choice", "invalid_value", ["no tools"]),
    *(
        (CHAT, {"messages": CAPITAL, name: 10**4000}, 400, name, "context_length_exceeded", ["bits"])
        for name in ("max_tokens", "min_tokens")
    ),
    (CHAT, {"messages": CAPITAL * 600}, 400, "messages", "context_length_exceeded", ["600", "512"]),
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


def test_random_bodies_are_answered(http: httpx.Client) -> None:
    draw = random.Random(0)
    for route, body in [malformed(draw) for _ in range(150)]:
        status = http.post(route, content=body, headers={"content-type": "application/json"}).status_code
        assert 200 <= status < 500, (route, body[:500])


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


def test_a_text_that_the_tokenizers_library_fails_on_gets_an_error_of_its_own(
    small_model: Path, tmp_path: Path
) -> None:
    """Its panic is no ``Exception``."""
    folder = shutil.copytree(small_model, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = EngineConfig(model=str(folder), dtype="float32", max_model_len=512, num_blocks=64, num_threads=1)
    with (
        serve_locally(folder, config, MODEL) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        text = "a" * 40 + "b"
        for path, body in (
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": text}),
            (COMPLETIONS, {"prompt": "b", "bad_words": [text]}),
        ):
            refused = client.post(path, json={"model": MODEL, **body})
            assert refused.status_code == 400
            assert "the model's tokenizer fails on the text: 'Onig" in refused.json()["error"]["message"]
        answered = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "b", "max_tokens": 2})
        assert answered.json()["usage"]["completion_tokens"] == 2
