"""Reading config.json: both spellings, the families' defaults, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from model_checkpoints import FAMILIES, ROPES, tiny_config
from tiny_engines import TINY_MODELS

from engine.errors import ConfigError
from engine.models.config import FAMILIES as ARCHITECTURES
from engine.models.config import ModelConfig, RopeType, parse_model_config, read_model_config
from engine.models.folders import local_folder
from engine.models.rope import inverse_frequencies
from kernels.interface import Activation

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}


def parse(family: str = "Llama", **changes: Any) -> ModelConfig:
    return parse_model_config({**BASE, "architectures": [f"{family}ForCausalLM"], **changes})


def test_defaults_where_the_file_is_silent() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim) == (8, 8)
    assert config.rope.theta == 10_000.0
    assert config.rope.type is RopeType.DEFAULT
    assert not config.tie_word_embeddings
    assert config.windows == ()
    assert config.dtype is None
    assert parse("Qwen3").head_dim == 128
    assert parse("Qwen3").family.qk_norm
    assert parse("Qwen2").qkv_bias
    assert not parse("Qwen2").out_bias
    assert parse("Mistral").window(3) == 4096


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers_about_its_own_defaults(family: str) -> None:
    theirs = tiny_config(family)
    config = parse_model_config({**theirs.to_dict(), "architectures": [f"{family}ForCausalLM"]})
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 12)
    assert config.norm_eps == theirs.rms_norm_eps
    kinds = getattr(theirs, "layer_types", None) or []
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert config.windows == (windows if any(windows) else ())
    assert config.activation == getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    assert config.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert config.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert config.attention_scale == getattr(theirs, "query_pre_attn_scalar", config.head_dim) ** -0.5


def test_every_family_is_tested() -> None:
    assert {f"{family}ForCausalLM" for family in FAMILIES} == set(ARCHITECTURES)
    assert {family for family, _ in TINY_MODELS.values()} == set(FAMILIES)


def test_every_family_is_written_down() -> None:
    root = Path(__file__).parents[3]
    rows = re.findall(r"^\| `(\w+ForCausalLM)` \|", (root / "docs/models.md").read_text(), flags=re.MULTILINE)
    assert rows == list(ARCHITECTURES)
    assert f"{len(ARCHITECTURES)} decoder families" in (root / "README.md").read_text()


def test_gemma_as_released() -> None:
    """The keys of google/gemma-7b, and the same where the file is silent and transformers has defaults."""
    keys = {
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": None,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
    }
    config = parse("Gemma", **keys)
    assert config.tie_word_embeddings
    assert config.activation is Activation.GELU_TANH
    assert (config.attention_soft_cap, config.logit_soft_cap, config.windows) == (None, None, ())
    assert config.attention_scale == 1 / 16
    sizes = {key: keys[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {key: keys[key] for key in ("num_attention_heads", "num_hidden_layers")}
    silent = parse("Gemma", **sizes, max_position_embeddings=None)
    assert dataclasses.replace(silent, bos_token_id=2, eos_token_ids=(1,), dtype="bfloat16") == config
    # What the first files say; the weights were trained with the approximation.
    assert parse("Gemma", hidden_act="gelu").activation is Activation.GELU_TANH
    with pytest.raises(ConfigError, match="hidden_act 'relu' is not supported"):
        parse("Gemma", hidden_act="relu")


def test_gemma2_as_released() -> None:
    """The keys of google/gemma-2-2b-it, and the same where the file is silent and transformers has defaults."""
    keys = {
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
    }
    config = parse("Gemma2", **keys)
    assert config.tie_word_embeddings
    assert config.activation is Activation.GELU_TANH
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.attention_scale == 1 / 16
    assert config.windows == (4096, None) * 13
    assert config.largest_window is None  # some layers see all, so no block may go
    assert config.eos_token_ids == (1, 107)
    sizes = {key: keys[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {key: keys[key] for key in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")}
    silent = parse("Gemma2", **sizes)
    ids = {"bos_token_id": 2, "eos_token_ids": (1, 107), "dtype": "bfloat16"}
    assert dataclasses.replace(silent, **ids) == config
    uncapped = parse("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=None)
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap, uncapped.windows) == (None, None, ())
    assert parse(attn_logit_softcapping=50.0).attention_soft_cap is None  # Llama has no such key


def test_olmo2_as_released() -> None:
    """The keys of allenai/OLMo-2-1124-7B, and the defaults of transformers where the file is silent."""
    config = parse(
        "Olmo2",
        attention_bias=False,
        eos_token_id=100257,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=11008,
        max_position_embeddings=4096,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
        torch_dtype="float32",
        vocab_size=100352,
    )
    assert (config.head_dim, config.norm_eps, config.rope.theta) == (128, 1e-6, 500_000.0)
    assert config.qk_norm_sizes == (4096, 4096)
    silent = parse("Olmo2", max_position_embeddings=None)
    assert (silent.norm_eps, silent.max_position_embeddings, silent.num_kv_heads) == (1e-5, 2048, 8)
    assert not silent.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers_where_the_file_is_silent(family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    sizes = {
        key: getattr(theirs, key) for key in BASE if key not in ("architectures", "max_position_embeddings")
    }
    config = parse(family, **sizes, max_position_embeddings=None)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_old_and_new_spelling_of_rope(kind: str) -> None:
    new = dict(ROPES[kind])
    old = {key: value for key, value in new.items() if key not in ("rope_theta", "rope_type")}
    for key in ("rope_type", "type"):
        written = parse(rope_theta=new["rope_theta"], rope_scaling={**old, key: kind})
        assert written.rope == parse(rope_parameters=new).rope
    assert parse(rope_theta=500.0, rope_scaling=None).rope.theta == 500.0


def test_yarn_lengthens_the_context_that_it_was_scaled_from() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse(rope_scaling=scaling).max_position_embeddings == 1024
    assert parse(rope_scaling={"type": "yarn", "factor": 4.0}).max_position_embeddings == 256


def test_windows() -> None:
    assert parse("Mistral", sliding_window=None).windows == ()
    assert parse("Mistral", sliding_window=16).windows == (16,) * 4
    assert parse("Qwen2", sliding_window=16).windows == ()
    upper = parse("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=3)
    assert upper.windows == (None, None, None, 16)
    everywhere = parse("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    assert everywhere.windows == (16,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = parse("Qwen3", use_sliding_window=True, sliding_window=16, layer_types=kinds)
    assert [mixed.window(layer) for layer in range(4)] == [16, None, 16, None]
    assert parse("Gemma2", sliding_window=16).windows == (16, None, 16, None)
    assert parse("Gemma2", sliding_window=16, layer_types=kinds[::-1]).windows == (None, 16, None, 16)
    assert parse("Gemma2", layer_types=["sliding_attention"] * 4).largest_window == 4096
    assert parse(sliding_window=16).windows == ()  # Llama has no such key


def test_end_tokens_of_generation_config_come_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 7, "bos_token_id": 1}))
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    config = read_model_config(tmp_path)
    assert config.eos_token_ids == (7, 9)
    assert config.bos_token_id == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
    "no architecture": ({"architectures": None}, "architecture unnamed is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "both directions": ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    "bias in the MLP": ({"mlp_bias": True}, "mlp_bias is not supported"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
    "code": ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope' is not supported"),
    "rope per layer": ({"rope_parameters": {"full_attention": {}}}, "differ between layer types"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor is None but"),
    "factor": ({"rope_scaling": {"type": "yarn", "factor": -1.0}}, "rope_parameters.factor is -1.0 but"),
    "theta": ({"rope_theta": 1}, "rope_theta is 1.0 but must be above 1"),
    "llama3 without a band": (
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor 4.0 must be above 0 and below high_freq_factor 4.0",
    ),
    "heads": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    "odd head": ({"head_dim": 9}, "head_dim is 9, but"),
    "more heads than dimensions": (
        {"head_dim": None, "hidden_size": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
        "head_dim is 0 but must be a positive integer",
    ),
    "one endless head": (
        {"head_dim": None, "hidden_size": 2**20, "num_attention_heads": 1, "num_key_value_heads": 1},
        "head_dim is 1048576 but must be at most",
    ),
    "missing size": ({"hidden_size": None}, "hidden_size is missing"),
    "wrong type": ({"vocab_size": "many"}, "vocab_size is 'many' but must be a positive integer"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers is 0 but must be"),
    "endless vocabulary": ({"vocab_size": 10**12}, "vocab_size is 1000000000000 but must be at most"),
    "endless head": ({"head_dim": 10**9}, "head_dim is 1000000000 but must be at most"),
    "endless layers": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000 but must be",
    ),
    "endless context": (
        {"max_position_embeddings": 10**30},
        "must be at most 4194304",
    ),
    "endless number": (
        {"hidden_size": 10**4000},
        "hidden_size is an integer of 13288 bits but",
    ),
    "negative epsilon": ({"rms_norm_eps": -1}, "rms_norm_eps is -1.0 but must be above 0"),
    "endless factor": (
        {"rope_scaling": {"type": "yarn", "factor": 1e300}},
        "factor is 1e.300 but",
    ),
    "scaled context": (
        {"rope_scaling": {"type": "yarn", "factor": 1e5, "original_max_position_embeddings": 4096}},
        "makes a context of 4.096e.08 tokens, but at most 4194304",
    ),
    "turns": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}},
        "rope_parameters.beta_fast is -1.0 but must be above 0",
    ),
    "magnitude": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": -14.0}},
        "rope_parameters.mscale_all_dim is -14.0 but must be above 0",
    ),
    "endless attention factor": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1e39}},
        "rope_parameters.attention_factor is 1e.39 but must be from",
    ),
    "endless theta": ({"rope_theta": 1e300}, "rope_theta is 1e.300 but must be above 1 and at most"),
    "end token": ({"eos_token_id": "x"}, "eos_token_id is 'x' but must be"),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0.0 but must be from 1e-06 to 1e.06"),
        ({"attn_logit_softcapping": 1e39}, "attn_logit_softcapping is 1e.39 but must be from 1e-06 to 1e.06"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0 but must be from"),
        ({"final_logit_softcapping": 1e300}, "final_logit_softcapping is 1e.300 but must be from"),
        ({"query_pre_attn_scalar": 1e-300}, "query_pre_attn_scalar is 1e-300 but must be from"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar is '256' but must be a finite number"),
        (
            {"hidden_activation": "gelu"},
            "hidden_activation 'gelu' is not supported; supported: 'silu', 'gelu_py",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported"),
    ],
)
def test_gemma2_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("Gemma2", **changes)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        parse_model_config({**BASE, **changes}, where="/models/x")
    assert str(caught.value).startswith("/models/x: ")
    assert "\n" not in str(caught.value)


def test_unknown_layer_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer type 'chunked_attention' is not supported"):
        parse("Qwen3", use_sliding_window=True, layer_types=["chunked_attention"] * 4)
    with pytest.raises(ConfigError, match="layer_types has 3 entries for 4 layers"):
        parse("Qwen3", use_sliding_window=True, layer_types=["full_attention"] * 3)
    with pytest.raises(ConfigError, match="layer_types that differ"):
        parse("Mistral", layer_types=["full_attention", "sliding_attention"] * 2)


@pytest.mark.parametrize(
    "value", [5, "full_attention", {"full_attention": 1}, [["full_attention"]] * 4, [5] * 4]
)
def test_layer_types_of_other_types_are_refused(value: Any) -> None:
    for family in ("Mistral", "Qwen3", "Gemma2"):
        with pytest.raises(ConfigError, match="layer"):
            parse(family, use_sliding_window=True, layer_types=value)


def test_end_tokens_outside_the_vocabulary_are_left_out() -> None:
    assert parse_model_config({**BASE, "eos_token_id": [5, BASE["vocab_size"], 10**9]}).eos_token_ids == (5,)


ODD = st.sampled_from(
    [None, True, 0, -1, 1, 2, 10**9, 10**12, 10**400, -1.0, 0.5, 1e-300, 1e300, "x", [], [1], {}]
)
KEYS = st.sampled_from(
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "hidden_act"),
        *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "rope_theta"),
        *("rope_scaling", "rope_parameters", "eos_token_id", "bos_token_id", "dtype", "architectures"),
        *("tie_word_embeddings", "attention_bias", "quantization_config", "auto_map", "mlp_bias"),
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    ]
)
ROPE = st.dictionaries(
    st.sampled_from(
        [
            *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
            *("mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "rope_theta"),
        ]
    ),
    ODD,
)


@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.dictionaries(KEYS, ODD, max_size=4),
    st.sampled_from(["linear", "llama3", "yarn", None]),
    ROPE,
)
def test_any_config_is_either_read_or_refused(
    architecture: str, changes: dict[str, Any], kind: str | None, rope: dict[str, Any]
) -> None:
    raw = {**BASE, "architectures": [architecture], **changes}
    if kind is not None:
        raw["rope_parameters"] = {"rope_type": kind, **rope}
    try:
        config = parse_model_config(raw)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert len(str(error)) < 400  # noqa: PT017
        return
    assert config.num_parameters > 0
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
    assert bool(torch.isfinite(frequencies).all())
    used = [scale, config.attention_scale, config.attention_soft_cap, config.logit_soft_cap]
    assert all(math.isfinite(np.float32(each)) for each in used if each is not None), "kernels take float32"


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_model_config(tmp_path / "nowhere")
    for name in ("x" * 5000, "\x00"):  # as no folder can be called
        with pytest.raises(ConfigError, match="does not exist"):
            read_model_config(name)
        with pytest.raises(ConfigError, match="does not exist"):
            local_folder(name)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match="nests too deeply"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_model_config(tmp_path)
