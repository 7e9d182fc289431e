"""Traces that are replayed: what is read, what is refused, which requests go out, when and with what."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests import locust_run, replay
from loadtests.client import Outcome
from loadtests.replay import Window, prompt_of
from loadtests.traces import Record, TraceError, read_records

MOONCAKE = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}\n'
LATER = '{"timestamp": 2500, "input_length": 600, "output_length": 9, "hash_ids": [7, 9]}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(text)
    return path


def test_mooncake_is_read_with_its_blocks_in_order_of_arrival(tmp_path: Path) -> None:
    assert read_records(written(tmp_path, LATER + "\n" + MOONCAKE), 9) == [
        Record(0.0, 1000, 5, (7, 8)),
        Record(2.5, 600, 9, (7, 9)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": ', "line 2: not JSON"),
        ("[1]", "line 2: list but must be an object"),
        ('{"timestamp": "1", "input_length": 1, "output_length": 1}', "line 2: timestamp is '1' but must be"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 2: timestamp is -1 but must be"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2: timestamp is nan but must be"),
        ('{"timestamp": 1, "output_length": 1}', "line 2: input_length is 'None' but must be an integer"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "line 2: input_length is 'True'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1.5}', "line 2: output_length is '1.5'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": "x"}', "line 2: hash_ids is 'x'"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "line 2: 1 hash_ids but there must be 2",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl: ") as caught:
        read_records(written(tmp_path, MOONCAKE + line + "\n"), 9)
    assert message in str(caught.value)


def test_a_window_has_its_requests_at_the_times_of_the_replay() -> None:
    records = [Record(100.0 + at, 10, 1) for at in (0.0, 4.0, 6.0, 9.9, 10.0, 30.0)]
    due = Window(start=4.0, seconds=3.0, rate=2.0).of(records)
    assert [at for at, _ in due] == pytest.approx([0.0, 1.0, 2.95])
    assert [one for _, one in due] == records[1:4]


def test_equal_blocks_are_equal_tokens_and_all_else_differs() -> None:
    one, other = (
        prompt_of(Record(0.0, length, 1, (7, last)), 1, 0, 0) for length, last in ((1000, 8), (600, 9))
    )
    assert (len(one), len(other)) == (1000, 600)
    assert one[:512] == other[:512]
    assert one[512:600] != other[512:]
    small = prompt_of(Record(0.0, 1000, 1, (7, 8)), 16, 0, 0), prompt_of(Record(0.0, 600, 1, (7, 9)), 16, 0, 1)
    assert [len(tokens) for tokens in small] == [62, 37]
    assert small[0][:32] == small[1][:32]
    assert prompt_of(Record(0.0, 50, 1), 1, 0, 0) != prompt_of(Record(0.0, 50, 1), 1, 0, 1)
    assert prompt_of(Record(0.0, 50, 1), 1, 0, 0) == prompt_of(Record(0.0, 50, 1), 1, 0, 0)
    assert prompt_of(Record(0.0, 50, 1), 1, 1, 0) != prompt_of(Record(0.0, 50, 1), 1, 0, 0)


class FakeClient:
    """Takes requests, and answers the first one only after the last has come."""

    sent: list[tuple[str, int, dict[str, Any]]]

    def __init__(self, url: str, *, model: str, key: str) -> None:
        self.made = (url, model, key)
        self.all_sent = asyncio.Event()
        FakeClient.sent, FakeClient.last = [], self

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def stream(self, path: str, tokens: int, **fields: Any) -> Outcome:
        self.sent.append((path, tokens, fields))
        if len(self.sent) == 3:
            self.all_sent.set()
        await self.all_sent.wait()
        return Outcome(asked=tokens)


def test_the_loop_is_open_and_the_key_goes_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []

    def listed(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    real, now = httpx.AsyncClient, asyncio.sleep
    monkeypatch.setattr(
        replay.httpx, "AsyncClient", lambda **how: real(transport=httpx.MockTransport(listed), **how)
    )
    monkeypatch.setattr(replay, "Client", FakeClient)
    monkeypatch.setattr(replay.asyncio, "sleep", lambda _: now(0))
    due = [(0.0, Record(0.0, 32, 64)), (0.0, Record(0.0, 32, 1)), (0.001, Record(1.0, 32, 64))]
    samples: Iterator[float] = iter(range(10**6))
    run = asyncio.run(
        replay.replay("http://a", "secret", due, Window(0.0, 1.0, 1.0, 2), lambda: {"at": next(samples)})
    )
    assert [one.asked for one in run.outcomes] == [32, 1, 32]
    assert {path for path, _, _ in FakeClient.sent} == {"/v1/completions"}
    assert all(len(fields["prompt"]) == 16 and fields["ignore_eos"] for _, _, fields in FakeClient.sent)
    assert FakeClient.last.made == ("http://a", "m", "secret")  # type: ignore[attr-defined]
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert len(run.late) == 3
    assert len(run.samples) >= 2


def test_a_record_has_what_the_report_shows() -> None:
    outcome = Outcome(began=1.0, ended=4.0)
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    outcome.events = [{"choices": [{}]}, {"choices": [{}]}, {"choices": [], "usage": usage}]
    outcome.times = [2.0, 3.0, 3.5]
    row = outcome.record("trace")
    at = row.pop("at")
    assert at == pytest.approx(time.time() - (time.perf_counter() - 1.0), abs=1.0)
    assert row == {
        "ttft": 1.0,
        "tpot": 0.5,
        "output": 3,
        "user": "trace",
        "prompt": 10,
        "cached": 4,
        "took": 3.0,
    }


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{", [], r"trace\.jsonl: line 1: not JSON"),
        (MOONCAKE, ["--start", "5"], "lasts 0 s: no request from --start 5 on"),
        (MOONCAKE, ["--start", "-1"], "no request from --start -1 on"),
    ],
)
def test_a_wrong_trace_or_window_ends_the_command_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, options: list[str], message: str
) -> None:
    monkeypatch.setattr(locust_run, "target", lambda *_: pytest.fail("something ran"))
    monkeypatch.setattr("sys.argv", ["loadtest", "--trace", str(written(tmp_path, text)), *options])
    with pytest.raises(SystemExit, match=message):
        locust_run.main()


def test_a_replay_writes_the_report_and_fails_where_a_request_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Outcome(status=200, done=True, began=time.perf_counter())
    usage = {"prompt_tokens": 1000, "completion_tokens": 5}
    whole.events = [{"choices": [{"finish_reason": "length"}]}, {"choices": [], "usage": usage}]
    whole.times = [whole.began + 0.1, whole.began + 0.2]
    zeros = dict.fromkeys((name for _, name in locust_run.NAMES), 0.0)
    samples = [
        {"at": 1.0, "replicas": 1.0, **zeros},
        {"at": 2.0, "replicas": 1.0, **zeros, "requests": 1.0, "prompt tokens": 1000.0, "output tokens": 5.0},
    ]

    async def ran(*_: Any) -> replay.Replayed:
        return replay.Replayed([whole, Outcome(broken="no answer")], [0.001, 0.002], samples)

    monkeypatch.setattr(locust_run, "replay", ran)
    monkeypatch.setattr(locust_run, "answers", lambda _: True)
    out = tmp_path / "out.json"
    options = ["--trace", str(written(tmp_path, MOONCAKE)), "--host", "http://a", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["loadtest", *options, "--reports", str(tmp_path), "--check"])
    with pytest.raises(SystemExit) as ended:
        locust_run.main()
    assert ended.value.code == 1
    assert "failed: no answer" in capsys.readouterr().out
    figures = {one["name"]: (one["value"], one["holds"]) for one in json.loads(out.read_text())["figures"]}
    assert figures["requests that failed"] == (1, False)
    assert figures["sent after it was due, 99%"] == (2.0, True)
    assert figures["prompt tokens: server differs by"] == (0.0, True)
    assert '"user": "trace"' in (tmp_path / "loadtest.html").read_text()
