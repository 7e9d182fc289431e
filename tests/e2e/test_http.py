"""The routes as a client sees them, through Serve's proxy, ingress, channel and engine."""

from __future__ import annotations

import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
import ray
from local_cluster import SOON_S, BreakableCluster
from prometheus_client.parser import text_string_to_metric_families
from ray._private import internal_api

from loadtests.client import MODEL
from loadtests.cluster import LocalCluster, wait_for

CAPITAL: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
ANSWER = "The capital of France is Paris."


def test_chat_streams_the_answer_and_stops_by_itself(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_both_routes_answer_whole_and_streamed_alike(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (ANSWER, "stop")
    # As other servers' answers come back, with fields that only answers have.
    said = {**chat.choices[0].message.model_dump(), "reasoning_content": None, "provider_specific_fields": {}}
    again = [*CAPITAL, said, {"role": "user", "content": "And of Spain?"}]
    assert sdk.chat.completions.create(model=MODEL, messages=again, max_tokens=2).usage is not None
    asked: Any = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    whole = sdk.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    streamed = sdk.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_channels_have_connections_of_their_own(http: httpx.Client) -> None:
    """Without them, everything works and costs more: nothing else would show it."""

    def state() -> tuple[list[str], list[str]]:
        health = http.get("/health").json()
        return sorted(health["channels"].values()), health["unconnected"]

    wait_for(lambda: state() == (["open", "open"], []), SOON_S, "a channel lacks its connection")


def test_nothing_is_put_into_rays_object_store(cluster: LocalCluster) -> None:
    """It lies in /dev/shm: where that is full, the first object kills Ray's node process with all replicas."""
    cluster.inspect()
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    created = internal_api.get_memory_info_reply(state).store_stats
    # Each worker puts 8 bytes there when it starts.
    assert created.cumulative_created_bytes <= 8 * created.cumulative_created_objects


def test_lists_of_prompts_come_back_in_order(sdk: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "The sky is", "Once upon a time"]
    together = sdk.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0)
    alone = [sdk.completions.create(model=MODEL, prompt=p, max_tokens=8, temperature=0) for p in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]


class Person(pydantic.BaseModel):
    """What a model is asked to make up."""

    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    moods: Annotated[list[Literal["good", "bad"]], pydantic.Field(max_length=3)]
    friend: Pet | Car | None


class Pet(pydantic.BaseModel):
    kind: Literal["pet"]
    legs: Literal[2, 4]


class Car(pydantic.BaseModel):
    kind: Literal["car"]
    electric: bool


def test_the_sdk_parses_answers_into_classes(sdk: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Make up a person. Answer in JSON."}]
    completion = sdk.chat.completions.parse(model=MODEL, messages=asked, response_format=Person, n=3, seed=1)
    people = [choice.message.parsed for choice in completion.choices]
    assert len(people) == 3
    assert all(isinstance(person, Person) for person in people)
    with sdk.chat.completions.stream(model=MODEL, messages=asked, response_format=Person, seed=1) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == people[0]


def test_hostile_forms_are_refused_and_others_answered(http: httpx.Client) -> None:
    def ask(**form: Any) -> httpx.Response:
        body = {"prompt": "The answer is", "max_tokens": 20, "temperature": 0, **form}
        return http.post("/v1/completions", json=body, timeout=60)

    patterns = [{"type": "string", "pattern": f".*[a-{c}].{{50}}"} for c in "bcdefghijklmnopqrst"]
    with ThreadPoolExecutor() as clients:
        hostile = clients.submit(ask, guided_json={"allOf": patterns})
        friendly = clients.submit(ask, guided_choice=["forty-two", "unknown"])
    error = hostile.result().json()["error"]
    assert (hostile.result().status_code, error["code"]) == (400, "invalid_grammar")
    assert "compiling it takes more than" in error["message"]
    assert friendly.result().json()["choices"][0]["text"] in ("forty-two", "unknown")


def test_a_stop_string_ends_the_stream_and_the_engines_work(cluster: LocalCluster, http: httpx.Client) -> None:
    body = {"messages": CAPITAL, "temperature": 0, "stop": "is Par", "stream": True, "ignore_eos": True}
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "The capital of France "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: all(s["live_requests"] == 0 for s in cluster.inspect()), SOON_S, "the request still runs")


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        ("/v1/completions", b'{"prompt": ""}', 400, "empty_prompt"),
        ("/v1/completions", b'{"prompt": [99999999]}', 400, "invalid_value"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 99999999}', 400, "context_length_exceeded"),
        ("/v1/completions", b'{"prompt": "a", "model": "gpt-5"}', 404, "model_not_found"),
        ("/v1/completions", b"{", 400, "invalid_json"),
        ("/v1/completions", b'{"prompt": [1.5, 2]}', 400, "invalid_value"),
        pytest.param(
            *("/v1/completions", b'{"prompt": "a", "seed": 1%b}' % (b"0" * 4000), 400, "invalid_value"),
            id="a seed of 4,001 digits",
        ),
        pytest.param(
            *("/v1/chat/completions", b'{"messages": [%b{}]}' % (b"{}," * 280_000), 413, "request_too_large"),
            id="280,000 messages",
        ),
        ("/v1/chat/completions", b'{"messages": [], "stream": true}', 400, "invalid_value"),
        ("/v1/nothing", b"{}", 404, None),
    ],
)
def test_errors_pass_the_proxy_unchanged(
    http: httpx.Client, path: str, content: bytes, status: int, code: str | None
) -> None:
    response = http.post(path, content=content, headers={"x-request-id": "mine"})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert len(response.text) < 1000


