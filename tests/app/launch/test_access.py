"""A server that other machines reach needs keys, or the operator's word that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import config
from app.api.keys import ENVIRONMENT, digest_of
from app.launch.access import check_access
from engine.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_alone_needs_no_keys(host: str) -> None:
    assert check_access(config.load({"host": host}, {})) == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu-1.example"])
def test_other_machines_need_keys_or_open_access(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(
        ConfigError, match=f"host={host} admits other machines.*set api_keys_file, or open_access"
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
    found = check_access(config.load({"api_keys_file": "keys.yaml", "host": "0.0.0.0"}, {}))
    assert found == {"api_keys_file": str(tmp_path / "keys.yaml")}
