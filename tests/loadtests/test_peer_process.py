"""Peers in processes of their own: answers count; one that ends early is an error that names its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtests.experiments.peers.process import PeerError, PeerProcess, peer_processes
from loadtests.experiments.rivals import Workload

WORKLOAD = Workload("x", 2, 3, 0, 5, 0.0)
COUNTS = (
    "import json, sys\n"
    "for line in sys.stdin:\n"
    "    work = json.loads(line)\n"
    "    print(len(work['prompts']) * work['output'], flush=True)\n"
)


def test_a_peer_answers_with_the_tokens_that_it_made(tmp_path: Path) -> None:
    peer = PeerProcess("counter", [sys.executable, "-c", COUNTS], tmp_path, 1, tmp_path / "log")
    try:
        assert peer(WORKLOAD, WORKLOAD.prompts(0)) == 10
        assert peer(WORKLOAD, WORKLOAD.prompts(1)[:1]) == 5
    finally:
        peer.stop()


@pytest.mark.parametrize("code", ["raise SystemExit('no model')", "print('hello')"])
def test_a_peer_that_fails_is_an_error_that_names_its_log(tmp_path: Path, code: str) -> None:
    peer = PeerProcess("counter", [sys.executable, "-c", code], tmp_path, 1, tmp_path / "log")
    try:
        with pytest.raises(PeerError, match=str(tmp_path / "log")):
            peer(WORKLOAD, WORKLOAD.prompts(0))
    finally:
        peer.stop()


@pytest.mark.parametrize("named", [False, True])
def test_absent_peers_are_left_out_by_name(
    tmp_path: Path, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer_processes(str(tmp_path) if named else None, 1, tmp_path) as sides:
        assert sides == {}
    said = capsys.readouterr().err
    assert "vLLM is left out" in said
    assert "llama.cpp" in said
