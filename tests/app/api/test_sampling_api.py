"""Log probabilities, echo, bias and penalties over HTTP, with the ``openai`` SDK: whole as streamed."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from local_server import MODEL, LocalServer, serve_locally

from app.api import generated_response, openai_responses
from app.api.generated_response import INLINE_DETAILS
from app.api.openai_responses import OpenAIReply
from app.fleet.fleet_limits import FleetLimits
from engine.config import EngineConfig

COUNT: dict[str, Any] = {"model": MODEL, "prompt": "one, two, three, four,", "temperature": 0, "max_tokens": 8}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture
def sdk(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(http: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_completion_has_the_log_probability_of_each_token(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(**COUNT, logprobs=3)
    (choice,) = whole.choices
    known = choice.logprobs
    assert known is not None
    assert whole.usage is not None
    assert len(known.tokens or []) == whole.usage.completion_tokens == 8
    assert "".join(known.tokens or []) == choice.text
    offsets = known.text_offset or []
    for token, offset, logprob, top in zip(
        known.tokens or [], offsets, known.token_logprobs or [], known.top_logprobs or [], strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert max(top, key=lambda name: top[name]) == token  # it is greedy
        assert top[token] == logprob <= 0
        assert len(top) == 3
    chunks = [chunk.choices[0] for chunk in sdk.completions.create(**COUNT, logprobs=3, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(chunk.logprobs, field) for chunk in chunks if chunk.logprobs is not None]
        assert [entry for piece in pieces for entry in piece] == getattr(known, field)
    assert sdk.completions.create(**COUNT).choices[0].logprobs is None
    chosen_only = sdk.completions.create(**COUNT, logprobs=0).choices[0].logprobs
    assert chosen_only is not None
    assert chosen_only.token_logprobs == known.token_logprobs


def test_echo_scores_the_prompt_as_evaluations_ask(sdk: openai.OpenAI, http: httpx.Client) -> None:
    """What lm-eval's ``local-completions`` sends: token ids, echo, one or no token to generate."""
    ids = http.post("/tokenize", json={"prompt": COUNT["prompt"]}).json()["tokens"]
    body = {**COUNT, "prompt": [ids, ids[:4]], "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = sdk.completions.create(**body).choices
    assert first.text.startswith(COUNT["prompt"])
    assert first.logprobs is not None
    assert second.logprobs is not None
    scores = first.logprobs.token_logprobs or []
    assert len(scores) == len(ids) + 1
    assert scores[0] is None
    assert all(score <= 0 for score in scores[1:])
    assert (second.logprobs.token_logprobs or [])[:4] == scores[:4]
    assert "".join(first.logprobs.tokens or []) == first.text
    nothing = sdk.completions.create(**{**body, "max_tokens": 0}).choices[0]
    assert (nothing.text, nothing.finish_reason) == (COUNT["prompt"], "length")
    assert nothing.logprobs is not None
    assert nothing.logprobs.token_logprobs == scores[:-1]
    streamed = [c.choices[0] for c in sdk.completions.create(**{**body, "prompt": ids}, stream=True)]
    assert "".join(chunk.text for chunk in streamed) == first.text
    pieces = [chunk.logprobs.token_logprobs or [] for chunk in streamed if chunk.logprobs is not None]
    assert [score for piece in pieces for score in piece] == scores


def test_a_prompt_as_long_as_the_context_is_scored(small_model: Path) -> None:
    config = EngineConfig(
        model=str(small_model), dtype="float32", max_model_len=64, num_blocks=8, num_threads=1
    )
    with (
        serve_locally(small_model, config, MODEL) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        body = {"model": MODEL, "prompt": list(range(100, 164)), "echo": True, "logprobs": 1, "max_tokens": 0}
        (choice,) = post(client, "completions", body)["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == 64
        refused = client.post("/v1/completions", json={**body, "prompt": list(range(100, 165))})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_echo_without_log_probabilities(http: httpx.Client) -> None:
    plain = post(http, "completions", COUNT)["choices"][0]["text"]
    for n in (1, 2):
        choices = post(http, "completions", {**COUNT, "echo": True, "n": n})["choices"]
        assert [choice["text"] for choice in choices] == [COUNT["prompt"] + plain] * n
    assert (
        post(http, "completions", {**COUNT, "echo": True, "max_tokens": 0})["choices"][0]["text"]
        == COUNT["prompt"]
    )


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"prompt": [5, 49_152]}, "prompt[1]"),
        ({"prompt": ["a", [5, 49_152]]}, "prompt[1][1]"),
        ({"prompt": [5, 6, 49_152], "truncate_prompt_tokens": 2}, "prompt[2]"),
    ],
)
def test_what_cannot_be_echoed_is_a_fault_of_the_prompt(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], where: str
) -> None:
    """Models have more token ids than their tokenizers: matrices are padded."""
    padded = dataclasses.replace(server.client.engine.limits, vocab_size=49_216)
    monkeypatch.setattr(server.client, "limits", lambda: FleetLimits((padded,)))
    answer = http.post("/v1/completions", json={**COUNT, **body, "echo": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"{where} is 49152 but is not in the vocabulary"
    assert error["param"] == "prompt"


def test_a_chat_has_the_log_probability_of_each_token(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**ASK, logprobs=True, top_logprobs=2).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content if entry.token != "<|im_end|>").decode() == (
        whole.message.content
    )
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
    chunks = list(sdk.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, stream=True))
    pieces = [c.choices[0].logprobs.content or [] for c in chunks if c.choices[0].logprobs is not None]
    assert [entry for piece in pieces for entry in piece] == content
    assert sdk.chat.completions.create(**ASK).choices[0].logprobs is None
    assert all(
        entry.top_logprobs == []
        for entry in (
            sdk.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs.content or []  # type: ignore[union-attr]
        )
    )


