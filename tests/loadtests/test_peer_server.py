"""The comparison with another server: medians, ratios with their spread, bars; a failed client is an error."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from loadtests.cluster import running
from loadtests.experiments.peers.process import PeerError
from loadtests.experiments.peers.server import MEASURES, figures_of, run_client


def rounds(*ratios: float) -> list[tuple[dict[str, float], dict[str, float]]]:
    return [(dict.fromkeys(MEASURES, 10 * ratio), dict.fromkeys(MEASURES, 10.0)) for ratio in ratios]


def test_ratios_are_of_each_round_and_carry_their_spread() -> None:
    figures = figures_of("C", 2.0, rounds(1.9, 2.5, 2.1), barred=True)
    found = {figure.name: figure for figure in figures}
    rate = found["C, output_throughput, ours / vLLM (1.90 to 2.50)"]
    assert rate.value == pytest.approx(2.1)
    assert (rate.bar, rate.holds) == (2.0, True)
    waits = found["C, median_ttft, ours / vLLM (1.90 to 2.50)"]
    assert (waits.bar, waits.holds) == (0.5, False)
    assert found["C, p99_ttft, ours"].value == 21.0
    assert len(figures) == 9


def test_a_single_prompt_is_judged_by_its_first_token_alone() -> None:
    figures = figures_of("500", None, rounds(0.8), barred=True)
    assert [(one.value, one.bar) for one in figures] == [(8.0, None), (10.0, None), (0.8, 0.85)]
    assert all(one.bar is None for one in figures_of("500", None, rounds(0.8), barred=False))


def test_a_client_that_fails_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    script = tmp_path / "vllm" / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\necho no such option >&2\nexit 2\n")
    script.chmod(0o755)
    with pytest.raises(PeerError, match="no such option"):
        run_client(tmp_path, "http://127.0.0.1:1", "ours", "random", 0)


def test_a_server_ends_with_its_context_even_if_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with running([sys.executable, "-c", "import time; time.sleep(600)"], lambda: True) as process:
        os.killpg(process.pid, signal.SIGSTOP)
    assert not process.is_running()


def test_a_server_that_ends_at_once_is_an_error_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RuntimeError, match="no such model"), running(command, lambda: False):
        pass
