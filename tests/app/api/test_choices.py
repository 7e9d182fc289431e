"""Several choices of one prompt, over HTTP and a real engine."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import pytest
from local_server import COUNT, LocalServer, is_idle, wait_until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SAMPLED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 11}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def choices(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def texts(response: httpx.Response) -> list[str]:
    return [choice["text"] for choice in choices(response)]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_choices_differ_repeat_and_begin_with_the_single_one(http: httpx.Client) -> None:
    single = texts(http.post(COMPLETIONS, json=SAMPLED))
    several = texts(http.post(COMPLETIONS, json={**SAMPLED, "n": 3}))
    assert len(set(several)) == 3
    assert several[:1] == single
    assert texts(http.post(COMPLETIONS, json={**SAMPLED, "n": 3})) == several
    assert texts(http.post(COMPLETIONS, json={**SAMPLED, "n": 2})) == several[:2]


def test_each_prompt_has_its_choices_side_by_side(http: httpx.Client) -> None:
    prompts = ["one, two, three, four,", "The sky is"]
    body = {**COUNT, "prompt": prompts, "n": 2}
    alone = [texts(http.post(COMPLETIONS, json={**COUNT, "prompt": prompt}))[0] for prompt in prompts]
    response = http.post(COMPLETIONS, json=body)
    assert texts(response) == [alone[0], alone[0], alone[1], alone[1]]
    usage = response.json()["usage"]
    prompt_tokens = sum(
        http.post(COMPLETIONS, json={**COUNT, "prompt": prompt}).json()["usage"]["prompt_tokens"]
        for prompt in prompts
    )
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 4 * COUNT["max_tokens"])  # type: ignore[operator]
    streamed = [""] * 4
    for chunk in chunks_of(http.post(COMPLETIONS, json={**body, "stream": True})):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts(response)


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_count_once_for_each_prompt(http: httpx.Client, stream: bool) -> None:
    prompt = list(range(2000, 2040)) if stream else list(range(3000, 3040))  # two full blocks and 8 more
    http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "n": 3, "ignore_eos": True}
    if stream:
        body.update(stream=True, stream_options={"include_usage": True})
        usage = chunks_of(http.post(COMPLETIONS, json=body))[-1]["usage"]
    else:
        usage = http.post(COMPLETIONS, json=body).json()["usage"]
    assert usage == {
        "prompt_tokens": 40,
        "completion_tokens": 6,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 32},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_chat_streams_each_choice_with_a_role_and_an_end(http: httpx.Client) -> None:
    body = {"messages": CAPITAL, "n": 3, "seed": 5, "temperature": 1.3, "max_tokens": 10}
    whole = choices(http.post(CHAT, json=body))
    assert [choice["message"]["role"] for choice in whole] == ["assistant"] * 3
    deltas: dict[int, list[dict[str, Any]]] = defaultdict(list)
    reasons: dict[int, list[str | None]] = defaultdict(list)
    for chunk in chunks_of(http.post(CHAT, json={**body, "stream": True})):
        (choice,) = chunk["choices"]
        deltas[choice["index"]].append(choice["delta"])
        reasons[choice["index"]].append(choice["finish_reason"])
    for choice in whole:
        first, *others = deltas[choice["index"]]
        assert first == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in others) == choice["message"]["content"]
        assert reasons[choice["index"]] == [None] * len(others) + [choice["finish_reason"]]


def test_a_stop_string_ends_one_choice_and_leaves_the_others_alone(http: httpx.Client) -> None:
    body = {**SAMPLED, "n": 3}
    free = choices(http.post(COMPLETIONS, json=body))
    words = [word for word in free[1]["text"].split() if all(word not in free[i]["text"] for i in (0, 2))]
    stopped = choices(http.post(COMPLETIONS, json={**body, "stop": words[0]}))
    assert [stopped[0], stopped[2]] == [free[0], free[2]]
    assert stopped[1]["text"] == free[1]["text"].split(words[0])[0]
    assert stopped[1]["finish_reason"] == "stop"
    streamed = [""] * 3
    for chunk in chunks_of(http.post(COMPLETIONS, json={**body, "stop": words[0], "stream": True})):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == [choice["text"] for choice in stopped]


def test_the_engine_stops_when_a_stop_string_has_ended_every_choice(
    server: LocalServer, http: httpx.Client
) -> None:
    wait_until(lambda: is_idle(server))
    aborted = len(server.client.aborted)
    body = {
        "messages": CAPITAL,
        "temperature": 0,
        "stop": "is P",
        "n": 2,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    response = http.post(CHAT, json=body)
    assert {choice["finish_reason"] for choice in choices(response)} == {"stop"}
    assert response.json()["usage"]["completion_tokens"] < 20
    wait_until(lambda: is_idle(server))
    assert len(server.client.aborted) == aborted + 1


def test_a_client_that_leaves_frees_every_choice(server: LocalServer, http: httpx.Client) -> None:
    body = {**SAMPLED, "n": 4, "max_tokens": 80, "ignore_eos": True, "stream": True}
    wait_until(lambda: server.service.num_live == 0)
    with server.slow_steps(), http.stream("POST", COMPLETIONS, json=body) as response:
        chunks = response.iter_bytes()
        next(chunks)
        assert server.service.num_live == 4
    wait_until(lambda: is_idle(server) and server.service.num_live == 0)


def test_the_best_of_more_are_returned(http: httpx.Client) -> None:
    body = {**SAMPLED, "n": 2, "best_of": 5}
    best = texts(http.post(COMPLETIONS, json=body))
    assert len(best) == 2
    assert texts(http.post(COMPLETIONS, json=body)) == best
    assert set(best) <= set(texts(http.post(COMPLETIONS, json={**SAMPLED, "n": 5})))
    usage = http.post(COMPLETIONS, json={**body, "ignore_eos": True}).json()["usage"]
    assert usage["completion_tokens"] == 2 * 12, "of what is returned"


def test_beam_search_returns_the_likeliest(http: httpx.Client) -> None:
    body = {"prompt": "The sky is", "max_tokens": 6, "use_beam_search": True, "beam_width": 4, "n": 3}
    found = texts(http.post(COMPLETIONS, json=body))
    assert len(set(found)) == 3
    chat = http.post(CHAT, json={"messages": CAPITAL, "n": 2, "use_beam_search": True, "max_tokens": 12})
    assert choices(chat)[0]["message"]["content"].startswith("The capital of France")


def test_a_single_beam_is_the_greedy_choice(http: httpx.Client) -> None:
    beam = texts(http.post(COMPLETIONS, json={**COUNT, "use_beam_search": True, "beam_width": 1}))
    assert beam == texts(http.post(COMPLETIONS, json=COUNT))


def test_more_choices_than_slots_are_put_off(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: server.service.num_live == 0)
    server.set_options(monkeypatch, max_live_choices=3, min_priority=-5)
    never = http.post(COMPLETIONS, json={**COUNT, "n": 4})
    assert never.status_code == 400
    assert "4 choices but at most 3 may be in progress" in never.json()["error"]["message"]
    monkeypatch.setattr(server.service.admission.live, "count", 1)
    assert http.post(COMPLETIONS, json={**COUNT, "n": 3}).status_code == 503
    monkeypatch.setattr(server.service.admission.live, "count", 0)
    assert http.post(COMPLETIONS, json={**COUNT, "n": 3, "priority": -5}).status_code == 200
    wait_until(lambda: server.service.num_live == 0)