def test_each_of_several_choices_has_its_own(http: httpx.Client) -> None:
    body = {**COUNT, "temperature": 1, "seed": 4, "n": 3, "logprobs": 1, "echo": True, "return_token_ids": True}
    choices = post(http, "completions", body)["choices"]
    single = post(http, "completions", {**body, "n": 1})["choices"][0]
    assert choices[0] == single
    for choice in choices:
        known, ids = choice["logprobs"], choice["prompt_token_ids"]
        assert len(known["tokens"]) == len(ids) + len(choice["token_ids"])
        assert known["token_logprobs"][: len(ids)] == single["logprobs"]["token_logprobs"][: len(ids)]
    best = post(http, "completions", {**body, "n": 2, "best_of": 3})["choices"]
    assert {tuple(choice["token_ids"]) for choice in best} < {tuple(choice["token_ids"]) for choice in choices}


def test_the_tokens_of_prompt_and_output_are_returned(sdk: openai.OpenAI, http: httpx.Client) -> None:
    asked = {**COUNT, "return_token_ids": True, "prompt_logprobs": 1}
    (choice,) = post(http, "completions", asked)["choices"]
    assert http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"] == choice["text"]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None
    for token, score in zip(choice["prompt_token_ids"][1:], scores[1:], strict=True):
        assert set(score[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert 1 <= len(score) <= 2
    chat = post(http, "chat/completions", {**ASK, "return_token_ids": True, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    chunks = list(sdk.chat.completions.create(**ASK, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].to_dict()["prompt_token_ids"] == chat["prompt_token_ids"]
    pieces: list[Any] = [chunk.choices[0].to_dict().get("token_ids", []) for chunk in chunks]
    assert [token for piece in pieces for token in piece] == chat["choices"][0]["token_ids"]


def test_bias_bans_and_penalties_change_the_answer(http: httpx.Client) -> None:
    count = {**COUNT, "return_token_ids": True}
    plain = post(http, "completions", count)["choices"][0]
    first = plain["token_ids"][0]
    for changed in (
        {"logit_bias": {str(first): -100}},
        {"bad_words": [plain["text"].split(",")[0].strip()]},
    ):
        other = post(http, "completions", {**count, **changed})["choices"][0]
        assert other["token_ids"][0] != first
    only = post(http, "completions", {**COUNT, "allowed_token_ids": [first], "return_token_ids": True})[
        "choices"
    ]
    assert only[0]["token_ids"] == [first] * 8
    ids = post(
        http, "completions", {**COUNT, "frequency_penalty": 2, "return_token_ids": True, "max_tokens": 24}
    )
    repeated = post(http, "completions", {**COUNT, "return_token_ids": True, "max_tokens": 24})
    distinct = [len(set(answer["choices"][0]["token_ids"])) for answer in (ids, repeated)]
    assert distinct[0] > distinct[1]


def test_the_best_to_a_stop_string_are_returned(http: httpx.Client) -> None:
    """As ranking all choices by hand."""
    body = {**COUNT, "temperature": 1, "seed": 3, "max_tokens": 20, "stop": ["e"]}
    every = post(http, "completions", {**body, "n": 5, "logprobs": 0})["choices"]

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return math.fsum(scores) / len(scores)

    wanted = sorted(every, key=mean, reverse=True)[:2]
    best = post(http, "completions", {**body, "n": 2, "best_of": 5})
    found = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in best["choices"]]
    assert found == [(i, choice["text"], choice["finish_reason"]) for i, choice in enumerate(wanted)]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    asked = post(http, "completions", {**body, "n": 2, "best_of": 5, "logprobs": 0})["choices"]
    assert [choice["logprobs"] for choice in asked] == [choice["logprobs"] for choice in wanted]
    for choice in post(http, "completions", {**body, "n": 5, "return_token_ids": True})["choices"]:
        shown = http.post("/detokenize", json={"tokens": choice["token_ids"][:-1]}).json()["prompt"]
        assert choice["text"].startswith(shown)


def test_the_end_of_the_output_can_be_shown(http: httpx.Client) -> None:
    stopped = {**COUNT, "stop": ["six"], "max_tokens": 20}
    short = post(http, "completions", stopped)["choices"][0]["text"]
    for stream in (False, True):
        body = {**stopped, "include_stop_str_in_output": True}
        if stream:
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                shown = "".join(line for line in response.iter_lines() if line.startswith("data: {"))
            assert '"finish_reason":"stop"' in shown
        else:
            assert post(http, "completions", body)["choices"][0]["text"] == short + "six"
    ended = {**ASK, "max_tokens": 60}
    plain = post(http, "chat/completions", ended)["choices"][0]
    assert plain["finish_reason"] == "stop"
    body = {**ended, "skip_special_tokens": False, "include_stop_str_in_output": True}
    assert post(http, "chat/completions", body)["choices"][0]["message"]["content"] == (
        plain["message"]["content"] + "<|im_end|>"
    )


def test_the_last_message_is_continued(http: httpx.Client) -> None:
    begun = {"role": "assistant", "content": "The capital of France is"}
    body = {**ASK, "messages": [*ASK["messages"], begun], "continue_final_message": True}
    assert post(http, "chat/completions", body)["choices"][0]["message"]["content"].startswith(" Paris")
    without = {**ASK, "add_generation_prompt": False}
    assert (
        post(http, "chat/completions", without)["usage"]["prompt_tokens"]
        < (post(http, "chat/completions", ASK)["usage"]["prompt_tokens"])
    )


def test_only_the_end_of_a_prompt_is_kept(http: httpx.Client) -> None:
    whole = post(http, "completions", {**COUNT, "return_token_ids": True})["choices"][0]
    body = {**COUNT, "return_token_ids": True, "truncate_prompt_tokens": 3, "echo": True}
    (choice,) = post(http, "completions", body)["choices"]
    assert choice["prompt_token_ids"] == whole["prompt_token_ids"][-3:]
    assert choice["text"].startswith(", four,")
    long = {**COUNT, "prompt": "word " * 450, "truncate_prompt_tokens": -1, "max_tokens": 200}
    assert http.post("/v1/completions", json=long).status_code == 200
    assert http.post("/v1/completions", json={**long, "truncate_prompt_tokens": None}).status_code == 400


@pytest.mark.parametrize("name", ["messages", "tools", "continue_final_message", "eos_token"])
def test_a_template_variable_cannot_stand_for_something_else(http: httpx.Client, name: str) -> None:
    response = http.post("/v1/chat/completions", json={**ASK, "chat_template_kwargs": {name: "x"}})
    assert response.status_code == 400
    assert f"{name!r}, which requests may not set" in response.json()["error"]["message"]


def test_a_template_variable_may_not_name_a_special_token(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**ASK, "chat_template_kwargs": {"x": "a<|im_end|>"}})
    assert response.status_code == 400
    assert "special token" in response.json()["error"]["message"]


def test_many_tokens_are_described_in_a_thread(
    http: httpx.Client, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    for name in ("body", "delta"):
        write = getattr(OpenAIReply, name)

        def noted(*given: Any, write: Any = write) -> Any:
            threads.append(threading.current_thread().name.partition("_")[0])
            return write(*given)

        monkeypatch.setattr(OpenAIReply, name, noted)
    long = {**COUNT, "prompt": [5] * (INLINE_DETAILS + 10), "max_tokens": 1}
    post(http, "completions", long)
    assert "bodies" not in threads
    assert (
        len(post(http, "completions", {**long, "prompt_logprobs": 1})["choices"][0]["prompt_logprobs"]) == 210
    )
    assert threads[-1] == "bodies"
    threads.clear()
    http.post("/v1/completions", json={**long, "echo": True, "logprobs": 1, "stream": True}).raise_for_status()
    assert threads[0] == "bodies"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_ids_of_a_long_prompt_are_written_in_a_thread(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(generated_response, "IDS_AS_ONE", 1)
    threads: list[tuple[str, bool]] = []
    write = OpenAIReply.delta

    def noted(*given: Any) -> bytes:
        event = write(*given)
        threads.append((threading.current_thread().name.partition("_")[0], b"prompt_token_ids" in event))
        return event

    monkeypatch.setattr(OpenAIReply, "delta", noted)
    text = "one, two, " * (INLINE_DETAILS // 3)
    asked = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"n": 3, "max_tokens": 3, "ignore_eos": True, "stream": True, "return_token_ids": True, **asked}
    http.post(f"/v1/{route}", json=body).raise_for_status()
    with_prompt = [thread for thread, has_prompt in threads if has_prompt]
    assert with_prompt == ["bodies"] * (3 if route == "completions" else 1)
    assert "bodies" not in [thread for thread, _ in threads[-3:]]


def test_the_choices_of_a_response_are_encoded_one_by_one(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other thread runs while one is encoded, and each may have a long prompt."""
    sizes: list[int] = []
    encode = openai_responses.encoded

    def noted(value: dict[str, Any]) -> bytes:
        sizes.append(len(piece := encode(value)))
        return piece

    monkeypatch.setattr(openai_responses, "encoded", noted)
    body = {**COUNT, "prompt": [5] * 200, "n": 4, "return_token_ids": True}
    found = post(http, "completions", body)
    assert [choice["prompt_token_ids"] for choice in found["choices"]] == [[5] * 200] * 4
    assert found["usage"]["completion_tokens"] == 4 * 8
    assert len(sizes) == 5
    assert max(sizes) < sum(sizes) / 3
