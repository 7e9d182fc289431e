"""The decoder of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3) over a paged KV pool."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import rope_table
from kernels.interface import AttentionMetadata, HeadLayout, Kernels, PackedLinear, QKNorm


class WeightSource(Protocol):
    """Gives each weight once, by the name it has in a Hugging Face checkpoint."""

    def fill(self, name: str, out: Tensor) -> None:
        """Copy the weight called ``name`` into ``out``, converting its dtype; shapes must be equal."""


class DecoderLayer:
    """The weights of one layer: query, key and value projections fused, gate and up projections fused."""

    __slots__ = ("attention_norm", "down", "gate_up", "mlp_norm", "out", "qk_norm", "qkv", "window")

    def __init__(self, config: ModelConfig, index: int, weights: _Weights) -> None:
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        hidden, q_dim, kv_dim = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        self.window = config.window(index)
        self.attention_norm = weights.vector(f"{prefix}.input_layernorm.weight", hidden)
        self.qkv = weights.linear(
            hidden,
            [(f"{attention}.q_proj", q_dim), (f"{attention}.k_proj", kv_dim), (f"{attention}.v_proj", kv_dim)],
            config.qkv_bias,
        )
        self.qk_norm: QKNorm | None = None
        if config.qk_norm:
            self.qk_norm = QKNorm(
                weights.vector(f"{attention}.q_norm.weight", config.head_dim),
                weights.vector(f"{attention}.k_norm.weight", config.head_dim),
                config.rms_norm_eps,
            )
        self.out = weights.linear(q_dim, [(f"{attention}.o_proj", hidden)], config.out_bias)
        self.mlp_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        inner = config.intermediate_size
        self.gate_up = weights.linear(
            hidden, [(f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner)]
        )
        self.down = weights.linear(inner, [(f"{prefix}.mlp.down_proj", hidden)])


class Decoder:
    """Embedding, layers and output head; holds weights only, never a request's state.

    A row of the result depends on that row and on the keys and values that it attends to, as the kernels
    promise; nothing here looks at the number of rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightSource,
    ) -> None:
        """Take every weight from ``weights``, layer by layer, so that at most one layer is held twice."""
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.layout = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        self.scale = config.head_dim**-0.5
        self.cos_sin = rope_table(config, device)
        reader = _Weights(kernels, dtype, device, weights)
        self.embedding = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index, reader) for index in range(config.num_layers)]
        self.norm = reader.vector("model.norm.weight", config.hidden_size)
        self.head: PackedLinear
        if config.tie_word_embeddings:
            self.head = kernels.pack_linear(self.embedding, None)
        else:
            self.head = reader.linear(config.hidden_size, [("lm_head", config.vocab_size)])

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, kv_pool: Tensor, metadata: AttentionMetadata, sample_rows: Tensor
    ) -> Tensor:
        """One step: write the keys and values of the new tokens, return the logits of some rows.

        Args:
            token_ids: int64 ``[T]``, the new tokens of all requests, in the order of ``metadata``.
            kv_pool: ``[blocks, layers, 2, block_size, kv_heads, head_dim]`` in the model's dtype.
            metadata: where the rows stand.
            sample_rows: int64 ``[S]``, the rows of ``token_ids`` whose logits are wanted.

        Returns:
            float32 ``[S, vocab_size]``, rounded to the model's dtype on the way as transformers does.
        """
        kernels, eps = self.kernels, self.config.rms_norm_eps
        residual = self.embedding[token_ids]
        x = kernels.rms_norm(residual, self.layers[0].attention_norm, eps)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kv_layer = kv_pool[:, index]
            qkv = kernels.linear(x, layer.qkv)
            q = kernels.rope_and_write_kv(qkv, self.layout, self.cos_sin, kv_layer, metadata, layer.qk_norm)
            if index == last and not sample_rows.numel():
                break
            attended = kernels.attention(q, kv_layer, metadata, self.scale, layer.window).flatten(1)
            if index == last:
                # All keys and values are written, so only the sampled rows need the rest.
                attended, residual = attended[sample_rows], residual[sample_rows]
            x = kernels.linear(attended, layer.out)
            x = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = kernels.linear(kernels.silu_mul(kernels.linear(x, layer.gate_up)), layer.down)
            next_norm = self.norm if index == last else self.layers[index + 1].attention_norm
            x = kernels.add_rms_norm(x, residual, next_norm, eps)
        if not sample_rows.numel():
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        return kernels.linear(x, self.head).float()


class _Weights:
    """Allocates and fills tensors in the model's dtype, and packs those that are multiplied."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device, source: WeightSource
    ) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._source = source

    def vector(self, name: str, size: int) -> Tensor:
        return self._fill(name, self._empty(size))

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._fill(name, self._empty(rows, columns))

    def linear(self, in_features: int, parts: list[tuple[str, int]], bias: bool = False) -> PackedLinear:
        """The projections ``parts`` (name, output features) stacked into one matrix."""
        sizes = [size for _, size in parts]
        weight = self._empty(sum(sizes), in_features)
        for (name, _), rows in zip(parts, torch.split(weight, sizes), strict=True):
            self._fill(f"{name}.weight", rows)
        bias_tensor: Tensor | None = None
        if bias:
            bias_tensor = self._empty(sum(sizes))
            for (name, _), rows in zip(parts, torch.split(bias_tensor, sizes), strict=True):
                self._fill(f"{name}.bias", rows)
        return self._kernels.pack_linear(weight, bias_tensor)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)

    def _fill(self, name: str, out: Tensor) -> Tensor:
        self._source.fill(name, out)
        return out
