"""A server that other machines reach needs keys, or the operator's word that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import certificate

from app import config
from app.api.keys import ENVIRONMENT, digest_of
from app.launch import haproxy
from app.launch.access import check_access, check_tls
from engine.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_alone_needs_no_keys(host: str) -> None:
    assert check_access(config.load({"host": host}, {})) == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu-1.example"])
def test_other_machines_need_keys_or_open_access(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(
        ConfigError,
        match=f"host={host} accepts connections from other machines.*set api_keys_file, or open_access",
    ):
        check_access(config.load({"host": host}, {}))
    assert check_access(config.load({"host": host, "open_access": "true"}, {})) == {}
    monkeypatch.setenv(ENVIRONMENT, f"a:{digest_of('key')}")
    assert check_access(config.load({"host": host}, {})) == {}


def test_the_key_file_is_read_and_its_path_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the key file keys\.yaml cannot be read"):
        check_access(config.load({"api_keys_file": "keys.yaml"}, {}))
    Path("keys.yaml").write_text("keys: []")
    options = {"api_keys_file": "keys.yaml", "host": "0.0.0.0", "audit_log": "audit"}
    found = check_access(config.load(options, {}))
    assert found == {"api_keys_file": str(tmp_path / "keys.yaml"), "audit_log": str(tmp_path / "audit")}
    with pytest.raises(ConfigError, match="audit_log=none/audit cannot be written: No such file"):
        check_access(config.load({"audit_log": "none/audit"}, {}))


def test_a_certificate_that_cannot_serve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(haproxy.BINARY, raising=False)
    check_tls(None)
    good = certificate(tmp_path)
    whole = good.read_text()
    cut = whole.index("-----BEGIN CERT")
    monkeypatch.setattr("app.launch.serving.haproxy_expected", lambda: True)
    check_tls(str(good))
    for number, text in enumerate((whole[:cut], whole[cut:], "", "no PEM")):
        (tmp_path / str(number)).write_text(text)
        with pytest.raises(ConfigError, match="must be a PEM file with a certificate and its private key"):
            check_tls(str(tmp_path / str(number)))
    with pytest.raises(ConfigError, match=r"tls_file=none must be .*No such file"):
        check_tls("none")
    monkeypatch.setenv(haproxy.BINARY, "/usr/sbin/haproxy")
    with pytest.raises(ConfigError, match="needs Quire's own HAProxy"):
        check_tls(str(good))
