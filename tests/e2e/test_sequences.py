"""Several sequences of one prompt, as a client sees them, through proxy, ingress, channel and engine."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from local_cluster import SOON_S, BreakableCluster

from loadtests.client import MODEL
from loadtests.cluster import wait_for

SAMPLED: Any = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 24,
    "temperature": 1.0,
    "seed": 42,
    "extra_body": {"ignore_eos": True},
}


def texts(completion: Any) -> list[str]:
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.text for choice in completion.choices]


def test_choices_differ_repeat_and_begin_with_the_single_one(sdk: openai.OpenAI) -> None:
    several = sdk.completions.create(**SAMPLED, n=3)
    assert len(set(texts(several))) == 3
    # Again, on whichever replica: the draws depend on the seed alone.
    for _ in range(3):
        assert texts(sdk.completions.create(**SAMPLED, n=3)) == texts(several)
    single = sdk.completions.create(**SAMPLED)
    assert texts(several)[:1] == texts(single)
    assert several.usage is not None
    assert single.usage is not None
    assert several.usage.prompt_tokens == single.usage.prompt_tokens
    assert several.usage.completion_tokens == 3 * 24


def test_beams_are_the_same_on_every_replica(sdk: openai.OpenAI) -> None:
    search: Any = {"use_beam_search": True, "beam_width": 4}
    asked: Any = {"model": MODEL, "prompt": "The sky is", "max_tokens": 8, "n": 2, "extra_body": search}
    found = texts(sdk.completions.create(**asked))
    assert len(set(found)) == 2
    for _ in range(3):
        assert texts(sdk.completions.create(**asked)) == found
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(**asked, stream=True)
    assert refused.value.param == "use_beam_search"


def test_a_chat_streams_two_choices_side_by_side(sdk: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name a color."}],
        "n": 2,
        "seed": 7,
        "max_tokens": 16,
    }
    whole = sdk.chat.completions.create(**asked)
    said, roles = ["", ""], [0, 0]
    ends: list[str | None] = [None, None]
    stream = sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            ends[choice.index] = choice.finish_reason
    assert said == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert roles == [1, 1]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_best_of_more_come_back(sdk: openai.OpenAI) -> None:
    best = texts(sdk.completions.create(**SAMPLED, n=2, best_of=4))
    assert set(best) <= set(texts(sdk.completions.create(**SAMPLED, n=4)))


def test_log_probabilities_and_echo_come_through(sdk: openai.OpenAI) -> None:
    asked: Any = {**SAMPLED, "n": 2, "logprobs": 2, "echo": True, "presence_penalty": 1.0}
    whole = sdk.completions.create(**asked)
    pieces: list[list[float | None]] = [[], []]
    for chunk in sdk.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        pieces[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
    assert whole.usage is not None
    for choice, streamed in zip(whole.choices, pieces, strict=True):
        assert choice.text.startswith(SAMPLED["prompt"])
        assert choice.logprobs is not None
        assert len(streamed) == whole.usage.prompt_tokens + 24
        assert streamed == choice.logprobs.token_logprobs


def test_priorities_are_taken(sdk: openai.OpenAI) -> None:
    plain = texts(sdk.completions.create(**SAMPLED))
    urgent = {**SAMPLED, "extra_body": {"ignore_eos": True, "priority": 10}}
    assert texts(sdk.completions.create(**urgent)) == plain
    with pytest.raises(openai.BadRequestError, match="must be at least 0"):
        sdk.completions.create(**{**SAMPLED, "extra_body": {"priority": -1}})
    with pytest.raises(openai.BadRequestError, match="between -1000"):
        sdk.completions.create(**{**SAMPLED, "extra_body": {"priority": 5000}})


def test_a_client_that_leaves_ends_all_sequences(cluster: BreakableCluster, sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(**{**SAMPLED, "n": 4, "max_tokens": 400}, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    wait_for(lambda: cluster.health()["live_requests"] == 0, SOON_S, "the ingress still has requests")


def cached_tokens(sdk: openai.OpenAI, prompt: list[int], tenant: str = "") -> int:
    headers = {"x-tenant": tenant} if tenant else {}
    usage = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=2, extra_headers=headers).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_every_replica_forgets_its_prefixes(cluster: BreakableCluster, sdk: openai.OpenAI) -> None:
    prompt = list(range(5000, 5064))
    assert max(cached_tokens(sdk, prompt) for _ in range(3)) > 0, "one of two replicas had it twice"
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    before = sum(state["cached_blocks"] for state in cluster.inspect())
    response = httpx.post(f"{cluster.url}/admin/reset_prefix_cache", timeout=30)
    assert (response.status_code, response.json()) == (200, {"replicas": 2, "freed_blocks": before})
    assert sum(state["cached_blocks"] for state in cluster.inspect()) == 0
    assert cached_tokens(sdk, prompt) == 0


def test_tenants_share_no_prefix(sdk: openai.OpenAI) -> None:
    prompt = list(range(6000, 6064))
    assert max(cached_tokens(sdk, prompt, "one") for _ in range(3)) > 0
    assert cached_tokens(sdk, prompt, "two") == 0
    assert cached_tokens(sdk, prompt) == 0
