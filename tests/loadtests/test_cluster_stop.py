"""What a cluster prints as it stops: commands print their figures next."""

from __future__ import annotations

import sys
import threading

import pytest
import ray
from ray import serve

from loadtests.cluster import LocalCluster


def test_what_ray_says_as_it_stops_is_not_among_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[str] = []

    def stop(name: str) -> None:
        """As Ray does, which prints from a thread of its own."""
        printing = threading.Thread(target=print, args=(f"(raylet) a task of {name} failed",))
        printing.start()
        printing.join()
        stopped.append(name)
        if name == "serve":
            raise RuntimeError("Serve has not started")

    monkeypatch.setattr(serve, "shutdown", lambda: stop("serve"))
    monkeypatch.setattr(ray, "shutdown", lambda: stop("ray"))
    LocalCluster().stop()
    sys.stdout.write("| a figure |\n")
    assert stopped == ["serve", "ray"]
    assert capsys.readouterr().out == "| a figure |\n"
