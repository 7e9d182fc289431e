"""Tiny random checkpoints of every family, and a paged run of the decoder, shared by the model tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.models.config import FAMILIES as ARCHITECTURES
from engine.models.decoder import Decoder
from kernels.interface import AttentionMetadata, kv_pool_shape

VOCAB = 97
MAX_POSITION = 128
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 12},
    "Gemma": {"head_dim": 12},
    "Gemma2": {
        "head_dim": 12,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "Olmo2": {},
}
"""For each family what its tiny configuration has that others' have not."""


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers configuration of two layers; no window hides anything unless ``changes`` say otherwise."""
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(ROPES["default"]),
    }
    return getattr(transformers, f"{family}Config")(**{**options, **FAMILIES[family], **changes})


def save_tiny(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Save a random float32 model; returns it in eval mode, with eager attention.

    The weights are large enough for logits of several units, so that a wrong angle or mask shows.
    """
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(0.0 if ARCHITECTURES[f"{family}ForCausalLM"].norms_add_one else 1.0, 0.2)
            elif weight.ndim == 1 or "embed" in name:
                weight.normal_(0.0, 0.5)
            else:
                weight.normal_(0.0, 1.3 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


class PagedRun:
    """Feeds sequences to a decoder step by step, over one pool with scattered blocks."""

    def __init__(self, decoder: Decoder, sequences: list[Tensor], block_size: int = 4) -> None:
        config = decoder.config
        self._decoder, self._sequences, self._block_size = decoder, sequences, block_size
        widest = max(-(-len(sequence) // block_size) for sequence in sequences)
        num_blocks = widest * len(sequences) + 3
        self.pool = torch.full(
            kv_pool_shape(num_blocks, config.num_layers, block_size, config.num_kv_heads, config.head_dim),
            1e4,  # what is not written yet may hold anything finite
            dtype=decoder.dtype,
            device=decoder.device,
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self._tables = order[: widest * len(sequences)].view(len(sequences), widest).to(torch.int32)
        self._computed = [0] * len(sequences)

    def step(self, counts: list[int], sample_rows: Tensor | None = None) -> Tensor:
        """Run the next ``counts[i]`` tokens of sequence ``i``; logits of all new rows, or of some."""
        active = [index for index, count in enumerate(counts) if count]
        tokens, positions, slots, starts = [], [], [], [0]
        for index in active:
            begin, end = self._computed[index], self._computed[index] + counts[index]
            place = torch.arange(begin, end)
            blocks = self._tables[index].long()[place // self._block_size]
            tokens.append(self._sequences[index][begin:end])
            positions.append(place)
            slots.append(blocks * self._block_size + place % self._block_size)
            starts.append(starts[-1] + counts[index])
            self._computed[index] = end
        contexts = [self._computed[index] for index in active]
        device = self._decoder.device
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=self._tables[active].contiguous().to(device),
            positions=torch.cat(positions).to(device),
            slot_mapping=torch.cat(slots).to(device),
            max_query_len=max(counts),
            max_context_len=max(contexts),
        )
        rows = torch.arange(starts[-1]) if sample_rows is None else sample_rows
        return self._decoder.forward(torch.cat(tokens).to(device), self.pool, metadata, rows.to(device))
