"""A KV cache whose blocks say where their contents come from."""

from __future__ import annotations

import torch

from engine.kv.kv_cache import KVCache
from engine.models.config import ModelConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    max_position_embeddings=16,
)


def numbered(blocks: int, host_blocks: int = 0, device: str = "cpu") -> KVCache:
    """A cache whose device block ``i`` is full of ``i + 1``, and host block ``i`` of ``-i - 1``."""
    cache = KVCache(MODEL, blocks, 3, torch.float32, torch.device(device), host_blocks)
    for block in range(blocks):
        cache.pool[block] = block + 1
    for block in range(host_blocks):
        cache.host[block] = -block - 1
    return cache


def contents(tensor: torch.Tensor) -> list[int]:
    """The number that each block is full of, once all copies are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    numbers = []
    for block in tensor:
        assert (block == block.flatten()[0]).all()
        numbers.append(int(block.flatten()[0]))
    return numbers
