"""A small random model with the bundled tokenizer: real text, few computations, no transformers to load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "manifest.json")
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def save_small(folder: Path, tokenizer: Path, seed: int, context: int) -> Path:
    """Save the model with the tokenizer of the folder ``tokenizer``; returns ``folder``."""
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "max_position_embeddings": context}))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.5 if "embed" in name else 1.3 * shape[-1] ** -0.5)
        if len(shape) > 1
        else 1.0 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in _shapes().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in tokenizer.iterdir():
        if file.name not in _MODEL_FILES:
            shutil.copy(file, folder)
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    """Of all weights."""
    hidden, wide, vocabulary = (_CONFIG[f] for f in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden * _CONFIG["num_key_value_heads"] // _CONFIG["num_attention_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    layers = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(_CONFIG["num_hidden_layers"])
        for name, shape in layer.items()
    }
    around = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    return {**around, **layers}
