"""Tests of the engine client run with attempts that go through Serve, and on the channels' own connections."""

from __future__ import annotations

import loopback
import pytest
from loopback_connection import open_in_memory, possible_in_memory

from app.channel.ingress_connection import IngressConnection


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"started", "LoopbackHandle"}.isdisjoint(vars(metafunc.module)):
        return
    ways = getattr(metafunc.module, "CONNECTED", (False, True))
    if metafunc.definition.get_closest_marker("serve_calls"):
        ways = (False,)
    ids = ["connected" if way else "through Serve" for way in ways]
    metafunc.parametrize("connected", ways, ids=ids, indirect=True)


@pytest.fixture(autouse=True)
def connected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether channels of ``LoopbackHandle`` have connections of their own, in memory."""
    connects: bool = getattr(request, "param", False)
    monkeypatch.setattr(loopback, "CONNECTS", connects)
    monkeypatch.setattr(IngressConnection, "open", open_in_memory)
    monkeypatch.setattr(IngressConnection, "possible", possible_in_memory)
    return connects
