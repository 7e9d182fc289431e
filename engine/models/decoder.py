"""One decoder for every supported family; a family is data, see :mod:`engine.models.config`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.models.config import Family, ModelConfig, QKNormSpan
from engine.models.packer import Packer
from engine.models.rope import rope_table
from kernels.interface import AttentionMetadata, AttentionOptions, Choices, HeadLayout, PackedLinear, QKNorm


class WeightSource(Protocol):
    """Gives each weight once, by its name in a Hugging Face checkpoint."""

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise an error unless there is a weight called ``name`` with this shape; costs next to nothing."""

    def fill(self, name: str, out: Tensor) -> None:
        """Copy the weight called ``name`` into ``out``, converting its dtype; shapes must be equal."""


class DecoderLayer:
    """The weights of one layer: query, key and value projections fused, gate and up projections fused."""

    __slots__ = (
        *("after_attention", "after_mlp", "attention_options", "before_attention", "before_mlp"),
        *("down", "gate_up", "out", "qk_norm", "qkv"),
    )

    def __init__(self, config: ModelConfig, index: int, weights: _Weights) -> None:
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        hidden, q_dim, kv_dim = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        self.attention_options = AttentionOptions(
            config.attention_scale, config.window(index), config.attention_soft_cap
        )

        def norm(name: str | None) -> Tensor | None:
            return weights.norm(f"{prefix}.{name}.weight", hidden) if name else None

        norms = config.family.norms
        self.before_attention = norm(norms.before_attention)
        self.after_attention = norm(norms.after_attention)
        self.before_mlp = norm(norms.before_mlp)
        self.after_mlp = norm(norms.after_mlp)
        self.qkv = weights.linear(
            hidden,
            [(f"{attention}.q_proj", q_dim), (f"{attention}.k_proj", kv_dim), (f"{attention}.v_proj", kv_dim)],
            config.qkv_bias,
        )
        self.qk_norm: QKNorm | None = None
        if config.family.qk_norm is not None:
            q_size, k_size = config.qk_norm_sizes
            self.qk_norm = QKNorm(
                weights.norm(f"{attention}.q_norm.weight", q_size),
                weights.norm(f"{attention}.k_norm.weight", k_size),
                config.norm_eps,
            )
        self.out = weights.linear(q_dim, [(f"{attention}.o_proj", hidden)], config.out_bias)
        inner = config.intermediate_size
        self.gate_up = weights.linear(
            hidden, [(f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner)]
        )
        self.down = weights.linear(inner, [(f"{prefix}.mlp.down_proj", hidden)])


