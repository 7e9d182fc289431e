"""HAProxy keeps the ingresses that run while Serve, during a deploy, knows of none."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launch import haproxy

FULL = """global
    maxconn 10
backend http-quire
    server one 127.0.0.1:24002 check observe layer4 error-limit 3 on-error mark-down
    server fallback 127.0.0.1:8500 check backup
backend other
    server two 127.0.0.1:24003 check
    server fallback 127.0.0.1:8500 check backup
"""
EMPTY = """global
    maxconn 10
backend http-quire
    server fallback 127.0.0.1:8500 check backup
"""


def test_servers_of_the_configuration_before_stay_and_the_fallback_backs_them() -> None:
    same, known = haproxy.with_servers(FULL, {})
    assert same == FULL
    config, again = haproxy.with_servers(EMPTY, known)
    assert config == EMPTY.replace(
        "    server fallback 127.0.0.1:8500 check backup",
        "    server one 127.0.0.1:24002 check observe layer4 error-limit 3 on-error mark-down\n"
        "    server fallback 127.0.0.1:8500 backup check",
    )
    assert again == {"http-quire": known["http-quire"]}
    assert "disabled" not in haproxy.changed(config, Path("503"), 1000, 2, {})


def test_where_there_was_no_server_the_fallback_stays_off() -> None:
    config, known = haproxy.with_servers(EMPTY, {})
    assert (config, known) == (EMPTY, {})
    assert "check backup disabled" in haproxy.changed(config, Path("503"), 1000, 2, {})


def test_servers_of_another_serve_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = tmp_path / "servers.json"
    assert haproxy.recall(memory) == {}
    memory.write_text('{"owner": ["7", "100"], "http-quire": ["    server one 127.0.0.1:24002 check"]}')
    assert haproxy.recall(memory) == {}
    monkeypatch.setattr(haproxy, "owner", lambda: ["7", "100"])
    assert haproxy.recall(memory) == {"http-quire": ["    server one 127.0.0.1:24002 check"]}
