"""The rotary table against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_checkpoints import MAX_POSITION, ROPES, tiny_config

from engine.models.config import parse_model_config
from engine.models.rope import rope_table

VARIANTS: dict[str, dict[str, Any]] = {
    **ROPES,
    "llama 3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 with the context of the model": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 8.0,
    },
    "yarn as Qwen sets it": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn with its own attention factor": {**ROPES["yarn"], "attention_factor": 0.7},
    "yarn with two mscales": {**ROPES["yarn"], "mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn with other betas": {**ROPES["yarn"], "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn that shrinks": {**ROPES["yarn"], "factor": 0.5},
    "yarn whose ramp has no width": {**ROPES["yarn"], "beta_fast": 1000.0, "beta_slow": 900.0},
}


def their_table(config: Any, positions: torch.Tensor) -> Any:
    """Cosines and sines."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # imports take over a second

    return LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)


@pytest.mark.parametrize("head_dim", [12, 64])
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(name: str, head_dim: int) -> None:
    theirs = tiny_config("Llama", rope_parameters=dict(VARIANTS[name]), head_dim=head_dim)
    config = parse_model_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    table = rope_table(config)
    assert table.shape == (config.max_position_embeddings, 2, head_dim // 2)
    assert table.dtype == torch.float32
    positions = torch.arange(MAX_POSITION)[None]
    cos, sin = their_table(theirs, positions)
    torch.testing.assert_close(table[:MAX_POSITION, 0], cos[0, :, : head_dim // 2], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:MAX_POSITION, 1], sin[0, :, : head_dim // 2], atol=1e-6, rtol=0)


def test_a_shorter_table_is_the_beginning_of_the_whole() -> None:
    theirs = tiny_config("Llama", rope_parameters=dict(VARIANTS["yarn"]))
    config = parse_model_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert torch.equal(rope_table(config, 5), rope_table(config)[:5])


def test_kinds_differ() -> None:
    """A kind that fell back to the default would pass no test above by luck."""
    tables = [
        rope_table(parse_model_config({**tiny_config("Llama", rope_parameters=dict(rope)).to_dict(),
                                       "architectures": ["LlamaForCausalLM"]}))
        for rope in ROPES.values()
    ]  # fmt: skip
    for i, one in enumerate(tables):
        for other in tables[:i]:
            assert (one - other).abs().max() > 0.1


def test_far_positions_agree() -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    theirs = tiny_config("Llama", rope_parameters=rope, max_position_embeddings=131072)
    table = rope_table(parse_model_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    positions = torch.tensor([[8191, 65536, 131071]])
    cos, sin = their_table(theirs, positions)
    half = table.shape[-1]
    torch.testing.assert_close(table[positions[0], 0], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[positions[0], 1], sin[0, :, :half], atol=1e-6, rtol=0)
