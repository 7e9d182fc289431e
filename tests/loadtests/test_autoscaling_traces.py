"""Recorded loads of the autoscaling experiment: the multiplier, files that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from loadtests.experiments.autoscaling import command, workloads
from loadtests.experiments.autoscaling.workloads import JITTER_S, trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
TRACES = os.environ.get("QUIRE_LOAD_TRACES", "")
"""A folder of the published traces; they are not part of the project."""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.txt"
    path.write_text(text)
    return path


def test_azure_is_read_from_its_first_request_on(tmp_path: Path) -> None:
    one = trace(written(tmp_path, AZURE), 1, 1)
    assert one.arrival.tolist() == pytest.approx([0.0, 4.0])
    assert (one.prompt.tolist(), one.output.tolist()) == ([374.0, 396.0], [44.0, 109.0])
    assert (one.name, one.seconds) == ("trace", 4)


def test_requests_are_sorted_and_have_a_token_at_least(tmp_path: Path) -> None:
    one = trace(written(tmp_path, AZURE + "2023-11-16 18:15:44.6805900,0,0\n"), 1, 1)
    assert one.arrival.tolist() == pytest.approx([0.0, 2.0, 6.0])
    assert (one.prompt.tolist(), one.output.tolist()) == ([1.0, 374.0, 396.0], [1.0, 44.0, 109.0])


def test_each_request_comes_so_many_times_a_little_later(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    many = trace(path, 50, 1)
    assert len(many.arrival) == 100
    assert (np.diff(many.arrival) >= 0).all()
    for prompt, at in ((374.0, 0.0), (396.0, 4.0)):
        copies = many.arrival[many.prompt == prompt]
        assert len(copies) == 50
        assert at <= copies.min() < copies.max() <= at + JITTER_S
    assert trace(path, 50, 2).arrival.tolist() != many.arrival.tolist()
    assert trace(path, 50, 1).arrival.tolist() == many.arrival.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: the header is 'a,b'"),
        ("", "line 1: it is empty but must be"),
        ("\n" + HEADER, "line 1: it is empty but must be"),
        (HEADER, "line 2: no request"),
        (HEADER + "now,1,1\n", "line 2: TIMESTAMP is 'now'"),
        (AZURE + "2023-11-16 18:15:46,1,nan\n", "line 4: GeneratedTokens is 'nan'"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 4: 2 columns"),
        (AZURE + "2023-11-16 18:15:46,1,-2\n", "line 4: GeneratedTokens is '-2'"),
        (AZURE + "2023-11-16 18:15:46," + "9" * 5_000 + ",2\n", "line 4: ContextTokens is '999"),
        (AZURE + "1" * 200_000 + ",1,2\n", "line 4: not CSV"),
        (AZURE + "2023-11-16 18:15:46,100000001,2\n", "line 4: ContextTokens is '100000001'"),
        (AZURE + "2033-11-16 18:15:46,1,1\n", "s from the first request to the last, but at most 604800 s"),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_cause(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"trace\.txt: ") as caught:
        trace(written(tmp_path, text), 1, 1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_requests_than_a_run_can_hold_name_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "MOST_REQUESTS", 9)
    path = written(tmp_path, AZURE)
    assert len(trace(path, 4, 1).arrival) == 8
    with pytest.raises(ConfigError, match=r"exceed the 9 of one run; a smaller --times"):
        trace(path, 5, 1)


def test_the_command_refuses_a_wrong_trace_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "in_processes", lambda *_: pytest.fail("something ran"))
    with pytest.raises(SystemExit, match=r"trace\.txt: line 2: TIMESTAMP is 'now'"):
        command.main(["--trace", str(written(tmp_path, HEADER + "now,1,1\n"))])
    with pytest.raises(SystemExit, match="none: cannot be read"):
        command.main(["--trace", str(tmp_path / "none")])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(SystemExit, match="binary: cannot be read"):
        command.main(["--trace", str(binary)])


def test_a_trace_that_no_part_reads_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--trace is read by the part recorded only"):
        command.main(["--only", "step", "--trace", str(written(tmp_path, AZURE))])


def test_the_real_trace_is_read() -> None:
    path = Path(TRACES) / "azure_llm_2023_conv.csv"
    if not TRACES or not path.exists():
        pytest.skip("QUIRE_LOAD_TRACES names no folder with the recorded trace")
    one = trace(path, 1, 1)
    assert len(one.arrival) == 19_366
    assert one.seconds / 3600.0 == pytest.approx(1.0, rel=0.05)
    assert one.arrival[0] == 0.0
