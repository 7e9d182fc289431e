"""What keeps ``make serve`` from starting is told in one clear line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app import __main__ as command
from app import config, launch
from engine.errors import ConfigError


@pytest.fixture
def taken_port() -> object:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.AppConfig.model_fields:
        monkeypatch.delenv(f"QUIRE_{name.upper()}", raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(list(arguments)) == 1
    line = capsys.readouterr().err
    assert line.startswith("quire: ")
    assert line.count("\n") == 1
    return line


def test_port_in_use(capsys: pytest.CaptureFixture[str], taken_port: int) -> None:
    line = refusal(capsys, "--port", str(taken_port))
    assert f"127.0.0.1:{taken_port}" in line
    assert "--port" in line


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_no_port(capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert f"port='{port}'" in refusal(capsys, f"port={port}")


def test_unknown_and_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "modell" in refusal(capsys, "modell=x")
    assert "engine_replicas='none of them'" in refusal(capsys, "engine_replicas=none of them")
    assert "'model' is no option=value" in refusal(capsys, "model")
    assert "dtype='int3'" in refusal(capsys, "dtype=int3")


def test_missing_model_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port = launch.free_port(0)
    line = refusal(capsys, f"model={tmp_path / 'nothing'}", f"port={port}")
    assert "nothing" in line


def test_too_little_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 2**20)
    options = config.load({"engine_replicas": 3, "kv_memory": "1GiB"}, {})
    launch.check_memory(options, tmp_path, available=5 * 2**30)
    with pytest.raises(ConfigError, match=r"3 engine replicas need about 4\.8 GiB .* 4\.0 GiB are available"):
        launch.check_memory(options, tmp_path, available=4 * 2**30)


def test_free_port_prefers_the_usual_one(taken_port: int) -> None:
    assert launch.free_port(taken_port) != taken_port
    free = launch.free_port(0)
    assert launch.free_port(free) == free
