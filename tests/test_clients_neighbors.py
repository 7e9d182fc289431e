"""``clients.neighbors`` without a server: what it sends, and what it makes of the answers."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from concurrent.futures import Future
from typing import Any

import httpx
import psutil
import pytest

from clients import neighbors as module
from clients.neighbors import Neighbors, area, hostile, malformed
from loadtests.report import Figure


def test_bodies_repeat_with_their_seed_and_few_are_json() -> None:
    sent = [[malformed(draw) for _ in range(200)] for draw in (random.Random(3), random.Random(3))]
    assert sent[0] == sent[1]
    assert {route for route, _ in sent[0]} == set(module.ROUTES)
    good = 0
    for _, body in sent[0]:
        with contextlib.suppress(ValueError, RecursionError):
            good += isinstance(json.loads(body), dict)
    assert 50 < good < 150


def test_each_hostile_form_is_new() -> None:
    forms = [json.dumps(hostile(number)) for number in range(24)]
    assert len(set(forms)) == 24
    assert Counter(next(iter(json.loads(form))) for form in forms[:8]) == {
        "guided_json": 6, "guided_regex": 1, "guided_grammar": 1,
    }  # fmt: skip
    assert max(map(len, forms)) > 1_000_000


def test_the_area_is_a_half_where_nothing_tells_them_apart() -> None:
    assert area([1, 2, 3], [1, 2, 3]) == 0.5
    assert area([1, 2], [3, 4]) == 1
    assert area([3, 4], [1, 2]) == 0


class Done:
    """A process that does each job at once, and is seen to run twice."""

    def submit(self, job: Any, *given: Any) -> Future[Any]:
        looks = iter((False, False))
        future: Future[Any] = Future()
        future.set_result(job(*given))
        future.done = lambda: next(looks, True)  # type: ignore[method-assign]
        return future


@pytest.fixture
def neighbors(monkeypatch: pytest.MonkeyPatch) -> Neighbors:
    """Of a server that no request reaches: every answer is made here."""
    found = Neighbors.__new__(Neighbors)
    found.url, found._process, found._draw, found._pool = (
        "http://there",
        psutil.Process(),
        random.Random(0),
        Done(),
    )  # type: ignore[assignment]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"live_requests": 0})

    found._alice = httpx.Client(base_url="http://there", transport=httpx.MockTransport(answer))
    return found


def figures(found: list[Figure]) -> dict[str, float]:
    return {figure.name.partition(": ")[2]: figure.value for figure in found}


def test_what_is_no_refusal_counts(neighbors: Neighbors, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Counter({"400": 5, "500": 2, "ReadTimeout": 1, "200": 1})
    monkeypatch.setattr(module, "send_malformed", lambda *_: sent)
    found = figures(neighbors.malformed_bodies(90))
    assert found["with a 5xx, or without an answer"] == 3 * module.TURNS
    assert found["requests left"] == 0


def test_the_slowest_form_counts(neighbors: Neighbors, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def send(url: str, key: str, given: Any) -> list[tuple[float, int]]:
        numbers.extend(given)
        return [(0.1 * number, 503 if number == 7 else 400 if number % 2 else 200) for number in given]

    monkeypatch.setattr(module, "send_hostile", send)
    found = figures(neighbors.hostile_forms(25))
    assert sorted(numbers) == list(range(25))
    assert (found["the slowest answer"], found["with a 5xx"], found["refused"]) == (pytest.approx(2.4), 1, 12)
