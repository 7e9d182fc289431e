"""Shapes of well-known models, so that memory can be planned without a checkpoint at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelConfig, parse_model_config


def _shape(
    architecture: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    **more: Any,
) -> ModelConfig:
    """The configuration of a checkpoint whose ``config.json`` has these sizes and the keys ``more``."""
    sizes = {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "dtype": "bfloat16",
    }
    return parse_model_config({**sizes, **more}, where=architecture)


def _llama(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    *,
    tied: bool = False,
) -> ModelConfig:
    sizes = (layers, hidden, intermediate, heads, kv_heads, vocab, context)
    return _shape("LlamaForCausalLM", *sizes, tie_word_embeddings=tied)


def _mistral(layers: int, hidden: int, intermediate: int, vocab: int, context: int) -> ModelConfig:
    sizes = (layers, hidden, intermediate, 32, 8, vocab, context)
    return _shape("MistralForCausalLM", *sizes, head_dim=128, sliding_window=None)


def _qwen2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = False
) -> ModelConfig:
    sizes = (layers, hidden, intermediate, heads, kv_heads, vocab, 32768)
    return _shape("Qwen2ForCausalLM", *sizes, tie_word_embeddings=tied)


def _qwen3(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int = 8, *, tied: bool = False
) -> ModelConfig:
    sizes = (layers, hidden, intermediate, heads, kv_heads, 151936, 40960)
    return _shape("Qwen3ForCausalLM", *sizes, tie_word_embeddings=tied)


def _gemma(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelConfig:
    sizes = (layers, hidden, intermediate, heads, kv_heads, 256000, 8192)
    return _shape("GemmaForCausalLM", *sizes, head_dim=256)


def _gemma2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, scalar: int
) -> ModelConfig:
    sizes = (layers, hidden, intermediate, heads, kv_heads, 256000, 8192)
    return _shape("Gemma2ForCausalLM", *sizes, head_dim=head_dim, query_pre_attn_scalar=scalar)


def _olmo2(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelConfig:
    sizes = (layers, hidden, intermediate, heads, kv_heads, 100352, 4096)
    return _shape("Olmo2ForCausalLM", *sizes, rope_theta=500_000.0)


SHAPES: Mapping[str, ModelConfig] = {
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 49152, 8192, tied=True),
    "smollm2-360m": _llama(32, 960, 2560, 15, 5, 49152, 8192, tied=True),
    "smollm2-1.7b": _llama(24, 2048, 8192, 32, 32, 49152, 8192, tied=True),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8, 128256, 131072),
    "llama-3-405b": _llama(126, 16384, 53248, 128, 8, 128256, 131072),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 128256, 131072, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, 128256, 131072, tied=True),
    "mistral-7b": _mistral(32, 4096, 14336, 32768, 32768),
    "mistral-nemo-12b": _mistral(40, 5120, 14336, 131072, 131072),
    "mistral-small-24b": _mistral(40, 5120, 32768, 131072, 32768),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "gemma-2b": _gemma(18, 2048, 16384, 8, 1),
    "gemma-7b": _gemma(28, 3072, 24576, 16, 16),
    "gemma-2-2b": _gemma2(26, 2304, 9216, 8, 4, 256, 256),
    "gemma-2-9b": _gemma2(42, 3584, 14336, 16, 8, 256, 256),
    "gemma-2-27b": _gemma2(46, 4608, 36864, 32, 16, 128, 144),
    "olmo-2-1b": _olmo2(16, 2048, 8192, 16, 16),
    "olmo-2-7b": _olmo2(32, 4096, 11008, 32, 32),
    "olmo-2-13b": _olmo2(40, 5120, 13824, 40, 40),
    "olmo-2-32b": _olmo2(64, 5120, 27648, 40, 8),
}
"""By short name. ``llama-3-*`` have the 128k context of Llama 3.1 and later."""
