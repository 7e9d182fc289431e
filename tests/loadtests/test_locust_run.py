"""What a load test reads from the server, and what it makes of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loadtests import locust_run
from loadtests.report import Figure, most

URL = "http://127.0.0.1:8000"
METRICS = """\
# HELP quire_request_prompt_tokens Prompt tokens of each request that ends well.
# TYPE quire_request_prompt_tokens histogram
quire_request_prompt_tokens_bucket{model="a",le="16"} 2
quire_request_prompt_tokens_count{model="a"} 3
quire_request_prompt_tokens_sum{model="a"} 120
quire_request_prompt_tokens_count{model="b"} 2
quire_request_prompt_tokens_sum{model="b"} 30.5
quire_request_output_tokens_count{model="a"} 3
quire_request_output_tokens_sum{model="a"} 64
quire_request_seconds_bucket{model="a",le="5.0"} 3
quire_request_seconds_count{model="a"} 3
quire_request_seconds_sum{model="a"} 7
quire_time_per_output_token_seconds_sum{model="a"} 0.25
quire_replicas{ingress="x",state="open"} 2
quire_replicas{ingress="y",state="open"} 3
quire_replicas{ingress="y",state="closed"} 7
"""


def served(monkeypatch: pytest.MonkeyPatch, text: str, status: int = 200) -> list[dict[str, str]]:
    """Have the server answer ``text``; returns the headers of each request, as they come."""
    asked: list[dict[str, str]] = []

    def get(url: str, *, headers: dict[str, str], timeout: float) -> httpx.Response:
        assert url == f"{URL}/metrics"
        asked.append(headers)
        return httpx.Response(status, text=text, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr(locust_run.time, "time", lambda: 1000.0)
    return asked


def test_labels_are_added_up_and_replicas_are_the_most_that_an_ingress_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    asked = served(monkeypatch, METRICS)
    assert locust_run.scrape(URL) == {
        "at": 1000.0,
        "replicas": 3.0,
        "requests": 5.0,
        "prompt tokens": 150.5,
        "output tokens": 64.0,
        "seconds of requests": 7.0,
        "seconds a token": 0.25,
    }
    assert asked == [{}]


def test_a_server_that_has_counted_nothing_yet_reads_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    asked = served(monkeypatch, "")
    zeros = dict.fromkeys(("replicas", *(name for _, name in locust_run.NAMES)), 0.0)
    assert locust_run.scrape(URL) == {"at": 1000.0, **zeros}
    assert asked == [{"authorization": "Bearer secret"}]


def test_metrics_that_are_refused_are_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, "", 500)
    with pytest.raises(httpx.HTTPStatusError):
        locust_run.scrape(URL)


@pytest.mark.parametrize(("key", "status", "refused"), [("", 401, "without an"), ("wrong", 403, "this")])
def test_a_server_that_wants_another_key_says_how_to_give_it(
    key: str, status: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", key)
    served(monkeypatch, "", status)
    with pytest.raises(SystemExit, match=f"{refused} API key; set QUIRE_API_KEY"):
        locust_run.scrape(URL)


def sample(
    at: float, requests: float, prompt: float, output: float, took: float = 0.0, tpot: float = 0.0
) -> dict[str, float]:
    names = (name for _, name in locust_run.NAMES)
    return {"at": at, "replicas": 1, **dict(zip(names, (requests, prompt, output, took, tpot), strict=True))}


def record(ttft: float, tpot: float, prompt: int, cached: int, output: int) -> dict[str, Any]:
    row = {"at": 0.0, "ttft": ttft, "tpot": tpot, "prompt": prompt, "cached": cached, "output": output}
    return {**row, "took": 10 * ttft}


EXIT = most("exit", 0)
RECORDS = [record(0.1, 0.01, 100, 40, 20), record(0.3, 0.03, 50, 0, 10), record(0.2, 0.02, 50, 10, 10)]


def by_name(figures: list[Figure]) -> dict[str, tuple[float, bool]]:
    return {figure.name: (pytest.approx(figure.value), figure.holds) for figure in figures}


def test_figures_are_those_of_the_clients_and_what_the_server_counted_since_the_start() -> None:
    first, last = sample(10.0, 5, 1000, 500, 7.0, 0.1), sample(14.0, 8, 1198, 542, 12.97, 0.163)
    samples = [first, sample(12.0, 6, 1100, 520), last]
    assert by_name(locust_run.figures_of(RECORDS, samples, EXIT)) == {
        "requests": (3, True),
        "exit": (0, True),
        "output tokens per second, all users": (10.0, True),
        "TTFT, 50%": (200.0, True),
        "TTFT, 95%": (300.0, True),
        "TPOT, median": (20.0, True),
        "cached share of prompts": (25.0, True),
        "requests: server differs by": (0.0, True),
        "prompt tokens: server differs by": (1.0, True),
        "output tokens: server differs by": (5.0, False),
        "seconds of requests: server differs by": (0.5, True),
        "seconds a token: server differs by": (5.0, False),
    }


def test_failures_and_a_run_without_answers_miss_their_bars() -> None:
    figures = by_name(locust_run.figures_of([], [sample(1.0, 0, 0, 0), sample(2.0, 0, 0, 0)], most("exit", 1)))
    assert figures["requests"] == (0, False)
    assert figures["exit"] == (1, False)
    assert figures["requests: server differs by"] == (100.0, False)
