"""A deploy that cannot work is refused with one line before anything is replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.serve.exceptions import RayServeException

from app import application, config
from app.launch import model_check, model_store, placement
from app.launch.model_check import Finding, check_models, look_at_model
from engine.errors import ConfigError


@pytest.fixture
def folder(bundled_model: Path, tmp_path: Path) -> Path:
    """A copy of the bundled model to do harm to; its weights are links."""
    for path in bundled_model.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).symlink_to(path)
        else:
            shutil.copy(path, tmp_path)
    return tmp_path


def options(folder: Path | str, **args: Any) -> config.AppConfig:
    return config.load({"model": str(folder), "device": "cpu", **args}, {})


def served(folder: Path | str, **args: Any) -> tuple[config.ServedModel, ...]:
    return config.served_models(options(folder, **args))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_whole_model_passes(folder: Path) -> None:
    assert look_at_model(options(folder), 1) == Finding()


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"^model '/no/such/folder' is not a folder, not a hub id .*"
    ) as caught:
        check_models(served("/no/such/folder"))
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_unknown(folder: Path) -> None:
    change_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        check_models(served(folder))


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_models(served(folder))


def test_no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        check_models(served(folder))


def test_no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        check_models(served(folder))


def test_memory_that_the_machine_does_not_have(folder: Path) -> None:
    much = 2 * psutil.virtual_memory().total
    with pytest.raises(ConfigError, match=r"kv_memory asks for .* lower kv_memory"):
        check_models(served(folder, kv_memory=much, engine_replicas=1))


def test_memory_for_no_more_than_was_asked_for(folder: Path) -> None:
    half = psutil.virtual_memory().total // 2
    assert look_at_model(options(folder, kv_memory=half, engine_replicas=1), 1) == Finding(room=False)


def test_what_the_start_will_fetch_is_not_fetched_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    assert look_at_model(options("smollm2-135m-instruct"), 1) == Finding()
    assert list(tmp_path.iterdir()) == []


def test_of_the_hub_only_small_files_are_fetched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    asked: list[list[str]] = []

    def from_hub(model: str, files: list[str]) -> Path:
        asked.append(files)
        return folder

    monkeypatch.setattr(model_store, "_from_hub", from_hub)
    assert look_at_model(options("Some/Model"), 1) == Finding()
    assert not any("safetensors" in name for name in asked[0])
    change_config(folder, architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM" in look_at_model(options("Some/Model"), 1).error


def test_every_node_that_can_hold_an_engine_is_asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The builder's own node only if it is one of them: a head may have no model."""
    asked: dict[str, str] = {}

    def ask(nodes: dict[str, str], *_: object) -> dict[str, Finding]:
        asked.update(nodes)
        return findings

    class Context:
        def get_node_id(self) -> str:
            return "head"

    monkeypatch.setattr(placement, "engine_nodes", lambda _: {"one": "10.0.0.1", "two": "10.0.0.2"})
    monkeypatch.setattr(model_check.ray, "get_runtime_context", Context)
    monkeypatch.setattr(model_check, "_ask", ask)
    findings = {"10.0.0.1": Finding(), "10.0.0.2": Finding(room=False)}
    assert check_models(served("/only/there")) is False
    assert asked == {"one": "10.0.0.1", "two": "10.0.0.2"}
    findings = {"10.0.0.1": Finding(), "10.0.0.2": Finding("it is not there")}
    with pytest.raises(ConfigError, match=r"^on node 10\.0\.0\.2: it is not there$"):
        check_models(served("/only/there"))


def test_serve_gets_the_line_without_a_traceback() -> None:
    with pytest.raises(RayServeException, match=r"^model '/no/such/folder' is not a folder"):
        application.build({"model": "/no/such/folder"})
    with pytest.raises(RayServeException, match=r"^block_size=0: must be at least 1$"):
        application.build({"block_size": 0})
