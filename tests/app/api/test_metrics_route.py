"""``GET /metrics`` after a load: Prometheus can read it, and it agrees with what the clients saw."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from engine_stats import SCALING
from local_server import LocalServer
from prometheus_client.parser import text_string_to_metric_families

from app.api.authentication import Gate
from app.api.errors import ApiError
from app.api.keys import KeyFile, digest_of
from app.fleet.generation import Delta, GenerateRequest, UnavailableError
from app.metrics.engine_figures import engine_samples
from app.metrics.fleet_figures import FleetFigures, ModelFigures
from app.metrics.request_figures import RequestFigures
from app.metrics.samples import Process, pack
from app.metrics.table import TABLE, MetricKind, Source

TOKENS = 9


@pytest.fixture
def fleet(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> LocalServer:
    """The server with figures that begin at 0, and its engine's beside them."""
    figures = RequestFigures()
    monkeypatch.setattr(server.service, "figures", figures)

    def engines() -> dict[str, list[float]]:
        return {"engine#a": pack(engine_samples(server.client.engine.stats(), SCALING, 0))}

    own = ModelFigures("m", lambda: Process("ingress#a", figures.samples(), "m"), engines)
    whole = FleetFigures([own])
    monkeypatch.setattr(server.api, "fleet_figures", whole)
    return server


def scraped(server: LocalServer) -> dict[str, float]:
    """Sums over all labels but a histogram's bounds."""
    answer = httpx.get(f"{server.url}/metrics", timeout=60)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.labels.get("le", "+Inf") == "+Inf":
                sums[sample.name] += sample.value
    return sums


def streamed(http: httpx.Client, prompt: list[int], n: int = 1) -> tuple[float, list[float]]:
    """Seconds until the first token and between tokens, as this client sees them."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "n": n}
    began = last = time.monotonic()
    first, gaps = 0.0, []
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                continue
            now = time.monotonic()
            if first:
                gaps.append(now - last)
            else:
                first = now - began
            last = now
    return first, gaps


def test_histograms_agree_with_the_clients(fleet: LocalServer, http: httpx.Client) -> None:
    before = scraped(fleet)
    seen = [streamed(http, list(range(1000 + 50 * number, 1032 + 50 * number))) for number in range(6)]
    fleet.api.fleet_figures._seen_at = -1.0e9
    after = scraped(fleet)
    more = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert more["quire_ended_requests_total"] == 6
    for name in ("time_to_first_token_seconds", "request_seconds", "time_per_output_token_seconds"):
        assert more[f"quire_{name}_count"] == 6
    assert (more["quire_request_prompt_tokens_sum"], more["quire_request_output_tokens_sum"]) == (
        192,
        6 * TOKENS,
    )
    assert more["quire_inter_token_seconds_count"] == 6 * (TOKENS - 1)
    assert more["quire_generated_tokens_total"] == more["vllm:generation_tokens_total"] == 6 * TOKENS
    for name in ("queue_seconds", "prefill_seconds", "decode_seconds"):
        assert more[f"quire_{name}_count"] == 6
    # A client sees each token that the server sends, later by the way between them; the end has no such order.
    first, whole = more["quire_time_to_first_token_seconds_sum"], more["quire_request_seconds_sum"]
    assert first <= sum(at for at, _ in seen)
    last = first + more["quire_inter_token_seconds_sum"]
    assert last <= sum(at + sum(gaps) for at, gaps in seen)
    engine = sum(more[f"quire_{name}_sum"] for name in ("queue_seconds", "prefill_seconds"))
    assert engine <= first
    assert last <= whole
    assert more["quire_inter_token_seconds_sum"] == pytest.approx(
        more["quire_time_per_output_token_seconds_sum"] * (TOKENS - 1)
    )


def test_every_metric_of_engines_and_clients_has_samples_after_a_load(
    fleet: LocalServer, http: httpx.Client
) -> None:
    streamed(http, list(range(2000, 2040)), n=2)
    found = scraped(fleet)
    suffix = {MetricKind.GAUGE: "", MetricKind.COUNTER: "_total", MetricKind.HISTOGRAM: "_count"}
    counted = set(RequestFigures().samples()) | {one.name for one in TABLE if one.source is Source.ENGINE}
    # Without keys there is nothing to say of them.
    wanted = [one for one in TABLE if one.name in counted and one.labels != ("key",)]
    assert [one.name for one in wanted if one.full_name + suffix[one.kind] not in found] == []
    assert found["quire_time_to_first_token_seconds_count"] == 1
    assert found["quire_inter_token_seconds_count"] == 2 * (TOKENS - 1)


def test_what_is_refused_is_counted_by_its_reason(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ApiError(429, "wait", code="overloaded")

    monkeypatch.setattr(fleet.service.admission.live, "admit", refuse)
    for _ in range(2):
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 429
    assert fleet.service.figures.refused["overloaded"] == 2
    assert scraped(fleet)["quire_refused_requests_total"] == 2
    assert sum(fleet.service.figures.ended.values()) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engines_is_counted_once(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Such as that of a request for which no engine was found, long after its admission."""

    async def generate(request: GenerateRequest) -> AsyncIterator[Delta]:
        raise UnavailableError("no engine")
        yield

    monkeypatch.setattr(fleet.service._responses._engines, "generate", generate)
    assert http.post("/v1/completions", json={"prompt": "a", "stream": stream}).status_code == 503
    assert scraped(fleet)["quire_refused_requests_total"] == fleet.service.figures.refused["unavailable"] == 1
    assert dict(fleet.service.figures.ended) == {("completions", "unavailable"): 1}


def test_a_key_is_needed(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{id: a, sha256: {digest_of('key')}}}\n")
    monkeypatch.setattr(fleet.api, "gate", Gate(KeyFile(str(path), {})))
    assert http.get("/metrics").status_code == 401
    assert http.get("/metrics", headers={"x-api-key": "key"}).status_code == 200
