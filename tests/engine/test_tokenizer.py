"""Tokenizer files that cannot be read are one clear error, whatever the libraries raise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    "text", ["{}", "[]", "", "null", '{"model": {}}', '{"version": "1.0", "model": 5}', "{" * 5000]
)
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_in_which_the_library_panics_is_one_line(tmp_path: Path) -> None:
    """Such an error of a library in Rust is no ``Exception``."""
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="cannot be read: Precompiled") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_a_tokenizer_prompts_are_token_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only the offline engine works, with prompts as token ids"):
        load_tokenizer(tmp_path)