def test_every_answer_and_its_log_line_have_one_request_id(
    cluster: BreakableCluster, http: httpx.Client
) -> None:
    first, second = (http.get("/v1/models").headers.get_list("x-request-id") for _ in range(2))
    assert len(first) == len(second) == 1
    assert first != second
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    own = f"mine-{uuid.uuid4().hex}"
    streamed = http.post("/v1/completions", json=body, headers={"x-request-id": own})
    assert streamed.headers.get_list("x-request-id") == [own]

    def logged() -> list[str]:
        lines = (line for file in cluster.logs() for line in file.read_text().splitlines())
        return [line for line in lines if f"request_id={own} " in line]

    (line,) = wait_for(logged, SOON_S, "no process has logged the request")
    assert re.match(r"[-\d]+ [:.\d]+ INFO ingress:\w+ ", line), line


def test_the_live_page_says_which_request_holds_a_replicas_blocks(
    cluster: LocalCluster, http: httpx.Client
) -> None:
    wanted = [{"replica": state["replica"], "by": "request"} for state in cluster.inspect()]
    asked = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=asked, headers={"x-request-id": "holds@1"}) as response:
        lines = response.iter_lines()  # whoever drops this iterator hangs up
        next(lines)

        def told() -> bool:
            return ["holds@1"] in [
                http.get("/dashboard/blocks", params=of).json().get("names") for of in wanted
            ]

        wait_for(told, SOON_S, "no replica's blocks are the request's")


def test_many_clients_at_once_all_get_their_own_answer(sdk: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        prompt = f"{number}, {number + 1}, {number + 2}," * 3
        reply = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
        return reply.choices[0].text

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(12) as clients:
        assert list(clients.map(ask, range(12))) == alone


def test_figures_are_in_rays_prometheus_endpoint_and_in_the_servers(
    cluster: LocalCluster, http: httpx.Client
) -> None:
    prompt = list(range(2000, 2064))
    for _ in range(3):  # on whichever replica: one of two has it twice
        asked = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        http.post("/v1/completions", json=asked).raise_for_status()

    def figures() -> dict[str, float] | None:
        text = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=SOON_S).text
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^ray_((?:quire|vllm)_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            state = re.search(r'(?:^|,)state="(\w+)"', labels)
            key = f"{name}:{state[1]}" if state else name
            found[key] = found.get(key, 0.0) + float(value)
        wanted = {f"quire_kv_blocks:{state}" for state in ("referenced", "cached", "free")}
        wanted |= {f"quire_requests:{state}" for state in ("running", "waiting")}
        board = ("time_to_first_token_seconds_bucket", "kv_cache_usage_perc", "generation_tokens_total")
        wanted |= {f"vllm_{name}" for name in board}
        wanted |= {
            "quire_prefix_query_tokens_total",
            "quire_prefix_hit_tokens_total",
            "quire_generated_tokens_total",
        }
        if not wanted <= set(found):
            return None
        least = {"prefix_hit_tokens_total": 48, "generated_tokens_total": 6, "kv_blocks:cached": 1}
        return found if all(found[f"quire_{name}"] >= value for name, value in least.items()) else None

    wait_for(figures, SOON_S, "the metrics are not there")  # Ray sends each in its own time

    def served() -> dict[str, dict[str, float]] | None:
        """By name and replica, once both engines have sent theirs and the ingress has counted the ends."""
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(http.get("/metrics").raise_for_status().text):
            for sample in family.samples:
                of = found.setdefault(sample.name, {})
                replica = sample.labels.get("replica", "")
                of[replica] = of.get(replica, 0.0) + sample.value
        least = {
            "quire_prefix_hit_tokens_total": 48,
            "vllm:generation_tokens_total": 6,
            "quire_request_output_tokens_sum": 6,
            "quire_routing_decisions_total": 3,
        }
        enough = all(sum(found.get(name, {}).values()) >= value for name, value in least.items())
        return found if enough and len(found["quire_prefix_hit_tokens_total"]) == 2 else None

    fleet = wait_for(served, SOON_S, "the server does not say so")
    assert len(fleet["quire_ended_requests_total"]) == 1  # there is one ingress


def test_tools_responses_and_anthropics_messages_pass_the_proxy(
    cluster: LocalCluster, sdk: openai.OpenAI
) -> None:
    import anthropic  # takes a second and a half: not in every worker

    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool: Any = {"type": "function", "function": {"name": "light", "parameters": schema}}
    tools: Any = {"tools": [tool], "tool_choice": "required"}
    asked: Any = {"model": MODEL, "messages": CAPITAL, "seed": 1, **tools}
    choice = sdk.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, choice.finish_reason) == ("light", "tool_calls")
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    said: Any = {"instructions": CAPITAL[0]["content"], "input": CAPITAL[1]["content"], "temperature": 0}
    with sdk.responses.stream(model=MODEL, **said) as stream:
        assert stream.get_final_response().output_text == ANSWER
    asked = {"model": MODEL, "max_tokens": 20, "system": CAPITAL[0]["content"], "messages": CAPITAL[1:]}
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as claude:
        with claude.messages.stream(**asked, extra_body={"temperature": 0}) as messages:
            assert messages.get_final_text() == ANSWER
        with pytest.raises(anthropic.BadRequestError, match="'no_such' is not a known parameter"):
            claude.messages.create(**asked, extra_body={"no_such": 1})
