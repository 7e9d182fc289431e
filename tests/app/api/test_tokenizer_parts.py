"""A model's tokenizer, read by another process once and kept."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.api import tokenizer_parts
from app.api.tokenizer_parts import TokenizerParts
from engine.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that have been started."""
    found: list[Any] = []
    run = subprocess.run

    def counted(command: list[str], **how: Any) -> Any:
        found.append(command)
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", counted)
    return found


@pytest.fixture
def model(bundled_model: Path, tmp_path: Path) -> Path:
    """A folder with the files of a tokenizer, but no weights."""
    folder = tmp_path / "model"
    shutil.copytree(bundled_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_the_parts_are_those_of_transformers_and_are_kept(model: Path, reads: list[Any]) -> None:
    theirs = AutoTokenizer.from_pretrained(model)
    for _ in range(2):
        parts = TokenizerParts.read(model)
        assert json.loads(parts.backend) == json.loads(theirs.backend_tokenizer.to_str())
        assert parts.chat_template == theirs.chat_template
        assert parts.special_tokens == theirs.special_tokens_map
    assert len(reads) == 1
    assert not list(tokenizer_parts.cache_root().glob("tokenizers/tmp*"))


def test_what_is_kept_is_of_these_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def read_apart(folder: Path) -> str:
        made.append(str(folder))
        return json.dumps({"backend": "{}", "chat_template": str(len(made)), "special_tokens": {}})

    monkeypatch.setattr(tokenizer_parts, "_read_apart", read_apart)
    assert TokenizerParts.read(model).chat_template == "1"
    assert TokenizerParts.read(model).chat_template == "1"
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        path = model / name
        path.write_text(path.read_text() + " ")
        before = len(made)
        assert TokenizerParts.read(model).chat_template == str(before + 1)
        assert TokenizerParts.read(model).chat_template == str(before + 1)
    monkeypatch.setattr(tokenizer_parts, "version", lambda name: f"another {name}")
    before = len(made)
    assert TokenizerParts.read(model).chat_template == str(before + 1)


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"backend": 1}', "\udcff"])
def test_a_damaged_copy_is_made_again(model: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps({"backend": "{}", "chat_template": None, "special_tokens": {}})
    monkeypatch.setattr(tokenizer_parts, "_read_apart", lambda folder: good)
    expected = TokenizerParts.read(model)
    (kept,) = tokenizer_parts.cache_root().glob("tokenizers/*.json")
    kept.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert TokenizerParts.read(model) == expected
    assert kept.read_text() == good


def test_without_a_place_to_keep_it_the_tokenizer_is_read_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    good = json.dumps({"backend": "{}", "chat_template": None, "special_tokens": {}})
    monkeypatch.setattr(tokenizer_parts, "_read_apart", lambda folder: good)
    assert TokenizerParts.read(model).backend == "{}"


def test_a_copy_that_is_cut_short_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left of each try would take the rest of a disk that is nearly full."""
    long = json.dumps({"backend": "x" * 2**20, "chat_template": None, "special_tokens": {}})
    monkeypatch.setattr(tokenizer_parts, "_read_apart", lambda folder: long)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, before[1]))  # Python ignores the signal
    try:
        assert len(TokenizerParts.read(model).backend) == 2**20
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tokenizer_parts.cache_root() / "tokenizers").iterdir()) == []


def test_a_broken_tokenizer_is_one_line(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConfigError, match=f"the tokenizer in {model} cannot be read: ") as caught:
        TokenizerParts.read(model)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_without_a_tokenizer_nothing_is_started(tmp_path: Path, reads: list[Any]) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        TokenizerParts.read(tmp_path)
    assert not reads


def test_several_templates_mean_the_default_one(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "of all", "tool_use": "with tools"}
    assert TokenizerParts.of(tokenizer, model).chat_template == "of all"
    tokenizer.chat_template = {"tool_use": "with tools"}
    assert TokenizerParts.of(tokenizer, model).chat_template is None


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no fast form"):
        TokenizerParts.of(object(), tmp_path)
