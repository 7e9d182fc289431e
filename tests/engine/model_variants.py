"""Checkpoints beyond the families' usual ones, and what transformers makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-4


def expect(model: Any, sequence: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(sequence[None]).logits[0]
    return logits


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim of its own": ("Llama", {"head_dim": 20}),
    "head_dim that fills no vector": ("Llama", {"head_dim": 6, "num_key_value_heads": 1}),
    "every head its own keys": ("Llama", {"num_key_value_heads": 4}),
    "biases on all projections": ("Llama", {"attention_bias": True}),
    "biases and norms": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "group of three": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "short window": ("Mistral", {"sliding_window": 7}),
    "window of one block": ("Mistral", {"sliding_window": 4, "head_dim": 16}),
    "windows on the upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "windows on chosen layers": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "windows on every other layer": (
        "Gemma2",
        {"sliding_window": 7, "num_hidden_layers": 3},
    ),
    "caps as released": (
        "Gemma2",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 12},
    ),
    "tight caps": ("Gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}),
    "no caps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "wide heads": ("Gemma2", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "biases and untied": ("Gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    "multi-query": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "wide heads, biases and untied": (
        "Gemma",
        {"head_dim": 256, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "norms of rows, every head its own keys": ("Olmo2", {"num_key_value_heads": 4, "head_dim": 20}),
    "norms of rows, biases, one KV head": (
        "Olmo2",
        {"num_key_value_heads": 1, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "another activation": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
}