class Decoder:
    """Embedding, layers and output head; holds weights only, never a request's state.

    Each row of the result depends on its own input row and on the keys and values that it attends to, as the
    kernels promise; nothing here looks at the number of rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        packer: Packer,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightSource,
        max_model_len: int | None = None,
    ) -> None:
        """Take every weight from ``weights``, layer by layer, so that at most one layer is held twice.

        No sequence may be longer than ``max_model_len``, by default the model's context.
        """
        self.config = config
        self.kernels = packer.kernels
        self.dtype = dtype
        self.device = device
        self.layout = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        self.embedding_scale: float | None = None
        if config.family.scaled_embedding:
            self.embedding_scale = float(torch.tensor(config.hidden_size**0.5).to(dtype))
        self.rows_are_normed = config.family.qk_norm is QKNormSpan.ROW
        reader = _Weights(packer, dtype, device, weights, config.family)
        self.embedding = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index, reader) for index in range(config.num_layers)]
        self.layers_run = 0
        """Since the start, in all steps. It grows while a step runs; a replay adds all layers at its end."""
        self.norm = reader.norm("model.norm.weight", config.hidden_size)
        self.head: PackedLinear
        if config.tie_word_embeddings:
            self.head = packer.pack(self.embedding, None, head=True)
        else:
            self.head = reader.linear(config.hidden_size, [("lm_head", config.vocab_size)], head=True)
        self.screened_rows = 0 if config.logit_soft_cap is not None else self.head.screened_rows
        """See :attr:`PackedLinear.screened_rows`."""
        self.weight_form = packer.form
        """How matrices are kept, as :attr:`Packer.form` has it."""
        # Last, once the weights have confirmed the sizes.
        self.cos_sin = rope_table(config, max_model_len, device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        kv_pool: Tensor,
        metadata: AttentionMetadata,
        sample_rows: Tensor,
        choices: Choices | None = None,
    ) -> Tensor:
        """One step: write the keys and values of the new tokens, return the logits of some rows.

        These are :meth:`hidden` and then :meth:`logits`.

        Args:
            token_ids: int64 ``[T]``, the new tokens of all requests, in the order of ``metadata``.
            kv_pool: ``[blocks, layers, 2, block_size, kv_heads, head_dim]`` in the model's dtype.
            metadata: which request each row belongs to, and its blocks.
            sample_rows: int64 ``[S]``, the rows of ``token_ids`` to return logits of.
            choices: if given, logits that do not matter for them may be minus infinity.

        Returns:
            float32 ``[S, vocab_size]``. The output head's are rounded to the model's dtype, as in transformers;
            a soft cap on them is in float32.
        """
        x = self.hidden(token_ids, kv_pool, metadata, sample_rows)
        if not sample_rows.numel():
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        return self.logits(x, choices)

    def logits(self, x: Tensor, choices: Choices | None = None) -> Tensor:
        """``[S, hidden_size]``, what :meth:`hidden` gives, to logits, float32 ``[S, vocab_size]``."""
        cap = self.config.logit_soft_cap
        if cap is not None:  # it changes what the bounds of logits say
            return self.kernels.soft_cap(self.kernels.logits(x, self.head), cap)
        if choices is None:
            return self.kernels.logits(x, self.head)
        return self.kernels.deciding_logits(x, self.head, choices)

    def hidden(
        self, token_ids: Tensor, kv_pool: Tensor, metadata: AttentionMetadata, sample_rows: Tensor
    ) -> Tensor:
        """The part of :meth:`forward` before the output head: ``[S, hidden_size]``, normed."""
        kernels, eps, activation = self.kernels, self.config.norm_eps, self.config.activation
        residual = kernels.embed(token_ids, self.embedding, self.embedding_scale)
        first = self.layers[0].before_attention
        x = residual if first is None else kernels.rms_norm(residual, first, eps)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            self.layers_run += 1
            kv_layer = kv_pool[:, index]
            qkv = kernels.linear(x, layer.qkv)
            head_norm = layer.qk_norm
            if self.rows_are_normed and layer.qk_norm is not None:
                self._norm_rows(qkv, layer.qk_norm)
                head_norm = None
            q = kernels.rope_and_write_kv(qkv, self.layout, self.cos_sin, kv_layer, metadata, head_norm)
            if index == last and not sample_rows.numel():
                break
            attended = kernels.attention(q, kv_layer, metadata, layer.attention_options).flatten(1)
            if index == last:
                # All keys and values are written, so only the sampled rows need what follows.
                attended = kernels.take_rows(attended, sample_rows)
                residual = kernels.take_rows(residual, sample_rows)
            x = kernels.linear(attended, layer.out)
            if layer.after_attention is not None:
                x = kernels.rms_norm(x, layer.after_attention, eps)
            x = self._add(x, residual, layer.before_mlp)
            x = kernels.activate_mul(kernels.linear(x, layer.gate_up), activation)
            x = kernels.linear(x, layer.down)
            if layer.after_mlp is not None:
                x = kernels.rms_norm(x, layer.after_mlp, eps)
            next_norm = self.norm if index == last else self.layers[index + 1].before_attention
            x = self._add(x, residual, next_norm)
        return x

    def _norm_rows(self, qkv: Tensor, norm: QKNorm) -> None:
        """Norm all heads of a query together, and all of a key, in place."""
        q_dim, kv_dim = norm.q_weight.numel(), norm.k_weight.numel()
        q, k = qkv[:, :q_dim], qkv[:, q_dim : q_dim + kv_dim]
        self.kernels.norm_in_place(q, norm.q_weight, norm.eps)
        self.kernels.norm_in_place(k, norm.k_weight, norm.eps)

    def _add(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> Tensor:
        """``residual += x`` in place; returns its norm, or the residual itself where there is no norm."""
        if norm is None:
            return self.kernels.add(x, residual)
        return self.kernels.add_rms_norm(x, residual, norm, self.config.norm_eps)


class _Weights:
    """Allocates and fills tensors in the model's dtype, and packs the weights of projections."""

    def __init__(
        self,
        packer: Packer,
        dtype: torch.dtype,
        device: torch.device,
        source: WeightSource,
        family: Family,
    ) -> None:
        self._packer = packer
        self._dtype = dtype
        self._device = device
        self._source = source
        self._family = family

    def norm(self, name: str, size: int) -> Tensor:
        """The weight of an RMS norm; in float32 where the kernels are to round once, at the end."""
        self._source.expect(name, (size,))
        weight = self._fill(name, self._empty(size))
        if self._family.norms_add_one:
            return weight.float() + 1.0
        return weight.float() if self._family.norms_round_once else weight

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        self._source.expect(name, (rows, columns))
        return self._fill(name, self._empty(rows, columns))

    def linear(
        self, in_features: int, parts: list[tuple[str, int]], bias: bool = False, head: bool = False
    ) -> PackedLinear:
        """The projections ``parts`` (name, output features) stacked into one matrix."""
        sizes = [size for _, size in parts]
        for name, size in parts:
            self._source.expect(f"{name}.weight", (size, in_features))
        weight = self._empty(sum(sizes), in_features)
        for (name, _), rows in zip(parts, torch.split(weight, sizes), strict=True):
            self._fill(f"{name}.weight", rows)
        bias_tensor: Tensor | None = None
        if bias:
            bias_tensor = self._empty(sum(sizes))
            for (name, _), rows in zip(parts, torch.split(bias_tensor, sizes), strict=True):
                self._fill(f"{name}.bias", rows)
        return self._packer.pack(weight, bias_tensor, head)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)

    def _fill(self, name: str, out: Tensor) -> Tensor:
        self._source.fill(name, out)
        return out
