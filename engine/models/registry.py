"""Shapes of well-known models, so that memory can be planned without a checkpoint at hand."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.config import ModelConfig


def _llama(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    *,
    architecture: str = "LlamaForCausalLM",
    head_dim: int | None = None,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=intermediate,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        dtype="bfloat16",
    )


def _mistral(layers: int, hidden: int, intermediate: int, vocab: int, context: int) -> ModelConfig:
    return _llama(
        layers, hidden, intermediate, 32, 8, vocab, context, architecture="MistralForCausalLM", head_dim=128
    )


def _qwen2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = False
) -> ModelConfig:
    return _llama(
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        vocab,
        32768,
        architecture="Qwen2ForCausalLM",
        tied=tied,
        qkv_bias=True,
    )


def _qwen3(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int = 8, *, tied: bool = False
) -> ModelConfig:
    return _llama(
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        151936,
        40960,
        architecture="Qwen3ForCausalLM",
        head_dim=128,
        tied=tied,
        qk_norm=True,
    )


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
}
"""By short name. ``llama-3-*`` have the 128k context of Llama 3.1 and later."""
