"""The engine's options refuse what cannot work, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"block_size": 0}, ["block_size=0", "at least 1"]),
        ({"memory_fraction": 0.0}, ["memory_fraction=0.0", "above 0"]),
        ({"recovery": "hope"}, ["recovery='hope'", "auto, swap, recompute"]),
        ({"swap_space": -1}, ["swap_space=-1", "at least 0"]),
        ({"recovery": "swap", "swap_space": 0}, ["recovery=swap", "set swap_space"]),
        ({"priority_aging": 0.0}, ["priority_aging=0.0", "above 0"]),
        ({"priority_aging": -2.5}, ["priority_aging=-2.5"]),
        ({"priority_aging": math.nan}, ["priority_aging=nan"]),
        ({"num_blocks": "many"}, ["num_blocks='many'", "must be an integer or None"]),
        ({"num_blocks": 2.0}, ["num_blocks=2.0", "integer"]),
        ({"block_size": None}, ["block_size=None", "must be an integer"]),
        ({"block_size": True}, ["block_size=True", "must be an integer"]),
        ({"memory_fraction": "half"}, ["memory_fraction='half'", "must be a number"]),
        ({"prefix_caching": 1}, ["prefix_caching=1", "must be true or false"]),
        ({"device": 5}, ["device=5", "must be text"]),
        ({"dtype": ["float32"]}, ["dtype=a list of 1", "bfloat16"]),
        ({"kv_memory": "2 cows"}, ["'2 cows'"]),
    ],
    ids=str,
)
def test_wrong_options_are_one_line_that_names_them(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="m", **options)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("fp16", "float16"),
        ("float", "float32"),
        ("FP32", "float32"),
        ("float16", "float16"),
        ("auto", "auto"),
    ],
)
def test_data_types_have_their_usual_names(name: str, meant: str) -> None:
    assert EngineConfig(model="m", dtype=name).dtype == meant  # type: ignore[arg-type]


def test_recovery_options_take_their_whole_range() -> None:
    for recovery in ("auto", "recompute"):
        EngineConfig(model="m", recovery=recovery, swap_space=0, priority_aging=0.25)
    EngineConfig(model="m", recovery="swap", swap_space=1)
    EngineConfig(model="m", recovery="swap")  # whether there is memory shows when the pool is planned


def test_sizes_may_be_words_and_whole_numbers_may_be_numbers() -> None:
    config = EngineConfig(model="m", kv_memory="2GiB", memory_fraction=1)  # type: ignore[arg-type]
    assert (config.kv_memory, config.memory_fraction) == (2 << 30, 1)
