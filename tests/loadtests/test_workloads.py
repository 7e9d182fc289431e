from __future__ import annotations

import random
from collections import Counter

import pytest

from loadtests.workloads import ChatTraffic, Zipf, question, sentences, system_prompt


def test_zipf_follows_its_law() -> None:
    rng = random.Random(0)
    draws = 20_000
    counts = Counter(Zipf(5, 1.0).draw(rng) for _ in range(draws))
    total = sum(1 / (rank + 1) for rank in range(5))
    for rank in range(5):
        assert counts[rank] == pytest.approx(draws / (rank + 1) / total, rel=0.1)


def test_zipf_of_one_and_of_none() -> None:
    assert Zipf(1).draw(random.Random(0)) == 0
    with pytest.raises(ValueError, match="at least 1"):
        Zipf(0)


def test_system_prompts_are_stable_and_differ_early() -> None:
    prompts = [system_prompt(rank, 100, seed=3) for rank in range(16)]
    assert prompts == [system_prompt(rank, 100, seed=3) for rank in range(16)]
    assert len({prompt[:40] for prompt in prompts}) == 16
    assert all(100 <= len(prompt.split()) < 150 for prompt in prompts)
    assert system_prompt(0, 100, seed=4) != prompts[0]


def test_text_has_the_words_asked_for() -> None:
    assert 50 <= len(sentences(random.Random(1), 50).split()) < 65
    assert "{}" not in question(random.Random(1))


def test_a_users_traffic_repeats_and_differs_from_anothers() -> None:
    def first_requests(user: int) -> list[str]:
        traffic = ChatTraffic(7, user)
        seen = []
        for _ in range(10):
            seen.append(str(traffic.next_messages()))
            traffic.answered("yes")
        return seen

    assert first_requests(0) == first_requests(0)
    assert first_requests(0) != first_requests(1)


def test_conversations_grow_turn_by_turn_and_end() -> None:
    traffic = ChatTraffic(0, 0, max_turns=3)
    lengths = []
    for _ in range(60):
        messages = traffic.next_messages()
        assert [message["role"] for message in messages[:2]] == ["system", "user"]
        assert messages[-1]["role"] == "user"
        lengths.append(len(messages))
        traffic.answered("an answer")
    assert set(lengths) == {2, 4, 6}


def test_users_share_the_popular_system_prompts() -> None:
    systems = Counter(ChatTraffic(0, user).next_messages()[0]["content"] for user in range(400))
    assert len(systems) == 16
    assert systems.most_common(1)[0][0] == system_prompt(0, 150, seed=0)


def test_a_failed_turn_begins_anew() -> None:
    traffic = ChatTraffic(0, 0, max_turns=3)
    for _ in range(20):
        assert len(traffic.next_messages()) == 2
        traffic.failed()
